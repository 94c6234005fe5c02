// Many small reads all over a checkpoint, several at a time: on a cold disk each is a wait.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <vector>

#include "extractor/base/status.h"

namespace statetap {

struct SmallRead {
  int file;  // into `files`
  int64_t offset;
  std::span<std::byte> to;
};

// Fills every `to`. Reordered by place; a few descriptors are open at a time, whatever the number
// of files. OUT_OF_RANGE where a file ends before.
absl::Status ReadScattered(const std::vector<std::filesystem::path>& files,
                           std::vector<SmallRead> reads);

}  // namespace statetap
