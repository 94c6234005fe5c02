// Moves weights from the files to the ranks: each byte is read once, in large reads on several
// threads, past the page cache where the file system allows that, and every rank gets its slices.
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

// The tensor as such a rectangle.
int64_t RowsOf(const TensorInfo& tensor);
int64_t ColsOf(const TensorInfo& tensor);
int64_t RowBytesOf(const TensorInfo& tensor);
TensorSlice WholeOf(const TensorInfo& tensor);

// Takes pieces of slices, from several threads at once, in any order; together they cover each
// slice exactly once.
class SliceSink {
 public:
  virtual ~SliceSink() = default;
  // Rows [first_row, first_row + rows) of slices[slice], counted from the slice's own first row;
  // `from` is the first byte of the first of them, the next row lies `stride_bytes` behind. Valid
  // during the call only. Aligned as the tensor is in its file: files may have it at odd bytes.
  virtual void Deliver(size_t slice, int64_t first_row, int64_t rows, const std::byte* from,
                       int64_t stride_bytes) = 0;
};

struct LoadProgress {
  int64_t bytes_done, bytes_total;
  double seconds;
};

struct LoadOptions {
  int num_threads = 4;
  // Of one read and of each thread's buffer; a row that is larger is read whole.
  int64_t block_bytes = int64_t{16} << 20;
  // From one thread at a time, a few times a second and once at the end.
  std::function<void(const LoadProgress&)> progress;
};

// Returns when every slice was delivered. Rows that a slice touches are read whole, once, whatever
// the number of slices; other rows and tensors are not. OUT_OF_RANGE (a file cut short), INTERNAL,
// … name the file and the tensor that could not be read; INVALID_ARGUMENT a slice outside its
// tensor. An exception of the sink ends the load and leaves through this call.
absl::Status LoadSlices(const CheckpointIndex& checkpoint, std::span<const TensorSlice> slices,
                        SliceSink& sink, const LoadOptions& options);

}  // namespace statetap
