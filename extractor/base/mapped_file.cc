#include "extractor/base/mapped_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

namespace statetap {

// Where the handler finds the mappings: it may take no lock and follow no pointer that may end.
struct MappedFile::Slot {
  std::atomic<bool> taken = false;
  std::atomic<uintptr_t> begin = 0, end = 0;
  std::atomic<bool> damaged = false;

  static std::array<Slot, 4096> all;
};
std::array<MappedFile::Slot, 4096> MappedFile::Slot::all;

absl::StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Map(const File& file) {
  static std::once_flag handled;
  std::call_once(handled, [] {
    struct sigaction action = {};
    action.sa_sigaction = OnBusError;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
  });
  STATETAP_ASSIGN_OR_RETURN(const int64_t size, file.Size());
  Slot* free = nullptr;
  for (Slot& slot : Slot::all) {
    if (slot.taken.exchange(true)) continue;
    free = &slot;
    break;
  }
  if (free == nullptr)
    return absl::ResourceExhaustedError(fmt::format("{}: {} files are mapped, no more can be",
                                                    file.path().string(), Slot::all.size()));
  const auto length = static_cast<size_t>(size);
  void* const begin = mmap(nullptr, length, PROT_READ, MAP_SHARED, file.descriptor(), 0);
  if (begin == MAP_FAILED) {
    const int error = errno;
    free->taken = false;
    return ErrnoStatus(error, "cannot map", file.path());
  }
  free->damaged = false;
  free->begin = reinterpret_cast<uintptr_t>(begin);
  free->end = free->begin + length;
  return std::shared_ptr<const MappedFile>(
      new MappedFile({static_cast<const std::byte*>(begin), length}, free));
}

MappedFile::~MappedFile() {
  slot_->begin = 0;
  slot_->end = 0;
  munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  slot_->taken = false;
}

bool MappedFile::damaged() const { return slot_->damaged; }

void MappedFile::OnBusError(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Slot& slot : Slot::all) {
    if (address < slot.begin || address >= slot.end) continue;
    const auto page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    void* const page = reinterpret_cast<void*>(address / page_size * page_size);
    if (mmap(page, page_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
      break;
    slot.damaged = true;
    return;
  }
  std::signal(signal, SIG_DFL);  // it comes again, and ends the process
}

}  // namespace statetap
