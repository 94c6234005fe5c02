#include "extractor/checkpoint/loader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "extractor/base/file.h"
#include "extractor/checkpoint/load_plan.h"

namespace statetap {
namespace {

using Clock = std::chrono::steady_clock;

// Grows; at the alignment of a page.
class PageBuffer {
 public:
  std::byte* Reserve(int64_t size_bytes) {
    const size_t needed = static_cast<size_t>(size_bytes);
    if (needed > size_) {
      buffer_.reset(static_cast<std::byte*>(::operator new(needed, kAlignment)));
      size_ = needed;
    }
    return buffer_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{File::kPage};
  struct Free {
    void operator()(std::byte* buffer) const { ::operator delete(buffer, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> buffer_;
  size_t size_ = 0;
};

// Counts bytes and calls the listener, a few times a second at most.
class Reporter {
 public:
  Reporter(int64_t bytes_total, const LoadOptions& options)
      : total_(bytes_total), report_(options.progress) {}

  void Add(int64_t bytes) {
    done_ += bytes;
    if (!report_) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || Clock::now() - last_ < std::chrono::milliseconds(200)) return;
    last_ = Clock::now();
    Report();
  }
  void Finish() {
    if (report_) Report();
  }

 private:
  void Report() const {
    report_({.bytes_done = done_.load(),
             .bytes_total = total_,
             .seconds = std::chrono::duration<double>(Clock::now() - start_).count()});
  }

  const int64_t total_;
  const std::function<void(const LoadProgress&)>& report_;
  const Clock::time_point start_ = Clock::now();
  std::atomic<int64_t> done_{0};
  std::mutex mutex_;
  Clock::time_point last_ = start_;  // guarded by mutex_
};

// One load: threads take the blocks of the plan in order, read, and deliver.
class Load {
 public:
  Load(const CheckpointIndex& checkpoint, std::span<const TensorSlice> slices, SliceSink& sink,
       const LoadPlan& plan, const LoadOptions& options)
      : checkpoint_(checkpoint),
        slices_(slices),
        sink_(sink),
        plan_(plan),
        reporter_(plan.bytes_total, options) {}

  absl::Status Run(int num_threads) {
    std::vector<std::jthread> threads;
    for (int i = 1; i < num_threads; ++i) threads.emplace_back([this] { Work(); });
    Work();
    threads.clear();
    if (exception_) std::rethrow_exception(exception_);
    if (status_.ok()) reporter_.Finish();
    return status_;
  }

 private:
  void Work() {
    try {
      if (absl::Status status = TakeBlocks(); !status.ok()) Stop(std::move(status), nullptr);
    } catch (...) {
      Stop(absl::OkStatus(), std::current_exception());
    }
  }

  absl::Status TakeBlocks() {
    std::optional<File> file;
    int file_number = -1;
    PageBuffer buffer;
    while (!stop_) {
      const size_t number = next_++;
      if (number >= plan_.blocks.size()) break;
      const LoadBlock& block = plan_.blocks[number];
      // One open file a thread: a checkpoint may have more files than a process may open.
      if (block.file != file_number) {
        STATETAP_ASSIGN_OR_RETURN(file, File::OpenForPages(checkpoint_.files()[block.file]));
        file_number = block.file;
      }
      // A tensor's bytes are aligned in memory as they are in the file.
      std::byte* pages = buffer.Reserve(File::PageSpan(block.begin, block.end));
      STATETAP_RETURN_IF_ERROR(Read(*file, block, pages));
      STATETAP_RETURN_IF_ERROR(DeliverBlock(block, pages + block.begin % File::kPage));
    }
    return absl::OkStatus();
  }

  absl::Status Read(const File& file, const LoadBlock& block, std::byte* pages) const {
    absl::Status status = file.ReadPages(block.begin, block.end, pages);
    if (status.ok()) return status;
    return WithContext(status, fmt::format("loading {}", block.pieces.front().tensor->name));
  }

  absl::Status DeliverBlock(const LoadBlock& block, const std::byte* bytes) {
    for (const LoadPiece& piece : block.pieces) {
      const int64_t row_bytes = RowBytesOf(*piece.tensor);
      const std::byte* rows =
          bytes + (piece.tensor->offset + piece.row_begin * row_bytes - block.begin);
      for (const size_t i : *piece.slices) DeliverPiece(piece, i, rows, row_bytes);
      reporter_.Add((piece.row_end - piece.row_begin) * row_bytes);
    }
    return absl::OkStatus();
  }

  // `rows`: the first byte of piece.row_begin.
  void DeliverPiece(const LoadPiece& piece, size_t number, const std::byte* rows,
                    int64_t row_bytes) {
    const TensorSlice& slice = slices_[number];
    const int64_t begin = std::max(piece.row_begin, slice.row_begin);
    const int64_t end = std::min(piece.row_end, slice.row_end);
    if (begin >= end || slice.col_begin == slice.col_end) return;
    const auto element = static_cast<int64_t>(SizeOf(piece.tensor->dtype));
    sink_.Deliver(number, begin - slice.row_begin, end - begin,
                  rows + (begin - piece.row_begin) * row_bytes + slice.col_begin * element,
                  row_bytes);
  }

  // The first fault stays; the other threads end after their block.
  void Stop(absl::Status status, std::exception_ptr exception) {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    if (!status_.ok() || exception_) return;
    status_ = std::move(status);
    exception_ = exception;
  }

  const CheckpointIndex& checkpoint_;
  const std::span<const TensorSlice> slices_;
  SliceSink& sink_;
  const LoadPlan& plan_;
  Reporter reporter_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  absl::Status status_;           // guarded by mutex_
  std::exception_ptr exception_;  // guarded by mutex_
};

}  // namespace

int64_t RowsOf(const TensorInfo& tensor) {
  return tensor.shape.size() < 2 ? 1 : tensor.shape.front();
}

int64_t ColsOf(const TensorInfo& tensor) {
  const int64_t rows = RowsOf(tensor);
  return rows == 0 ? 0 : tensor.size_bytes / static_cast<int64_t>(SizeOf(tensor.dtype)) / rows;
}

int64_t RowBytesOf(const TensorInfo& tensor) {
  return ColsOf(tensor) * static_cast<int64_t>(SizeOf(tensor.dtype));
}

TensorSlice WholeOf(const TensorInfo& tensor) {
  return {&tensor, 0, RowsOf(tensor), 0, ColsOf(tensor)};
}

absl::Status LoadSlices(const CheckpointIndex& checkpoint, std::span<const TensorSlice> slices,
                        SliceSink& sink, const LoadOptions& options) {
  STATETAP_ASSIGN_OR_RETURN(const LoadPlan plan,
                            LoadPlan::Make(checkpoint, slices, options.block_bytes));
  const auto most = std::max<int64_t>(1, static_cast<int64_t>(plan.blocks.size()));
  const int64_t num_threads = std::clamp<int64_t>(options.num_threads, 1, most);
  return Load(checkpoint, slices, sink, plan, options).Run(static_cast<int>(num_threads));
}

}  // namespace statetap
