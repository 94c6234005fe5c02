// How commands compare two captures of the same tokens: `compare`, `stats --compare`, `check
// --model`.
#pragma once

#include <string>

#include "client/cli/sample_source.h"
#include "client/cli/states_comparison.h"

namespace statetap {

struct CompareFlags {
  std::string model;  // for the head; empty: not compared
  std::string where;
  int64_t pairs = 0;  // 0: all
  int64_t head_rows = 256;
  size_t worst = 10;
  double max_error = 0;  // 0: no bound
};
// --pairs, --head-rows, --worst and --max-error.
void AddCompareFlags(CLI::App& app, CompareFlags& flags);

// `count` of the ids, evenly spread; all where it is 0.
std::vector<std::string> EvenlySpread(const std::vector<std::string>& ids, int64_t count);

// What stands beside one of our samples; nothing where there is none.
using Counterpart =
    std::function<absl::StatusOr<std::optional<SampleStates>>(const SampleStates& ours)>;
// Reads the samples of `ids`, or as many as flags.pairs of them, evenly spread, and compares each
// with its counterpart. Ids without one are the comparison's only_here.
absl::StatusOr<StatesComparison> ComparePairs(Context& context, SampleSource& ours,
                                              const std::vector<std::string>& ids,
                                              const Counterpart& counterpart,
                                              const CompareFlags& flags);

// Pairs the samples of two jobs or of two sets of shards by id, and prints what differs.
absl::StatusOr<int> CompareSources(Context& context, const std::vector<std::string>& ours,
                                   const std::string& theirs, const CompareFlags& flags);

}  // namespace statetap
