// Which bytes a load reads, and in which pieces. Pure: no file is touched.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "extractor/checkpoint/loader.h"

namespace statetap {

// Whole rows of one tensor that lie in one block.
struct LoadPiece {
  const TensorInfo* tensor;
  int64_t row_begin, row_end;
  const std::vector<size_t>* slices;  // of this tensor, into the list given
};

// One read. Its pieces ascend; gaps between them are small.
struct LoadBlock {
  int file;
  int64_t begin, end;  // in the file
  std::vector<LoadPiece> pieces;
};

struct LoadPlan {
  // Rows that a slice touches are read whole, once. Blocks have at most `block_bytes`, except where
  // one row is larger. INVALID_ARGUMENT for a slice outside its tensor.
  static absl::StatusOr<LoadPlan> Make(const CheckpointIndex& checkpoint,
                                       std::span<const TensorSlice> slices, int64_t block_bytes);

  std::vector<LoadBlock> blocks;  // by file and offset
  int64_t bytes_total = 0;        // of all pieces
  // By file and offset, so that copies of one TensorInfo are one tensor. Blocks point into it.
  struct Wanted {
    const TensorInfo* tensor;
    std::vector<size_t> slices;
  };
  std::map<std::pair<int, int64_t>, Wanted> wanted;
};

}  // namespace statetap
