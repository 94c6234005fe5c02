// The header of a safetensors file: 8 bytes of length (little endian), a JSON object of that
// length, then the tensors' bytes back to back. Nothing of the data is read here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/dtype.h"
#include "extractor/base/status.h"

namespace statetap {

// The format's own bound on a header.
inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as written: "BF16"
  std::vector<int64_t> shape;
  int64_t offset = 0;  // of its first byte in the file
  int64_t size_bytes = 0;
};

// Our type for "BF16", …; none for types that no text tensor has ("U16", "F4").
std::optional<DType> DTypeOfSafetensors(std::string_view name);
std::string_view SafetensorsNameOf(DType dtype);

// Parses the JSON of a header in front of `data_bytes` bytes of tensors; offsets are counted from
// `data_offset`. The tensors have to fill the data without overlap and without holes, and dtype ×
// shape has to be the size. INVALID_ARGUMENT names the tensor, what was found and what was
// expected; OUT_OF_RANGE where tensors lie behind the end (a file cut short). Time and memory grow
// with the header's size alone. Sorted by offset.
absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(std::string_view header,
                                                                     int64_t data_offset,
                                                                     int64_t data_bytes);

// The same of a file; messages start with its path.
absl::StatusOr<std::vector<SafetensorsEntry>> ReadSafetensorsHeader(
    const std::filesystem::path& path);

// Length and JSON, padded so that the data begin at a multiple of 8. Lays the tensors out in the
// order given and sets their offset and size_bytes.
std::string MakeSafetensorsHeader(std::vector<SafetensorsEntry>& entries);

}  // namespace statetap
