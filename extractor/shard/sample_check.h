// What a shard takes: INVALID_ARGUMENT that names the field, the value and what is expected.
#pragma once

#include <cstdint>
#include <span>

#include "extractor/base/status.h"
#include "extractor/shard/shard_writer.h"

namespace statetap {

absl::Status CheckConfig(const ShardConfig& config);
// Sizes, values and texts. HDF5 strings end at NUL and readers decode them, so texts are UTF-8
// without NUL.
absl::Status CheckSample(const SampleRecord& sample, const ShardConfig& config,
                         std::span<const std::span<const uint16_t>> states);

}  // namespace statetap
