#include <cuda_fp16.h>

#include <algorithm>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/weights.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;

__device__ FragmentRow RowOf(Projection projection, int row) {
  return projection == Projection::kDown ? DownRow(row)
                                         : GateUpRow(row, projection == Projection::kUp);
}

__device__ float ValueOf(const void* from, DType stored, int64_t i) {
  if (stored == DType::kF32) return static_cast<const float*>(from)[i];
  if (stored == DType::kF16) return __half2float(static_cast<const __half*>(from)[i]);
  return __bfloat162float(static_cast<const bf16*>(from)[i]);
}

// A thread a word of the checkpoint: eight nibbles, lowest first, of K 8i … 8i + 7.
__global__ void PackInt4Kernel(const PackParams p) {
  const int words = p.columns / 8;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
       i < static_cast<int64_t>(p.rows) * words; i += int64_t{gridDim.x} * kThreads) {
    const FragmentRow row = RowOf(p.projection, p.first_row + static_cast<int>(i / words));
    const int k = static_cast<int>(i % words) * 8;
    const uint32_t word = static_cast<const uint32_t*>(p.from)[i];
    unsigned char* block = p.to + BlockOffset(row, k, p.k_blocks, kInt4BlockBytes);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // K 2·pair and 2·pair + 1 share a word of the block
      const NibblePlace first = NibbleOf(row, k + 2 * pair),
                        second = NibbleOf(row, k + 2 * pair + 1);
      const uint32_t bits = (word >> (8 * pair) & 15u) << first.shift |
                            (word >> (8 * pair + 4) & 15u) << second.shift;
      atomicOr(reinterpret_cast<unsigned*>(block + first.word_offset), bits);
    }
  }
}

__global__ void PackScalesKernel(const PackParams p, DType stored) {
  const int groups = p.columns / kScaleGroup;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
       i < static_cast<int64_t>(p.rows) * groups; i += int64_t{gridDim.x} * kThreads) {
    const FragmentRow row = RowOf(p.projection, p.first_row + static_cast<int>(i / groups));
    const int k = static_cast<int>(i % groups) * kScaleGroup;
    unsigned char* block = p.to + BlockOffset(row, k, p.k_blocks, kInt4BlockBytes);
    *reinterpret_cast<bf16*>(block + ScaleOffset(row, k)) =
        __float2bfloat16_rn(ValueOf(p.from, stored, i));
  }
}

__global__ void PackValuesKernel(const PackParams p, DType stored) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
       i < static_cast<int64_t>(p.rows) * p.columns; i += int64_t{gridDim.x} * kThreads) {
    const FragmentRow row = RowOf(p.projection, p.first_row + static_cast<int>(i / p.columns));
    const int k = static_cast<int>(i % p.columns);
    unsigned char* block = p.to + BlockOffset(row, k, p.k_blocks, kBf16BlockBytes);
    *reinterpret_cast<bf16*>(block + Bf16Offset(row, k)) =
        __float2bfloat16_rn(ValueOf(p.from, stored, i));
  }
}

unsigned Blocks(int64_t count) {
  return static_cast<unsigned>(std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, 4096));
}

}  // namespace

void PackInt4(const PackParams& p, cudaStream_t stream) {
  PackInt4Kernel<<<Blocks(int64_t{p.rows} * p.columns / 8), kThreads, 0, stream>>>(p);
  CheckLaunch();
}

void PackScales(const PackParams& p, DType stored, cudaStream_t stream) {
  PackScalesKernel<<<Blocks(int64_t{p.rows} * p.columns / 32), kThreads, 0, stream>>>(p, stored);
  CheckLaunch();
}

void PackValues(const PackParams& p, DType stored, cudaStream_t stream) {
  PackValuesKernel<<<Blocks(int64_t{p.rows} * p.columns), kThreads, 0, stream>>>(p, stored);
  CheckLaunch();
}

}  // namespace statetap::cuda
