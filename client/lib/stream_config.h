// The attributes of a job's shards, as a stream's header carries them, back as a ShardConfig: with
// it the receiving side writes shards that say the same.
#pragma once

#include "extractor/shard/shard_writer.h"
#include "statetap/v1/features.pb.h"

namespace statetap {

// DATA_LOSS where the header has no sane hidden size or boundaries, or its attributes are no JSON
// object. Attributes that are missing stay empty.
absl::StatusOr<ShardConfig> ShardConfigOf(const v1::StreamHeader& header);

}  // namespace statetap
