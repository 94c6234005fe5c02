// Files: whole reads, positioned reads and writes, and publishing a file so that it is complete or
// absent.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "extractor/base/status.h"

namespace statetap {

// An absl::Status for errno with the path in front: NOT_FOUND, PERMISSION_DENIED,
// RESOURCE_EXHAUSTED (disk full) or INTERNAL.
absl::Status ErrnoStatus(int error, std::string_view what, const std::filesystem::path& path);

// Owns a descriptor. Move-only. Positioned calls are thread safe.
class File {
 public:
  static absl::StatusOr<File> OpenForRead(const std::filesystem::path& path);
  // For ReadPages: past the page cache where the file system allows that, else as OpenForRead.
  static absl::StatusOr<File> OpenForPages(const std::filesystem::path& path);
  // Creates or truncates.
  static absl::StatusOr<File> Create(const std::filesystem::path& path);
  // Opens an existing file for reading and writing.
  static absl::StatusOr<File> OpenForWrite(const std::filesystem::path& path);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  absl::StatusOr<int64_t> Size() const;
  // Fills `to` whole, or OUT_OF_RANGE where the file ends before it.
  absl::Status ReadAt(int64_t offset, std::span<std::byte> to) const;
  // Reads the pages that hold bytes [begin, end); `pages`: room for PageSpan(begin, end) bytes, at
  // the alignment of a page. Byte `begin` comes to lie at pages + begin % kPage. OUT_OF_RANGE where
  // the file ends before `end`.
  static constexpr int64_t kPage = 4096;
  static int64_t PageSpan(int64_t begin, int64_t end) {
    return (end + kPage - 1) / kPage * kPage - begin / kPage * kPage;
  }
  absl::Status ReadPages(int64_t begin, int64_t end, std::byte* pages) const;
  absl::Status WriteAt(int64_t offset, std::span<const std::byte> from) const;
  // Asks that bytes which were written go to the disk from now on, so that Sync finds less to do.
  // Promises nothing.
  void StartWriteback(int64_t offset, int64_t bytes) const;
  absl::Status Sync() const;
  int descriptor() const { return descriptor_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  File(int descriptor, std::filesystem::path path)
      : descriptor_(descriptor), path_(std::move(path)) {}
  int descriptor_ = -1;
  std::filesystem::path path_;
};

// The whole file; RESOURCE_EXHAUSTED where it is larger than `max_bytes`.
absl::StatusOr<std::string> ReadWholeFile(const std::filesystem::path& path,
                                          int64_t max_bytes = int64_t{1} << 30);
absl::Status SyncFolder(const std::filesystem::path& folder);
// Holds a folder for one process until the File is gone. FAILED_PRECONDITION where another has it.
absl::StatusOr<File> LockFolder(const std::filesystem::path& folder);
// Temporary beside it, sync, rename, sync the folder.
absl::Status WriteFileAtomically(const std::filesystem::path& path, std::string_view content);

}  // namespace statetap
