// Holds the tensors found against those that the configuration calls for.
#pragma once

#include <filesystem>
#include <vector>

#include "extractor/checkpoint/tensor_table.h"

namespace statetap {

// True where routed experts are packed INT4: by the tensors, whatever lists the configuration has.
bool IsQuantized(const TensorMap& tensors);

// INVALID_ARGUMENT names the first few tensors that are missing, misshapen (file, found, expected)
// or left over, and counts the rest.
absl::Status CheckInventory(const ModelConfig& config, bool quantized, const TensorTable& table);

// Reads every weight_shape (8 or 16 bytes each) and compares it with the configuration.
absl::Status CheckStoredShapes(const ModelConfig& config, const TensorTable& table);

}  // namespace statetap
