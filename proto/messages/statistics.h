// Statistics of shards as the contract's message: server and command line show the same.
#pragma once

#include "extractor/shard/joined_statistics.h"
#include "statetap/v1/features.pb.h"

namespace statetap {

enum class Channels { kYes, kNo };
v1::Statistics StatisticsMessage(const JoinedStatistics& joined, Channels channels);

}  // namespace statetap
