// Options that describe a job, shared by `submit`, `tokens` and `ask`.
#pragma once

#include <CLI/App.hpp>
#include <optional>
#include <string>

#include "extractor/base/status.h"
#include "statetap/v1/jobs.pb.h"

namespace statetap {

struct JobFlags {
  // What the text looks like.
  std::string mode, template_name, thinking, keep_reasoning, turns;
  std::string supervise, supervise_thought, supervise_stop, assistant_specials;
  bool parse_special = false;
  // What is sampled.
  std::optional<int64_t> max_new_tokens;
  std::optional<double> temperature, top_p;
  std::optional<uint64_t> seed;
  // What is captured and how it is kept.
  std::string name, taps, too_long, shard_bytes, logprobs;
  bool no_final = false;
  std::optional<int64_t> max_length;
  std::optional<double> eval_fraction;
  int32_t priority = 0;
  std::string states;
  int64_t gate = 0;
};

void AddTextFlags(CLI::App& app, JobFlags& flags);
void AddSamplingFlags(CLI::App& app, JobFlags& flags);
void AddCaptureFlags(CLI::App& app, JobFlags& flags);

// INVALID_ARGUMENT names the option, the value and what is known. Ranges that depend on the model
// are the server's to check.
absl::StatusOr<v1::JobOptions> OptionsFrom(const JobFlags& flags);

// "2,30,58" (boundaries), "output:1,29,57" (the same as outputs of layers) or "eagle3" (the
// server's default: empty). Ascending, no duplicates.
absl::StatusOr<std::vector<int>> ParseTaps(std::string_view text);

}  // namespace statetap
