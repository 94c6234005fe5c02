// Statistics of several shards as one.
#pragma once

#include <cstdint>
#include <vector>

#include "extractor/shard/alarms.h"
#include "extractor/shard/sample_filter.h"
#include "extractor/shard/shard_reader.h"
#include "extractor/shard/token_report.h"

namespace statetap {

struct JoinedStatistics {
  std::vector<int> boundaries;
  std::vector<BoundaryStatistics> statistics;  // by boundary
  TokenReport tokens;
  std::vector<ShardLevel> levels;  // of the shards that were added whole, in their order
  FinalCheck finals;               // of the same; whoever has the model's head scores them
  int64_t samples = 0, rows = 0;

  // What the shard says of itself or, where `filter` leaves samples out, of the others' states,
  // which are read. FAILED_PRECONDITION for boundaries or a hidden size other than those of the
  // shards before; nothing is added then.
  absl::Status Add(const ShardReader& shard, const SampleFilter& filter = {});

  // Of boundaries, shards and sources.
  std::vector<StatisticsAlarm> Alarms() const;

 private:
  absl::Status AddSamples(const ShardReader& shard, const SampleFilter& filter);
};

}  // namespace statetap
