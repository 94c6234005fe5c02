#include <algorithm>
#include <cstring>

#include "extractor/shard/hdf5_file.h"

namespace statetap {

absl::Status MemoryStorage::Read(int64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const int64_t number = offset / kPageBytes, within = offset % kPageBytes;
    const size_t size = std::min(to.size(), static_cast<size_t>(kPageBytes - within));
    const auto page = pages_.find(number);
    if (page == pages_.end()) {
      std::memset(to.data(), 0, size);
    } else {
      std::memcpy(to.data(), page->second->data() + within, size);
    }
    to = to.subspan(size);
    offset += static_cast<int64_t>(size);
  }
  return absl::OkStatus();
}

absl::Status MemoryStorage::Write(int64_t offset, std::span<const std::byte> from) {
  size_ = std::max(size_, offset + static_cast<int64_t>(from.size()));
  while (!from.empty()) {
    const int64_t number = offset / kPageBytes, within = offset % kPageBytes;
    const size_t size = std::min(from.size(), static_cast<size_t>(kPageBytes - within));
    std::unique_ptr<Page>& page = pages_[number];
    if (page == nullptr) page = std::make_unique<Page>();
    std::memcpy(page->data() + within, from.data(), size);
    from = from.subspan(size);
    offset += static_cast<int64_t>(size);
  }
  return absl::OkStatus();
}

absl::Status MemoryStorage::CopyTo(const File& file) const {
  for (const auto& [number, page] : pages_) {
    const int64_t offset = number * kPageBytes;
    const auto size = static_cast<size_t>(std::clamp<int64_t>(size_ - offset, 0, kPageBytes));
    STATETAP_RETURN_IF_ERROR(file.WriteAt(offset, std::span(*page).first(size)));
  }
  return absl::OkStatus();
}

absl::Status FileStorage::Read(int64_t offset, std::span<std::byte> to) const {
  const auto size = static_cast<int64_t>(to.size());
  if (offset < 0 || size > size_ || offset > size_ - size) {
    return absl::OutOfRangeError(fmt::format("{}: {} bytes at {} are beyond the end {}",
                                             file_.path().string(), size, offset, size_));
  }
  return file_.ReadAt(offset, to);
}

absl::Status FileStorage::Write(int64_t, std::span<const std::byte>) {
  return absl::InternalError(fmt::format("{} is open for reading", file_.path().string()));
}

}  // namespace statetap
