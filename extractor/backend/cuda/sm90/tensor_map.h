// Tensor maps of matrices in device memory, for TMA. Host code.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace statetap::cuda {

// x: [rows, columns] of bf16, contiguous, columns a multiple of 8. Boxes of kMapColumns columns, a
// line of 128 bytes a row, swizzled as wgmma reads it; what lies outside the matrix reads as zero.
inline constexpr int kMapColumns = 64;
CUtensorMap MakeTensorMap(const __nv_bfloat16* x, int64_t rows, int64_t columns, int box_rows);

}  // namespace statetap::cuda
