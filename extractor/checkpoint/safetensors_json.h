// The two JSON texts of a checkpoint that can be large and hostile, read event by event: a tree of
// them would cost many times their size, and looking keys up in it the square of their number.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "extractor/base/status.h"

namespace statetap {

struct HeaderTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // data_offsets
};

// {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {…}}.
// Anything else is INVALID_ARGUMENT with its place. Values are not judged here.
absl::StatusOr<std::vector<HeaderTensor>> ParseHeaderJson(std::string_view text);

struct IndexJson {
  std::vector<std::pair<std::string, std::string>> weight_map;  // tensor, file; as written
  std::optional<int64_t> total_size;                            // metadata.total_size, bytes
};

// {"metadata": {"total_size": 12}, "weight_map": {"tensor": "file", …}}.
absl::StatusOr<IndexJson> ParseIndexJson(std::string_view text);

}  // namespace statetap
