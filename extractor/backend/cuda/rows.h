// Kernels over rows: norms, the seam between half layers, embedding, SwiGLU. Launchers enqueue on
// `stream` and return; zero rows launch nothing.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "extractor/backend/cuda/gemm.h"

namespace statetap::cuda {

inline constexpr int kMaxRanks = 16;
struct PushParams;

// residual[t] (+)= sum over ranks, in rank order, of partial[rank][first_row + t], summed in fp32,
// rounded once; normed[t] = residual[t] · rsqrt(mean(residual[t]²) + eps) · weight.
struct SumAddNormParams {
  const bf16* partial[kMaxRanks];  // [all rows, hidden] of each rank
  int world;
  int first_row, num_rows, hidden;
  bf16* residual;       // [num_rows, hidden]
  bool replace;         // residual = sum
  const float* weight;  // [hidden]; null: no norm
  float eps;
  bf16* normed;  // [num_rows, hidden]
};
void SumAddNorm(const SumAddNormParams& params, cudaStream_t stream);
// The same behind a push of this rank's rows in the same kernel, row by row (push.h): partial[rank]
// is push.own, the others' are this rank's inbox. REQUIRES: CanPushRows.
bool CanPushRows(int num_rows, int hidden);
void PushSumAddNorm(const PushParams& push, const SumAddNormParams& params, cudaStream_t stream);

// y[i] = x[r] · rsqrt(mean(x[r]²) + eps) · weight, with r = rows == null ? i : rows[i] − first_row.
// Where r is outside [0, num_x_rows): y[i] = 0. y may be x.
struct RmsNormParams {
  const bf16* x;  // [num_x_rows, hidden], rows x_stride apart
  int64_t x_stride;
  const int32_t* rows = nullptr;
  int first_row = 0, num_x_rows;
  const float* weight;  // [hidden]
  bf16* y;              // [num_rows, hidden], rows y_stride apart
  int64_t y_stride;
  int num_rows, hidden;
  float eps;
};
void RmsNorm(const RmsNormParams& params, cudaStream_t stream);
// Two of them in one launch.
void RmsNormBoth(const RmsNormParams& first, const RmsNormParams& second, cudaStream_t stream);

// y[t] = table[ids[t] − first_id], 0 where that is outside [0, num_ids).
struct EmbedRowsParams {
  const int32_t* ids;  // [num_rows]
  const bf16* table;   // [num_ids, hidden]
  int first_id, num_ids;
  bf16* y;  // [num_rows, hidden]
  int num_rows, hidden;
};
void EmbedRows(const EmbedRowsParams& params, cudaStream_t stream);

// out[i] = silu(gate[i]) · up[i]. out may be either of them.
void SwiGlu(const bf16* gate, const bf16* up, bf16* out, int64_t count, cudaStream_t stream);

// to[i] = bf16(from[i]) for a rectangle. kHalf: fp16 input.
enum class Source { kFloat, kHalf, kBf16 };
struct ConvertParams {
  const void* from;  // [rows, cols], one row behind the other
  Source source;
  int64_t rows, cols;
  bf16* to = nullptr;         // [rows, cols]
  float* to_float = nullptr;  // the same in fp32, if asked
};
void Convert(const ConvertParams& params, cudaStream_t stream);

}  // namespace statetap::cuda
