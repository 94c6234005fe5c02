// Small exchanges without the host: each rank writes what it has into the memory of the others and
// waits on its device for theirs. For ranks on GPUs of their own only: kernels that wait for each
// other on one GPU may wait for ever.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "extractor/backend/cuda/rows.h"

namespace statetap::cuda {

inline constexpr int kMostPushBlocks = 512;

// inbox[r][0, bytes) = own, on every other rank r; returns (the kernel ends) when theirs have come.
// A block's piece is announced by a flag that counts its exchanges. All ranks make the same calls
// with the same `most_bytes`.
struct PushParams {
  const std::byte* own;             // [bytes], at 16
  size_t bytes;                     // a multiple of 16; may be 0
  size_t most_bytes;                // of any rank: says how many blocks take part (Push)
  int rank, world;                  //
  std::byte* inbox[kMaxRanks];      // this rank's place in the memory of rank r; null: this rank
  uint32_t* flag_at[kMaxRanks];     // [kMostPushBlocks] on rank r: how often this rank has come
  const uint32_t* flag[kMaxRanks];  // [kMostPushBlocks] here: how often rank r has come
  uint32_t* calls;                  // [kMostPushBlocks] here: exchanges of each block so far
  const volatile int* aborted;      // host memory: not 0 ends the wait
};
void Push(const PushParams& params, cudaStream_t stream);

}  // namespace statetap::cuda
