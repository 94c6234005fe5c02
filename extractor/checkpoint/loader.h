// Moves weights from the files to the ranks: each byte is read once, in large reads on several
// threads, and every rank gets its slices.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "extractor/checkpoint/checkpoint_index.h"

namespace statetap {

// A rectangle of a tensor seen as [rows, cols]: the first dimension, and the rest multiplied. A
// one-dimensional tensor is [1, n]. Several slices may be of one tensor; they may overlap
// (replicated weights).
struct TensorSlice {
  const TensorInfo* tensor;
  int64_t row_begin, row_end;
  int64_t col_begin, col_end;  // in stored elements
};

// Takes pieces of slices, from several threads at once, in any order; together they cover each
// slice exactly once.
class SliceSink {
 public:
  virtual ~SliceSink() = default;
  // Rows [first_row, first_row + rows) of slices[slice], counted from the slice's own first row;
  // `from` is the first byte of the first of them, the next row lies `stride_bytes` behind. Valid
  // during the call only.
  virtual void Deliver(size_t slice, int64_t first_row, int64_t rows, const std::byte* from,
                       int64_t stride_bytes) = 0;
};

struct LoadProgress {
  int64_t bytes_done, bytes_total;
  double seconds;
};

struct LoadOptions {
  int num_threads = 4;
  int64_t block_bytes = int64_t{16} << 20;  // of one read
  // From one thread at a time, a few times a second and once at the end.
  std::function<void(const LoadProgress&)> progress;
};

// Returns when every slice was delivered. OUT_OF_RANGE, INTERNAL, … name the file that could not be
// read.
absl::Status LoadSlices(const CheckpointIndex& checkpoint, std::span<const TensorSlice> slices,
                        SliceSink& sink, const LoadOptions& options);

}  // namespace statetap
