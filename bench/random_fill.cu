#include "bench/random_fill.h"

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/weight_blocks.h"

namespace statetap::bench {
namespace {

constexpr int kBlocks = 4096, kThreads = 256;

__device__ uint32_t Mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}
__device__ uint32_t Hash(int64_t i, uint32_t seed) {
  return Mix(static_cast<uint32_t>(i) * 2654435761u + Mix(static_cast<uint32_t>(i >> 32) + seed));
}
__device__ int64_t First() { return blockIdx.x * int64_t{kThreads} + threadIdx.x; }
__device__ int64_t Step() { return int64_t{gridDim.x} * kThreads; }

__global__ void Normal(__nv_bfloat16* to, int64_t count, float scale, uint32_t seed) {
  for (int64_t i = First(); i < count; i += Step()) {
    const uint32_t a = Hash(i, seed), b = Mix(a + 0x9e3779b9u);
    const float sum = static_cast<float>((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16));
    to[i] = __float2bfloat16_rn((sum / 65536.0f - 2.0f) * 1.732f * scale);
  }
}
__global__ void Value(float* to, int64_t count, float value) {
  for (int64_t i = First(); i < count; i += Step()) to[i] = value;
}
__global__ void Bits(uint32_t* to, int64_t words, uint32_t seed) {
  for (int64_t i = First(); i < words; i += Step()) to[i] = Hash(i, seed);
}
__global__ void Scales(unsigned char* to, int64_t blocks, float scale, uint32_t seed) {
  constexpr int kScales = (cuda::kInt4BlockBytes - cuda::kScalesOffset) / 2;
  for (int64_t i = First(); i < blocks * kScales; i += Step()) {
    auto* scales = reinterpret_cast<__nv_bfloat16*>(to + i / kScales * cuda::kInt4BlockBytes +
                                                    cuda::kScalesOffset);
    const float around = 0.5f + static_cast<float>(Hash(i, seed) & 1023u) / 1024.0f;
    scales[i % kScales] = __float2bfloat16_rn(around * scale);
  }
}

__global__ void RepeatKernel(const uint4* from, int64_t count, uint4* to, int64_t total) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * blockDim.x)
    to[i] = from[i % count];
}

}  // namespace

void FillNormal(__nv_bfloat16* to, int64_t count, float scale, uint32_t seed) {
  Normal<<<kBlocks, kThreads>>>(to, count, scale, seed);
  cuda::CheckLaunch();
}
void FillValue(float* to, int64_t count, float value) {
  Value<<<kBlocks, kThreads>>>(to, count, value);
  cuda::CheckLaunch();
}
void FillBits(void* to, int64_t bytes, uint32_t seed) {
  Bits<<<kBlocks, kThreads>>>(static_cast<uint32_t*>(to), bytes / 4, seed);
  cuda::CheckLaunch();
}
void FillBlocks(unsigned char* to, int64_t blocks, float scale, uint32_t seed) {
  FillBits(to, blocks * cuda::kInt4BlockBytes, seed);
  Scales<<<kBlocks, kThreads>>>(to, blocks, scale, seed);
  cuda::CheckLaunch();
}

void Repeat(const void* from, int64_t bytes, void* to, int64_t total, cudaStream_t stream) {
  if (bytes == 0) return;
  RepeatKernel<<<128, 256, 0, stream>>>(static_cast<const uint4*>(from), bytes / 16,
                                        static_cast<uint4*>(to), total / 16);
}

}  // namespace statetap::bench
