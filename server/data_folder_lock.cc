#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "extractor/base/file.h"
#include "server/server.h"

namespace statetap {

absl::StatusOr<DataFolderLock> DataFolderLock::Acquire(const std::filesystem::path& data) {
  std::error_code error;
  std::filesystem::create_directories(data, error);
  if (error) return ErrnoStatus(error.value(), "--data: cannot make", data);
  const std::filesystem::path path = data / "server.lock";
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor < 0) return ErrnoStatus(errno, "--data: cannot open", path);
  DataFolderLock lock(descriptor);
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    std::array<char, 32> pid{};
    [[maybe_unused]] const ssize_t got = pread(descriptor, pid.data(), pid.size() - 1, 0);
    return absl::FailedPreconditionError(fmt::format(
        "--data: {} is in use by the server with process id {}; stop it, or give another folder",
        data.string(), std::string_view(pid.data())));
  }
  const std::string pid = std::to_string(getpid());
  if (ftruncate(descriptor, 0) != 0 ||
      pwrite(descriptor, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size()))
    return ErrnoStatus(errno, "--data: cannot write", path);
  return lock;
}

DataFolderLock::DataFolderLock(DataFolderLock&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

DataFolderLock::~DataFolderLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

}  // namespace statetap
