// Statistics of several shards as one.
#pragma once

#include <cstdint>
#include <vector>

#include "extractor/shard/shard_reader.h"

namespace statetap {

struct JoinedStatistics {
  std::vector<int> boundaries;
  std::vector<BoundaryStatistics> statistics;  // by boundary
  int64_t samples = 0, rows = 0;

  // FAILED_PRECONDITION for boundaries or a hidden size other than those of the shards before;
  // nothing is added then.
  absl::Status Add(const ShardReader& shard);
};

}  // namespace statetap
