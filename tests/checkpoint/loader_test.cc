#include "extractor/checkpoint/loader.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>

#include "extractor/base/file.h"
#include "extractor/checkpoint/load_plan.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using testing::StatusIs;

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

// Every byte of the text model, once; how eight ranks take it (rows, columns, replicas) does not
// change what is read.
TEST(LoaderTest, ReadsEachByteOnceForAllRanks) {
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(kTinyKimi));
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : index.tensors()) {
    for (int64_t rank = 0; rank < 8; ++rank) {
      TensorSlice slice = WholeOf(tensor);
      if (name.find("down_proj") != name.npos && slice.col_end % 8 == 0) {
        slice.col_begin = slice.col_end * rank / 8;
        slice.col_end = slice.col_end * (rank + 1) / 8;
      } else if (slice.row_end % 8 == 0) {
        slice.row_begin = slice.row_end * rank / 8;
        slice.row_end = slice.row_end * (rank + 1) / 8;
      }
      slices.push_back(slice);
    }
  }
  CollectingSink sink(slices);
  std::vector<LoadProgress> reports;
  ASSERT_OK(LoadSlices(index, slices, sink, {.progress = [&](const LoadProgress& progress) {
                         reports.push_back(progress);
                       }}));
  EXPECT_TRUE(sink.EachByteOnce());
  for (size_t i = 0; i < slices.size(); ++i) {
    ASSERT_EQ(sink.bytes(i), PlainRead(index, slices[i])) << slices[i].tensor->name;
  }
  ASSERT_FALSE(reports.empty());
  EXPECT_EQ(reports.back().bytes_done, index.total_bytes());
  EXPECT_EQ(reports.back().bytes_total, index.total_bytes());
}

TEST(LoaderTest, ReadsOnlyTheRowsThatSlicesTouch) {
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(kTinyKimi));
  const TensorInfo& embedding = *index.Find("model.embed_tokens.weight");
  // A copy of the description is the same tensor.
  const TensorInfo copy = embedding;
  const TensorSlice slices[] = {{&embedding, 10, 20, 0, 128},
                                {&copy, 15, 30, 64, 128},
                                {&embedding, 100, 101, 3, 4},
                                {&embedding, 5, 5, 0, 128},
                                {&embedding, 50, 60, 7, 7}};
  CollectingSink sink(slices);
  int64_t bytes = 0;
  ASSERT_OK(LoadSlices(index, slices, sink, {.progress = [&](const LoadProgress& progress) {
                         bytes = progress.bytes_total;
                       }}));
  EXPECT_TRUE(sink.EachByteOnce());
  EXPECT_EQ(bytes, (20 + 1) * 128 * 2);
  for (size_t i = 0; i < std::size(slices); ++i) {
    EXPECT_EQ(sink.bytes(i), PlainRead(index, slices[i]));
  }
}

// The plan's blocks hold whole rows, ascend, and never overlap.
TEST(LoadPlanTest, BlocksAreBoundedAndApart) {
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(kTinyKimi));
  std::vector<TensorSlice> slices;
  int64_t largest_row = 0;
  for (const auto& [name, tensor] : index.tensors()) {
    slices.push_back(WholeOf(tensor));
    largest_row = std::max(largest_row, RowBytesOf(tensor));
  }
  for (const int64_t block_bytes : {100, 5000, 1 << 20}) {
    ASSERT_OK_AND_ASSIGN(const LoadPlan plan, LoadPlan::Make(index, slices, block_bytes));
    std::pair<int, int64_t> last = {0, 0};
    int64_t bytes = 0;
    for (const LoadBlock& block : plan.blocks) {
      EXPECT_LE(last, std::pair(block.file, block.begin));
      EXPECT_LE(block.end - block.begin, std::max(block_bytes, largest_row));
      last = {block.file, block.end};
      for (const LoadPiece& piece : block.pieces) {
        bytes += (piece.row_end - piece.row_begin) * RowBytesOf(*piece.tensor);
      }
    }
    EXPECT_EQ(bytes, plan.bytes_total);
    EXPECT_EQ(bytes, index.total_bytes());
    if (block_bytes == 1 << 20) {
      EXPECT_LT(plan.blocks.size(), 20u);
    }
  }
}

TEST(LoaderTest, NothingToLoadIsFine) {
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(kTinyKimi));
  CollectingSink sink({});
  EXPECT_OK(LoadSlices(index, {}, sink, {}));
}

TEST(LoaderTest, RefusesSlicesOutsideTheirTensor) {
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(kTinyKimi));
  const TensorInfo& norm = *index.Find("model.norm.weight");
  CollectingSink sink({});
  for (const TensorSlice& slice :
       {TensorSlice{nullptr, 0, 1, 0, 1}, TensorSlice{&norm, 0, 2, 0, 1},
        TensorSlice{&norm, 0, 1, 0, 129}, TensorSlice{&norm, -1, 1, 0, 1},
        TensorSlice{&norm, 1, 0, 0, 1}, TensorSlice{&norm, 0, 1, 5, 4}}) {
    EXPECT_THAT(LoadSlices(index, std::span(&slice, 1), sink, {}),
                StatusIs(absl::StatusCode::kInvalidArgument, "slice"));
  }
}

TEST(LoaderTest, AFileCutAfterOpeningIsNamed) {
  const testing::TempDir folder;
  std::filesystem::copy(kTinyKimi, folder / "model");
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(folder / "model"));
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : index.tensors()) slices.push_back(WholeOf(tensor));
  const std::filesystem::path second = index.files()[1];
  std::filesystem::resize_file(second, std::filesystem::file_size(second) - 1);
  CollectingSink sink(slices);
  const absl::Status cut = LoadSlices(index, slices, sink, {.block_bytes = 100'000});
  EXPECT_THAT(cut, StatusIs(absl::StatusCode::kOutOfRange, second.filename().string()));
  EXPECT_THAT(cut, StatusIs(absl::StatusCode::kOutOfRange, "loading model."));
  std::filesystem::remove(second);
  EXPECT_THAT(LoadSlices(index, slices, sink, {}),
              StatusIs(absl::StatusCode::kNotFound, second.filename().string()));
}

class ThrowingSink : public SliceSink {
 public:
  void Deliver(size_t, int64_t, int64_t, const std::byte*, int64_t) override {
    if (++calls_ == 100) throw std::runtime_error("device lost");
  }

 private:
  std::atomic<int> calls_{0};
};

TEST(LoaderTest, ASinksExceptionComesOut) {
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(kTinyKimi));
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : index.tensors()) slices.push_back(WholeOf(tensor));
  ThrowingSink sink;
  EXPECT_THROW((void)LoadSlices(index, slices, sink, {.block_bytes = 10'000}), std::runtime_error);
}

}  // namespace
}  // namespace statetap
