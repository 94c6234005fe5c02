// What is suspicious about a job's statistics, with the reason in words. Massive activations are
// normal in this family of models and no alarm.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "extractor/shard/final_check.h"
#include "extractor/shard/statistics.h"
#include "extractor/shard/token_report.h"

namespace statetap {

struct StatisticsAlarm {
  // zero_boundary, constant_boundary, equal_boundaries, nonfinite, normed_boundary, shard_drift,
  // final_mismatch, policy_gap
  std::string kind;
  int boundary;  // -1 where it concerns none
  std::string message;
};

// Boundaries that are zero, constant, equal to another, not finite, or look normed: nearly every
// row has the same rms, less than half of that of a boundary before. `boundaries[i]` belongs to
// `statistics[i]`.
std::vector<StatisticsAlarm> FindAlarms(std::span<const int> boundaries,
                                        std::span<const BoundaryStatistics> statistics);

// Median rms of a shard's rows, by boundary.
struct ShardLevel {
  std::string shard;  // file name
  int64_t rows = 0;
  std::vector<double> median_rms;
};
// Shards of at least 256 rows whose median rms at a boundary is more than 1.4 times away from the
// median of all such shards; fewer than three shards are not compared.
std::vector<StatisticsAlarm> FindDrift(std::span<const int> boundaries,
                                       std::span<const ShardLevel> shards);

// One for all shards whose final states give the stored tokens other probabilities than those
// stored with them: log-odds a mean of more than 0.1 nats away (0.25 of fp8 states), of four tokens
// or more. `boundary`: the final one.
std::vector<StatisticsAlarm> FindFinalMismatch(int boundary, const FinalCheck& finals);

// Sources whose policy gap is above 0.5 nats, five standard errors of it included.
std::vector<StatisticsAlarm> FindPolicyGaps(const TokenReport& tokens);

}  // namespace statetap
