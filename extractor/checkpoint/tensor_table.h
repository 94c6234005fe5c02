// Finds the text tensors of a checkpoint folder: which files there are, what their headers say, and
// whether the index agrees with them.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "extractor/checkpoint/checkpoint_index.h"

namespace statetap {

using TensorMap = std::map<std::string, TensorInfo, std::less<>>;

struct TensorTable {
  std::vector<std::filesystem::path> files;
  TensorMap tensors;  // of the text model, by our names
};

// What an index says. Empty where there is none and the tensors lie in a single file.
struct WeightIndex {
  std::unordered_map<std::string, std::string> files;  // tensor as stored → file in the folder
  std::optional<int64_t> total_size;                   // bytes of all tensors
};

// Reads model.safetensors.index.json; INVALID_ARGUMENT for files outside the folder and tensors
// given twice.
absl::StatusOr<WeightIndex> ReadWeightIndex(const std::filesystem::path& folder);

// The file of a folder that has no index.
absl::StatusOr<std::string> SingleWeightFile(const std::filesystem::path& folder);

// Reads model.safetensors.index.json and the headers of all files that hold text tensors, or the
// one safetensors file. Files of vision tensors alone are not opened. `config` tells which layers
// are multi-token prediction (left out, with a line in the log). Status as CheckpointIndex::Open.
absl::StatusOr<TensorTable> ReadTensorTable(const std::filesystem::path& folder,
                                            const ModelConfig& config);

}  // namespace statetap
