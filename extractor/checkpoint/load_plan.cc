#include "extractor/checkpoint/load_plan.h"

#include <algorithm>

namespace statetap {
namespace {

// Reading over a gap this small costs less than another read: a few bytes of weight_shape lie
// between the experts' matrices.
constexpr int64_t kGapBytes = 64 << 10;

struct RowRange {
  int64_t begin, end;
};

absl::Status CheckSlice(const CheckpointIndex& checkpoint, const TensorSlice& slice) {
  if (slice.tensor == nullptr) return absl::InvalidArgumentError("a slice of no tensor");
  const TensorInfo& tensor = *slice.tensor;
  const bool ours = tensor.file >= 0 && tensor.file < static_cast<int>(checkpoint.files().size());
  const bool inside = 0 <= slice.row_begin && slice.row_begin <= slice.row_end &&
                      slice.row_end <= RowsOf(tensor) && 0 <= slice.col_begin &&
                      slice.col_begin <= slice.col_end && slice.col_end <= ColsOf(tensor);
  if (ours && inside) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("slice [{}, {}) x [{}, {}) of {}, which has {} rows of {} elements in file {}",
                  slice.row_begin, slice.row_end, slice.col_begin, slice.col_end, tensor.name,
                  RowsOf(tensor), ColsOf(tensor), tensor.file));
}

// The rows that any of the slices touches, ascending, apart from each other.
std::vector<RowRange> MergedRows(std::span<const TensorSlice> slices,
                                 const std::vector<size_t>& numbers) {
  std::vector<RowRange> ranges;
  for (const size_t i : numbers) {
    if (slices[i].row_begin < slices[i].row_end && slices[i].col_begin < slices[i].col_end) {
      ranges.push_back({slices[i].row_begin, slices[i].row_end});
    }
  }
  std::ranges::sort(ranges, {}, &RowRange::begin);
  std::vector<RowRange> merged;
  for (const RowRange& range : ranges) {
    if (!merged.empty() && range.begin <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, range.end);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

class BlockBuilder {
 public:
  BlockBuilder(LoadPlan& plan, int64_t block_bytes)
      : plan_(plan), block_bytes_(std::max<int64_t>(1, block_bytes)) {}

  // Rows in ascending order of file and offset.
  void Add(const TensorInfo& tensor, RowRange rows, const std::vector<size_t>& slices) {
    const int64_t row_bytes = RowBytesOf(tensor);
    plan_.bytes_total += (rows.end - rows.begin) * row_bytes;
    while (rows.begin < rows.end) {
      const int64_t begin = tensor.offset + rows.begin * row_bytes;
      const int64_t fit = RoomAt(tensor.file, begin) / row_bytes;
      if (fit == 0) {
        // An empty block takes one row, however large.
        StartBlock(tensor.file, begin);
      }
      const int64_t count = std::min(rows.end - rows.begin, std::max<int64_t>(1, fit));
      LoadBlock& block = plan_.blocks.back();
      block.pieces.push_back({&tensor, rows.begin, rows.begin + count, &slices});
      block.end = begin + count * row_bytes;
      rows.begin += count;
    }
  }

 private:
  // Bytes that the open block can take from `begin` on.
  int64_t RoomAt(int file, int64_t begin) const {
    if (plan_.blocks.empty()) return 0;
    const LoadBlock& block = plan_.blocks.back();
    if (block.file != file || begin - block.end > kGapBytes) return 0;
    return std::max<int64_t>(0, block.begin + block_bytes_ - begin);
  }
  void StartBlock(int file, int64_t begin) {
    plan_.blocks.push_back({.file = file, .begin = begin, .end = begin});
  }

  LoadPlan& plan_;
  const int64_t block_bytes_;
};

}  // namespace

absl::StatusOr<LoadPlan> LoadPlan::Make(const CheckpointIndex& checkpoint,
                                        std::span<const TensorSlice> slices, int64_t block_bytes) {
  LoadPlan plan;
  for (size_t i = 0; i < slices.size(); ++i) {
    STATETAP_RETURN_IF_ERROR(CheckSlice(checkpoint, slices[i]));
    const TensorInfo& tensor = *slices[i].tensor;
    if (tensor.size_bytes == 0) continue;
    Wanted& wanted = plan.wanted[{tensor.file, tensor.offset}];
    wanted.tensor = &tensor;
    wanted.slices.push_back(i);
  }
  BlockBuilder builder(plan, block_bytes);
  for (const auto& [place, wanted] : plan.wanted) {
    for (const RowRange& rows : MergedRows(slices, wanted.slices)) {
      builder.Add(*wanted.tensor, rows, wanted.slices);
    }
  }
  return plan;
}

}  // namespace statetap
