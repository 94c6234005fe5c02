// Random weights made on the device: time and power depend on the data, so no zeros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace statetap::bench {

// Near-normal with the given scale.
void FillNormal(__nv_bfloat16* to, int64_t count, float scale, uint32_t seed);
void FillValue(float* to, int64_t count, float value);
// to[i] = from[i mod bytes] for `total` bytes; both multiples of 16.
void Repeat(const void* from, int64_t bytes, void* to, int64_t total, cudaStream_t stream);
void FillBits(void* to, int64_t bytes, uint32_t seed);
// INT4 blocks (weight_blocks.h): random nibbles, scales near `scale`.
void FillBlocks(unsigned char* to, int64_t blocks, float scale, uint32_t seed);

}  // namespace statetap::bench
