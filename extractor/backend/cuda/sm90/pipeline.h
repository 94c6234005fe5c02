// What the kernels for Hopper share: barriers, bulk copies, tensor maps, wgmma's bookkeeping,
// dequantisation. Device code only.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "extractor/backend/cuda/mma.h"
#include "extractor/backend/cuda/routed_ffn.h"

namespace statetap::cuda {

struct Maps {
  CUtensorMap of_width[kHopperTileRows / 8];
};

// Whether producers that keep `of_producer` registers a thread give back what consumers then ask
// for: setmaxnreg waits for ever where they do not. `blocks` of a multiprocessor, launched with all
// its registers.
constexpr bool RegistersSuffice(int blocks, int consumers, int of_consumer, int producers,
                                int of_producer) {
  const int at_launch = 65536 / blocks / (consumers + producers) / 8 * 8;
  return consumers * (of_consumer - at_launch) <= producers * (at_launch - of_producer);
}

__device__ inline void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}
__device__ inline void ExpectBytes(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// Barriers by their address in shared memory, for loops that have no instruction to spare for
// working it out.
__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void Arrive(uint64_t* barrier) { Arrive(SharedAddress(barrier)); }
__device__ inline void Wait(uint32_t barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
__device__ inline void Wait(uint64_t* barrier, int phase) { Wait(SharedAddress(barrier), phase); }
__device__ inline void LoadBytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}
__device__ inline void LoadTokens(void* to, const CUtensorMap* map, int column, int row,
                                  uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(row), "r"(SharedAddress(barrier))
      : "memory");
}
// By a map of MakeWeightMap.
__device__ inline void LoadPermuted(void* to, const CUtensorMap* map, int column, int row_block,
                                    uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "0, 0, 0, %3}], [%4];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(row_block), "r"(SharedAddress(barrier))
      : "memory");
}
__device__ inline void FenceWgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitWgmma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void WaitWgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Nothing that uses these is moved in front of the wait that came last.
template <int kCount>
__device__ __forceinline__ void Settle(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
// An operand in shared memory: K-major rows of 128 bytes, 128-byte swizzle, atoms of 8 rows.
__device__ inline uint64_t LineDescriptor(uint32_t rows) {
  return static_cast<uint64_t>((rows & 0x3ffffu) >> 4) | uint64_t{1} << 16 | uint64_t{64} << 32 |
         uint64_t{1} << 62;
}
__device__ inline uint64_t TokenDescriptor(const void* tokens) {
  return LineDescriptor(SharedAddress(tokens));
}

// As in the portable kernel: 128 + n, − 136, · scale; sm_90 has both instructions in bf16.
__device__ inline uint32_t Dequantise(uint32_t word, uint32_t scale_twice) {
  uint32_t biased, value, scaled;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(biased) : "r"(word));
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(value) : "r"(biased), "r"(0x43084308u));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(value), "r"(scale_twice));
  return scaled;
}

__device__ inline float Silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

}  // namespace statetap::cuda
