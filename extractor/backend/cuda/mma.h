// What the kernels share of sm_80: the few tensor-core and copy instructions, and SiLU. Device code
// only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace statetap::cuda {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Two values as bf16, the first one low.
__device__ inline uint32_t Pack(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Hopper's routed experts have one of fast instructions (sm90/pipeline.h).
__device__ inline float ExactSilu(float x) { return x / (1.0f + expf(-x)); }

// Where a row's chunk of 16 bytes lies in shared memory. Chunks are exchanged by the row's last
// three bits, as TMA's swizzle of 128 bytes does it, so that ldmatrix meets no bank twice.
__device__ inline uint32_t ChunkOf(uint32_t rows, int row_bytes, int row, int chunk) {
  return rows + row * row_bytes + (chunk ^ (row & 7)) * 16;
}

// Four 8×8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void LoadMatrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}
__device__ inline void LoadMatrices(uint32_t (&to)[4], const void* row) {
  LoadMatrices(to, SharedAddress(row));
}
__device__ inline void LoadMatricesTransposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}
__device__ inline void LoadMatricesTransposed(uint32_t (&to)[4], const void* row) {
  LoadMatricesTransposed(to, SharedAddress(row));
}

// d += a · b, 16 × 8 × 16. Lane 4q + t holds a: rows q, q + 8 at k 2t, 2t + 1 and 2t + 8, 2t + 9;
// b: column q at the same k; d: rows q and q + 8, columns 2t, 2t + 1.
__device__ inline void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory, the first `bytes` of them read, the rest zero.
__device__ inline void CopyAsync(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void CopyAsync(void* to, const void* from, int bytes) {
  CopyAsync(SharedAddress(to), from, bytes);
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace statetap::cuda
