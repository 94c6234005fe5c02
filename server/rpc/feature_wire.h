// Messages of a stream as bytes for the network: what protobuf would write, with the states lent
// instead of copied.
#pragma once

#include <grpcpp/grpcpp.h>

#include "extractor/shard/shard_reader.h"
#include "statetap/v1/features.pb.h"

namespace statetap {

// `states` becomes the states of `message.data()`, which has none yet, and is kept until the
// network has taken it.
grpc::ByteBuffer ToWire(const v1::StreamFeaturesResponse& message, const StatesView& states);

}  // namespace statetap
