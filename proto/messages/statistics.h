// Statistics of shards as the contract's message: server and command line show the same.
#pragma once

#include <span>

#include "extractor/shard/statistics.h"
#include "statetap/v1/features.pb.h"

namespace statetap {

enum class Channels { kYes, kNo };
// By boundary, with the alarms they give. `samples` and `rows` are the caller's.
v1::Statistics StatisticsMessage(std::span<const int> boundaries,
                                 std::span<const BoundaryStatistics> statistics, Channels channels);

}  // namespace statetap
