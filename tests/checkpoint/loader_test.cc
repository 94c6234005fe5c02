#include "extractor/checkpoint/loader.h"

#include <cstring>
#include <mutex>
#include <random>

#include "extractor/base/file.h"
#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

const std::filesystem::path kTinyKimi = STATETAP_SOURCE_DIR "/models/tiny-kimi";

// Puts slices together and counts how often each byte came.
class CollectingSink : public SliceSink {
 public:
  explicit CollectingSink(std::span<const TensorSlice> slices) : slices_(slices) {
    for (const TensorSlice& slice : slices) {
      const size_t size = SizeOf(slice.tensor->dtype) * (slice.row_end - slice.row_begin) *
                          (slice.col_end - slice.col_begin);
      bytes_.emplace_back(size);
      times_.emplace_back(size, 0);
    }
  }
  void Deliver(size_t slice, int64_t first_row, int64_t rows, const std::byte* from,
               int64_t stride_bytes) override {
    const TensorSlice& wanted = slices_[slice];
    const size_t width = SizeOf(wanted.tensor->dtype) * (wanted.col_end - wanted.col_begin);
    const std::lock_guard lock(mutex_);
    for (int64_t row = 0; row < rows; ++row) {
      const size_t at = (first_row + row) * width;
      std::memcpy(bytes_[slice].data() + at, from + row * stride_bytes, width);
      for (size_t i = 0; i < width; ++i) ++times_[slice][at + i];
    }
  }
  const std::vector<std::byte>& bytes(size_t slice) const { return bytes_[slice]; }
  bool EachByteOnce() const {
    for (const auto& times : times_) {
      for (const int count : times) {
        if (count != 1) return false;
      }
    }
    return true;
  }

 private:
  std::span<const TensorSlice> slices_;
  std::mutex mutex_;
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<std::vector<int>> times_;
};

// The slice by plain reads, a row at a time.
std::vector<std::byte> PlainRead(const CheckpointIndex& index, const TensorSlice& slice) {
  const TensorInfo& tensor = *slice.tensor;
  const auto element = static_cast<int64_t>(SizeOf(tensor.dtype));
  const int64_t width = (slice.col_end - slice.col_begin) * element;
  std::vector<std::byte> bytes((slice.row_end - slice.row_begin) * width);
  auto file = File::OpenForRead(index.files()[tensor.file]);
  for (int64_t row = slice.row_begin; row < slice.row_end; ++row) {
    const int64_t offset = tensor.offset + row * RowBytesOf(tensor) + slice.col_begin * element;
    EXPECT_OK(
        file->ReadAt(offset, std::span(bytes).subspan((row - slice.row_begin) * width, width)));
  }
  return bytes;
}

TEST(LoaderTest, DeliversRandomRectanglesAsAPlainReadGivesThem) {
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(kTinyKimi));
  std::mt19937 random(1);
  const auto upto = [&](int64_t most) { return static_cast<int64_t>(random() % (most + 1)); };
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : index.tensors()) {
    TensorSlice slice = WholeOf(tensor);
    slice.row_begin = upto(slice.row_end - 1);
    slice.row_end = slice.row_begin + upto(slice.row_end - slice.row_begin);
    slice.col_begin = upto(slice.col_end - 1);
    slice.col_end = slice.col_begin + upto(slice.col_end - slice.col_begin);
    slices.push_back(slice);
    if (random() % 4 == 0) slices.push_back(WholeOf(tensor));
  }
  // Blocks smaller than a row, blocks that hold many tensors.
  for (const int64_t block_bytes : {1, 1000, 65536, 16 << 20}) {
    for (const int num_threads : {1, 3}) {
      CollectingSink sink(slices);
      ASSERT_OK(LoadSlices(index, slices, sink,
                           {.num_threads = num_threads, .block_bytes = block_bytes}));
      EXPECT_TRUE(sink.EachByteOnce());
      for (size_t i = 0; i < slices.size(); ++i) {
        ASSERT_EQ(sink.bytes(i), PlainRead(index, slices[i])) << slices[i].tensor->name;
      }
    }
  }
}

}  // namespace
}  // namespace statetap
