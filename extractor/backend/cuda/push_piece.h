// One block's part of a push (push.h). Device code only.
#pragma once

#include "extractor/backend/cuda/push.h"

namespace statetap::cuda {

__device__ inline void StoreRelease(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ inline uint32_t LoadAcquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Bytes [16 · begin, 16 · end) of this rank's to every other rank; the blocks of the same `piece`
// on all ranks wait for each other's. On all threads of the block: what the others sent is there
// for all of them when it returns.
__device__ inline void PushPiece(const PushParams& p, int piece, size_t begin, size_t end) {
  constexpr uint32_t kPollsBetweenLooks = 1024;  // at the host's word, which takes a microsecond
  const uint32_t call = p.calls[piece] + 1;
  const auto* own = reinterpret_cast<const uint4*>(p.own);
  for (size_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const uint4 value = own[i];
    for (int rank = 0; rank < p.world; ++rank) {
      if (rank != p.rank) reinterpret_cast<uint4*>(p.inbox[rank])[i] = value;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) p.calls[piece] = call;
  const int rank = static_cast<int>(threadIdx.x);
  if (rank < p.world && rank != p.rank) {
    __threadfence_system();
    StoreRelease(p.flag_at[rank] + piece, call);
    const uint32_t* flag = p.flag[rank] + piece;
    for (uint32_t poll = 1; static_cast<int32_t>(LoadAcquire(flag) - call) < 0; ++poll) {
      if (poll % kPollsBetweenLooks == 0 && *p.aborted != 0) break;
    }
  }
  __syncthreads();
}

}  // namespace statetap::cuda
