#include "extractor/checkpoint/scattered_read.h"

#include <fcntl.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "extractor/base/file.h"
#include "extractor/base/worker_pool.h"

namespace statetap {
namespace {

constexpr int kThreads = 8;
constexpr size_t kWorthThreads = 256;

absl::Status ReadInOrder(const std::vector<std::filesystem::path>& files,
                         std::span<const SmallRead> reads) {
  std::optional<File> file;
  int file_number = -1;
  for (const SmallRead& read : reads) {
    if (read.file != file_number) {
      STATETAP_ASSIGN_OR_RETURN(file, File::OpenForRead(files[read.file]));
      // Or the kernel reads ahead 128 KiB for each of these.
      (void)posix_fadvise(file->descriptor(), 0, 0, POSIX_FADV_RANDOM);
      file_number = read.file;
    }
    STATETAP_RETURN_IF_ERROR(file->ReadAt(read.offset, read.to));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadScattered(const std::vector<std::filesystem::path>& files,
                           std::vector<SmallRead> reads) {
  std::ranges::sort(reads, [](const SmallRead& a, const SmallRead& b) {
    return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
  });
  if (reads.size() < kWorthThreads) return ReadInOrder(files, reads);
  std::mutex mutex;
  absl::Status status;
  WorkerPool(kThreads).ParallelFor(
      static_cast<int64_t>(reads.size()), [&](int64_t begin, int64_t end, int) {
        absl::Status read = ReadInOrder(files, std::span(reads).subspan(begin, end - begin));
        const std::lock_guard lock(mutex);
        status.Update(std::move(read));
      });
  return status;
}

}  // namespace statetap
