// A shard read again, as the contract's message: server and command line find the same.
#pragma once

#include "extractor/shard/shard_reader.h"
#include "statetap/v1/features.pb.h"

namespace statetap {

// Checksums of every sample, and statistics made again; `shard` of the result is the caller's.
v1::CheckResult CheckShard(const ShardReader& shard);

}  // namespace statetap
