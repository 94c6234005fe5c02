// Statistics of a shard made again from its states.
#pragma once

#include <span>

#include "extractor/shard/shard_reader.h"

namespace statetap {

// Reads one sample's states and adds them: `statistics[i]` is of the shard's i-th boundary.
absl::Status AddStoredStates(const ShardReader& shard, int64_t sample, const SampleRecord& record,
                             std::span<BoundaryStatistics> statistics);

// Reads all states. DATA_LOSS names the first boundary whose statistics in the shard are not those
// of its states, the figure, and both values. Statistics of fp8 states are of the captured ones,
// before rounding: only their counts of rows are compared. Those of evicted states, those left out
// when the shard was written, and figures that an older shard does not have are not compared.
absl::Status CheckStatistics(const ShardReader& shard);

}  // namespace statetap
