// Stored samples as messages of a stream.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "extractor/shard/shard_reader.h"
#include "server/store/job_store.h"
#include "statetap/v1/features.pb.h"

namespace statetap {

// Takes a message; its data's states, where it has some, beside it, to be sent without a copy.
// Blocks while the network is full. False: the client has gone.
using FeatureOutlet = std::function<bool(const v1::StreamFeaturesResponse&, const StatesView&)>;

// INVALID_ARGUMENT where they are not ascending, each once, none negative, nor −1 alone.
absl::Status CheckBoundaries(std::span<const int> wanted);
// The boundaries of `wanted` in a job that has `stored`; an empty list: all of them; −1: none.
// INVALID_ARGUMENT names the one that is not there, or what CheckBoundaries says.
absl::StatusOr<std::vector<int>> SelectBoundaries(std::span<const int> wanted,
                                                  std::span<const int> stored);

struct Delivery {
  int64_t position = 0;  // among the shard's samples
  size_t job_index = 0;  // of the stream
  uint64_t delivery = 0;
};
// Sends one sample: its header, then its states in pieces of at most 2 MiB. CANCELLED where the
// client has gone, DATA_LOSS where the file was lost meanwhile.
absl::Status SendSample(const ShardReader& shard, const Delivery& delivery,
                        std::span<const int> boundaries, const FeatureOutlet& outlet);

v1::StreamHeader HeaderOf(const JobRecord& job, const ShardConfig& config,
                          std::span<const int> boundaries);

}  // namespace statetap
