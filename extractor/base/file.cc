#include "extractor/base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <system_error>
#include <utility>

namespace statetap {
namespace {

// Writes of 2 MiB and more make ext4 of Linux 6.18 look for pages as large, which it may not find:
// 0.3 GB/s where pieces of 1 MiB go at 2.9 (bench/README.md).
constexpr size_t kMostBytesAWrite = size_t{1} << 20;

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR: return absl::StatusCode::kNotFound;
    case EACCES:
    case EPERM:
    case EROFS: return absl::StatusCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE: return absl::StatusCode::kResourceExhausted;
    default: return absl::StatusCode::kInternal;
  }
}

absl::StatusOr<int> OpenDescriptor(const std::filesystem::path& path, int flags) {
  int descriptor;
  do {
    descriptor = open(path.c_str(), flags | O_CLOEXEC, 0644);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) return ErrnoStatus(errno, "cannot open", path);
  return descriptor;
}

}  // namespace

absl::Status ErrnoStatus(int error, std::string_view what, const std::filesystem::path& path) {
  return absl::Status(CodeOf(error), fmt::format("{} {}: {}", what, path.string(),
                                                 std::generic_category().message(error)));
}

absl::StatusOr<File> File::OpenForRead(const std::filesystem::path& path) {
  STATETAP_ASSIGN_OR_RETURN(const int descriptor, OpenDescriptor(path, O_RDONLY));
  return File(descriptor, path);
}

absl::StatusOr<File> File::OpenForPages(const std::filesystem::path& path) {
  int descriptor;
  do {
    descriptor = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor >= 0) return File(descriptor, path);
  return OpenForRead(path);  // which says what is wrong, if it is not O_DIRECT
}

absl::StatusOr<File> File::Create(const std::filesystem::path& path) {
  STATETAP_ASSIGN_OR_RETURN(const int descriptor, OpenDescriptor(path, O_RDWR | O_CREAT | O_TRUNC));
  return File(descriptor, path);
}

absl::StatusOr<File> File::OpenForWrite(const std::filesystem::path& path) {
  STATETAP_ASSIGN_OR_RETURN(const int descriptor, OpenDescriptor(path, O_RDWR));
  return File(descriptor, path);
}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(path_, other.path_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<int64_t> File::Size() const {
  struct stat info;
  if (fstat(descriptor_, &info) != 0) return ErrnoStatus(errno, "cannot stat", path_);
  return int64_t{info.st_size};
}

absl::Status File::ReadAt(int64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t got = pread(descriptor_, to.data(), to.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "cannot read", path_);
    if (got == 0) {
      return absl::OutOfRangeError(fmt::format("{} ends at byte {}, {} more bytes were expected",
                                               path_.string(), offset, to.size()));
    }
    to = to.subspan(static_cast<size_t>(got));
    offset += got;
  }
  return absl::OkStatus();
}

absl::Status File::ReadPages(int64_t begin, int64_t end, std::byte* pages) const {
  const int64_t first = begin / kPage * kPage;
  const auto size = static_cast<size_t>(PageSpan(begin, end)),
             needed = static_cast<size_t>(end - first);
  size_t done = 0;
  while (done < needed) {
    const ssize_t got =
        pread(descriptor_, pages + done, size - done, first + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    // Some file systems take the flag and refuse the read.
    const int flags = fcntl(descriptor_, F_GETFL);
    if (got < 0 && errno == EINVAL && (flags & O_DIRECT) != 0 &&
        fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT) == 0) {
      continue;
    }
    if (got < 0) return ErrnoStatus(errno, "cannot read", path_);
    done += static_cast<size_t>(got);
    // A read that ends within a page has met the end of the file.
    if (done < needed && (got == 0 || done % kPage != 0)) {
      return absl::OutOfRangeError(fmt::format("{} ends at byte {}, {} more bytes were expected",
                                               path_.string(), first + static_cast<int64_t>(done),
                                               needed - done));
    }
  }
  return absl::OkStatus();
}

absl::Status File::WriteAt(int64_t offset, std::span<const std::byte> from) const {
  while (!from.empty()) {
    const ssize_t put =
        pwrite(descriptor_, from.data(), std::min(from.size(), kMostBytesAWrite), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return ErrnoStatus(errno, "cannot write", path_);
    from = from.subspan(static_cast<size_t>(put));
    offset += put;
  }
  return absl::OkStatus();
}

void File::StartWriteback(int64_t offset, int64_t bytes) const {
  (void)sync_file_range(descriptor_, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

absl::Status File::Sync() const {
  return fsync(descriptor_) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot sync", path_);
}

absl::StatusOr<std::string> ReadWholeFile(const std::filesystem::path& path, int64_t max_bytes) {
  STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForRead(path));
  STATETAP_ASSIGN_OR_RETURN(const int64_t size, file.Size());
  if (size > max_bytes) {
    return absl::ResourceExhaustedError(
        fmt::format("{} has {} bytes; at most {} are read", path.string(), size, max_bytes));
  }
  std::string content(static_cast<size_t>(size), '\0');
  STATETAP_RETURN_IF_ERROR(file.ReadAt(0, std::as_writable_bytes(std::span(content))));
  return content;
}

absl::Status SyncFolder(const std::filesystem::path& folder) {
  STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForRead(folder));
  return file.Sync();
}

absl::Status WriteFileAtomically(const std::filesystem::path& path, std::string_view content) {
  // A name of its own: another process may write the same file at this moment.
  std::random_device random;
  std::filesystem::path temporary = path;
  temporary += fmt::format(".{:08x}{:08x}.partial", random(), random());
  const auto write = [&]() -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const File file, File::Create(temporary));
    STATETAP_RETURN_IF_ERROR(file.WriteAt(0, std::as_bytes(std::span(content))));
    STATETAP_RETURN_IF_ERROR(file.Sync());
    if (rename(temporary.c_str(), path.c_str()) != 0)
      return ErrnoStatus(errno, "cannot rename to", path);
    return absl::OkStatus();
  };
  if (const absl::Status status = write(); !status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  return SyncFolder(path.parent_path().empty() ? "." : path.parent_path());
}

absl::StatusOr<File> LockFolder(const std::filesystem::path& folder) {
  STATETAP_ASSIGN_OR_RETURN(File file, File::OpenForRead(folder));
  if (flock(file.descriptor(), LOCK_EX | LOCK_NB) == 0) return file;
  if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "cannot lock", folder);
  return absl::FailedPreconditionError(
      fmt::format("{} is in use by another process", folder.string()));
}

}  // namespace statetap
