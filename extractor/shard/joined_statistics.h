// Statistics of several shards as one.
#pragma once

#include <cstdint>
#include <vector>

#include "extractor/shard/sample_filter.h"
#include "extractor/shard/shard_reader.h"

namespace statetap {

struct JoinedStatistics {
  std::vector<int> boundaries;
  std::vector<BoundaryStatistics> statistics;  // by boundary
  int64_t samples = 0, rows = 0;

  // What the shard says of itself or, where `filter` leaves samples out, of the others' states,
  // which are read. FAILED_PRECONDITION for boundaries or a hidden size other than those of the
  // shards before; nothing is added then.
  absl::Status Add(const ShardReader& shard, const SampleFilter& filter = {});

 private:
  absl::Status AddSamples(const ShardReader& shard, const SampleFilter& filter);
};

}  // namespace statetap
