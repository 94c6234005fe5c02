// A job in words, and how a job that ended becomes an exit code.
#pragma once

#include <string>

#include "client/cli/command.h"
#include "client/cli/format.h"

namespace statetap {

inline constexpr std::string_view kLostServer =
    "lost the server; trying again (the job is safe there)";

std::string StateName(v1::JobState state);  // "running"

std::string ShardsPaths(const v1::Job& job);  // of all disks

// Several lines: state, counts, tokens, rate, shards, boundaries in both numberings.
std::string DescribeJob(const v1::Job& job);

// 0, 1 (failed, cancelled) or 3 (more rejected than allowed).
int ExitCodeOf(const v1::Job& job, const Allowance& max_rejected);

// Shows progress until the job ends; what to do next goes to standard error where it was rejected
// samples or an interruption. `each` (may be null) gets every state.
absl::StatusOr<v1::Job> FollowJob(Context& context, const std::string& job,
                                  const std::function<void(const v1::Job&)>& each);

}  // namespace statetap
