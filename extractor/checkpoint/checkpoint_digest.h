#pragma once

#include <string>

#include "extractor/checkpoint/tensor_table.h"

namespace statetap {

// See CheckpointIndex::digest().
absl::StatusOr<std::string> DigestOf(const ModelConfig& config, const TensorTable& table);

}  // namespace statetap
