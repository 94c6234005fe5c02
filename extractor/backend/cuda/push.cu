#include "extractor/backend/cuda/push.h"

#include <algorithm>

#include "extractor/backend/cuda/check.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPollsBetweenLooks = 1024;  // at the host's word, which takes a microsecond

__device__ void StoreRelease(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ uint32_t LoadAcquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Blocks share the bytes 16 at a time; a block announces its share to every rank, then waits for
// the shares of the block of the same number on each.
__global__ void __launch_bounds__(kThreads) PushKernel(const PushParams p) {
  const uint32_t call = p.calls[blockIdx.x] + 1;
  const auto* own = reinterpret_cast<const uint4*>(p.own);
  const size_t count = p.bytes / sizeof(uint4), step = size_t{gridDim.x} * kThreads;
  for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const uint4 value = own[i];
    for (int rank = 0; rank < p.world; ++rank) {
      if (rank != p.rank) reinterpret_cast<uint4*>(p.inbox[rank])[i] = value;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) p.calls[blockIdx.x] = call;
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= p.world || rank == p.rank) return;
  __threadfence_system();
  StoreRelease(p.flag_at[rank] + blockIdx.x, call);
  const uint32_t* flag = p.flag[rank] + blockIdx.x;
  for (uint32_t poll = 1; static_cast<int32_t>(LoadAcquire(flag) - call) < 0; ++poll) {
    if (poll % kPollsBetweenLooks == 0 && *p.aborted != 0) return;
  }
}

}  // namespace

void Push(const PushParams& params, cudaStream_t stream) {
  if (params.most_bytes == 0 || params.world == 1) return;
  const size_t pieces = (params.most_bytes / sizeof(uint4) + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<size_t>(pieces, 1, kMostPushBlocks));
  PushKernel<<<blocks, kThreads, 0, stream>>>(params);
  CheckLaunch();
}

}  // namespace statetap::cuda
