// Memory for large arrays that come and go all the time, such as a sample's states: a block that is
// given back is kept for the next one of its size. New memory costs a page fault each 4 KiB (a
// thread copies into it at 1.7 GB/s, into memory that was used before at 6); what is taken new from
// 2 MiB on lies in the kernel's huge pages where it gives them (3 GB/s).
#pragma once

#include <cstddef>
#include <vector>

namespace statetap {

// At least `bytes`, for GiveBackMemory with the same number. At most a quarter more is taken.
// Throws bad_alloc. Thread safe.
void* TakeMemory(size_t bytes);
// Kept up to kMostKept bytes in all, beyond that the system's again.
void GiveBackMemory(void* memory, size_t bytes);
inline constexpr size_t kMostKept = size_t{1} << 30;
size_t KeptMemory();  // bytes kept now

template <typename T>
struct RecyclingAllocator {
  using value_type = T;
  RecyclingAllocator() = default;
  template <typename U>
  RecyclingAllocator(const RecyclingAllocator<U>&) {}  // NOLINT: as allocators do
  T* allocate(size_t count) { return static_cast<T*>(TakeMemory(count * sizeof(T))); }
  void deallocate(T* memory, size_t count) { GiveBackMemory(memory, count * sizeof(T)); }
  bool operator==(const RecyclingAllocator&) const { return true; }
};

template <typename T>
using RecycledVector = std::vector<T, RecyclingAllocator<T>>;

}  // namespace statetap
