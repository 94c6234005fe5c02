#include "extractor/base/recycled_memory.h"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace statetap {
namespace {

constexpr size_t kSmall = size_t{64} << 10;  // below that malloc does well
constexpr size_t kHugePage = size_t{2} << 20;

// Blocks have four sizes an octave; from 8 MiB on all are whole huge pages.
size_t BlockBytes(size_t bytes) {
  const size_t step = std::bit_floor(bytes) / 4;
  return (bytes + step - 1) / step * step;
}

struct Kept {
  std::mutex mutex;
  std::map<size_t, std::vector<void*>> blocks;  // by size
  size_t bytes = 0;
};
Kept& TheKept() {
  static Kept& kept = *new Kept;  // threads may give back until the process ends
  return kept;
}

}  // namespace

void* TakeMemory(size_t bytes) {
  if (bytes < kSmall) return ::operator new(bytes);
  const size_t block = BlockBytes(bytes);
  {
    Kept& kept = TheKept();
    const std::lock_guard lock(kept.mutex);
    const auto found = kept.blocks.find(block);
    if (found != kept.blocks.end() && !found->second.empty()) {
      void* memory = found->second.back();
      found->second.pop_back();
      kept.bytes -= block;
      return memory;
    }
  }
  const bool huge = block >= kHugePage;
  const size_t alignment = huge ? kHugePage : 4096;
  void* memory = std::aligned_alloc(alignment, (block + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  if (huge) (void)madvise(memory, block, MADV_HUGEPAGE);  // where it cannot, small pages do
  return memory;
}

void GiveBackMemory(void* memory, size_t bytes) {
  if (bytes < kSmall) return ::operator delete(memory);
  const size_t block = BlockBytes(bytes);
  {
    Kept& kept = TheKept();
    const std::lock_guard lock(kept.mutex);
    if (kept.bytes + block <= kMostKept) {
      kept.blocks[block].push_back(memory);
      kept.bytes += block;
      return;
    }
  }
  std::free(memory);
}

size_t KeptMemory() {
  Kept& kept = TheKept();
  const std::lock_guard lock(kept.mutex);
  return kept.bytes;
}

}  // namespace statetap
