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

// The same for weights, whose rows are the columns of a product, in an order in which the
// accumulators of a thread are eight neighbouring columns instead of pairs eight apart: row 8q + 2g
// + e of 32 comes as 8g + 2q + e (q, g < 4; e < 2). Five coordinates: column, 0, 0, 0, row / 32.
// rows and box_rows: multiples of 32.
CUtensorMap MakeWeightMap(const __nv_bfloat16* w, int64_t rows, int64_t columns, int box_rows);

}  // namespace statetap::cuda
