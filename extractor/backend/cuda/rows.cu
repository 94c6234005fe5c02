#include "extractor/backend/cuda/rows.h"

#include <cuda_fp16.h>

#include <algorithm>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"
#include "extractor/backend/cuda/push_piece.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;  // values of a 16-byte access

bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Values [0, count) of a chunk; whole ones by one 16-byte access where everything is aligned.
__device__ void Load(const bf16* from, int count, bool wide, float (&to)[kChunk]) {
  if (wide) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float2 pair = __bfloat1622float2(pairs[i]);
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) to[i] = i < count ? __bfloat162float(from[i]) : 0.0f;
}

__device__ void Store(bf16* to, int count, bool wide, const float (&from)[kChunk]) {
  if (wide) {
    uint4 bits;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&bits);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i)
      pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
    *reinterpret_cast<uint4*>(to) = bits;
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < count) to[i] = __float2bfloat16_rn(from[i]);
  }
}

// value · scale · weight
__device__ void Scale(const float* weight, int count, bool wide, float scale,
                      float (&value)[kChunk]) {
  if (wide) {  // one by one the lanes' loads would each take a whole sector of the L2
    const auto* four = reinterpret_cast<const float4*>(weight);
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) {
      const float4 w = four[i];
      value[4 * i] = value[4 * i] * scale * w.x;
      value[4 * i + 1] = value[4 * i + 1] * scale * w.y;
      value[4 * i + 2] = value[4 * i + 2] * scale * w.z;
      value[4 * i + 3] = value[4 * i + 3] * scale * w.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < count) value[i] = value[i] * scale * weight[i];
  }
}

// Sum over the block in a fixed order; the same value on every thread. Once in a kernel.
__device__ double BlockSum(double value) {
  __shared__ double warps[32];
  const unsigned lane = threadIdx.x % 32;
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (lane == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? warps[lane] : 0.0;
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// fp64, as on the CPU: the widest rows' sum of squares can leave fp32.
__device__ float NormScale(double squares, int hidden, float eps) {
  return static_cast<float>(1.0 / sqrt(squares / hidden + static_cast<double>(eps)));
}

// What a block of SumAddNormKernel adds up for columns [c, c + count) of a row.
__device__ double SumColumns(const SumAddNormParams& p, int64_t row, int c, bool wide,
                             float (&sum)[kChunk]) {
  const int count = min(kChunk, p.hidden - c);
  const int64_t from = (p.first_row + row) * p.hidden + c;
  bf16* residual = p.residual + row * p.hidden + c;
  float part[kChunk];
  Load(p.partial[0] + from, count, wide, sum);
  for (int rank = 1; rank < p.world; ++rank) {
    Load(p.partial[rank] + from, count, wide, part);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] += part[i];
  }
  if (!p.replace) {
    Load(residual, count, wide, part);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] += part[i];
  }
  double squares = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    sum[i] = __bfloat162float(__float2bfloat16_rn(sum[i]));
    squares += static_cast<double>(sum[i]) * sum[i];
  }
  Store(residual, count, wide, sum);
  return squares;
}

__device__ void NormColumns(const SumAddNormParams& p, int64_t row, int c, bool wide, float scale,
                            float (&value)[kChunk]) {
  const int count = min(kChunk, p.hidden - c);
  Scale(p.weight + c, count, wide, scale, value);
  Store(p.normed + row * p.hidden + c, count, wide, value);
}

constexpr int kHeld = 2;  // chunks of a row that a thread keeps

// One block a row: what a thread added up stays in its registers. Rows of up to 16,384 values; how
// many threads there are depends on the width alone. kPushes: the row goes to the other ranks
// first.
template <bool kPushes>
__global__ void SumAddNormKernel(const SumAddNormParams p, const PushParams push, bool wide) {
  const int64_t row = blockIdx.x;
  LetNextBegin();
  WaitForEarlier();
  if constexpr (kPushes) {
    const size_t units = static_cast<size_t>(p.hidden) * sizeof(bf16) / sizeof(uint4);
    PushPiece(push, static_cast<int>(row), row * units, (row + 1) * units);
  }
  const auto column = [&](int i) {
    return static_cast<int>(threadIdx.x + i * blockDim.x) * kChunk;
  };
  float value[kHeld][kChunk];
  double squares = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (column(i) < p.hidden) squares += SumColumns(p, row, column(i), wide, value[i]);
  }
  if (p.weight == nullptr) return;
  const float scale = NormScale(BlockSum(squares), p.hidden, p.eps);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (column(i) < p.hidden) NormColumns(p, row, column(i), wide, scale, value[i]);
  }
}

// Wider rows: a thread sees the same columns in both passes, so it reads back what it wrote.
__global__ void SumAddNormWideKernel(const SumAddNormParams p, bool wide) {
  const int64_t row = blockIdx.x;
  LetNextBegin();
  WaitForEarlier();
  double squares = 0;
  float value[kChunk];
  const int first = static_cast<int>(threadIdx.x) * kChunk;
  for (int c = first; c < p.hidden; c += kThreads * kChunk)
    squares += SumColumns(p, row, c, wide, value);
  if (p.weight == nullptr) return;
  const float scale = NormScale(BlockSum(squares), p.hidden, p.eps);
  for (int c = first; c < p.hidden; c += kThreads * kChunk) {
    Load(p.residual + row * p.hidden + c, min(kChunk, p.hidden - c), wide, value);
    NormColumns(p, row, c, wide, scale, value);
  }
}

// One block a row of y; blockIdx.y: which of the two.
// (__grid_constant__: else both would be copied to every thread's memory to choose one.)
__global__ void RmsNormKernel(const __grid_constant__ RmsNormParams first,
                              const __grid_constant__ RmsNormParams second, bool wide) {
  const RmsNormParams& p = blockIdx.y == 0 ? first : second;
  const int64_t i = blockIdx.x;
  LetNextBegin();
  WaitForEarlier();
  if (i >= p.num_rows) return;
  const int row = p.rows == nullptr ? static_cast<int>(i) : p.rows[i] - p.first_row;
  bf16* y = p.y + i * p.y_stride;
  if (row < 0 || row >= p.num_x_rows) {
    for (int c = threadIdx.x; c < p.hidden; c += kThreads) y[c] = __float2bfloat16_rn(0.0f);
    return;
  }
  const bf16* x = p.x + row * p.x_stride;
  double squares = 0;
  float value[kChunk];
  for (int c = threadIdx.x * kChunk; c < p.hidden; c += kThreads * kChunk) {
    Load(x + c, min(kChunk, p.hidden - c), wide, value);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) squares += static_cast<double>(value[k]) * value[k];
  }
  const float scale = NormScale(BlockSum(squares), p.hidden, p.eps);
  for (int c = threadIdx.x * kChunk; c < p.hidden; c += kThreads * kChunk) {
    const int count = min(kChunk, p.hidden - c);
    Load(x + c, count, wide, value);
    Scale(p.weight + c, count, wide, scale, value);
    Store(y + c, count, wide, value);
  }
}

__global__ void EmbedKernel(const EmbedRowsParams p) {
  const int64_t row = blockIdx.x;
  LetNextBegin();
  WaitForEarlier();
  const int id = p.ids[row] - p.first_id;
  const bool here = id >= 0 && id < p.num_ids;
  for (int c = threadIdx.x; c < p.hidden; c += kThreads) {
    p.y[row * p.hidden + c] =
        here ? p.table[static_cast<int64_t>(id) * p.hidden + c] : __float2bfloat16_rn(0.0f);
  }
}

// kPack values at a time.
template <int kPack>
__global__ void SwiGluKernel(const bf16* gate, const bf16* up, bf16* out, int64_t count) {
  struct alignas(kPack * sizeof(bf16)) Values {
    bf16 at[kPack];
  };
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count / kPack;
       i += int64_t{gridDim.x} * kThreads) {
    const Values g = reinterpret_cast<const Values*>(gate)[i],
                 u = reinterpret_cast<const Values*>(up)[i];
    Values y;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const float value = __bfloat162float(g.at[j]);
      y.at[j] = __float2bfloat16_rn(ExactSilu(value) * __bfloat162float(u.at[j]));
    }
    reinterpret_cast<Values*>(out)[i] = y;
  }
}

__global__ void ConvertKernel(const ConvertParams p) {
  const int64_t count = p.rows * p.cols;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    float value;
    if (p.source == Source::kFloat) {
      value = static_cast<const float*>(p.from)[i];
    } else if (p.source == Source::kHalf) {
      value = __half2float(static_cast<const __half*>(p.from)[i]);
    } else {
      value = __bfloat162float(static_cast<const bf16*>(p.from)[i]);
    }
    p.to[i] = __float2bfloat16_rn(value);
    if (p.to_float != nullptr) p.to_float[i] = value;
  }
}

// A thread a value of y; x and w are read through the caches. For sizes where speed does not
// matter.
__global__ void PlainGemmKernel(const GemmParams p) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= int64_t{p.m} * p.n) return;
  const int64_t m = i / p.n, n = i % p.n, b = blockIdx.y;
  const bf16* x = p.x + b * p.x_batch + m * p.x_stride;
  const bf16* w = p.w + b * p.w_batch + (p.w_by_k ? n : n * p.w_stride);
  const int64_t step = p.w_by_k ? p.w_stride : 1;
  float sum = 0;
  for (int k = 0; k < p.k; ++k) sum += __bfloat162float(x[k]) * __bfloat162float(w[k * step]);
  const int64_t at = b * p.y_batch + m * p.y_stride + n;
  if (p.fp32_out) {
    auto* y = static_cast<float*>(p.y);
    y[at] = p.accumulate ? y[at] + sum : sum;
  } else {
    auto* y = static_cast<bf16*>(p.y);
    y[at] = __float2bfloat16_rn(p.accumulate ? __bfloat162float(y[at]) + sum : sum);
  }
}

unsigned Blocks(int64_t count) {
  return static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, 65536));
}

constexpr unsigned kMostThreads = 1024;

// Of SumAddNormKernel.
unsigned ThreadsOf(int hidden) {
  const int chunks = (hidden + kChunk - 1) / kChunk;
  return static_cast<unsigned>((chunks + 32 * kHeld - 1) / (32 * kHeld) * 32);
}

bool WideRows(const SumAddNormParams& p) {
  bool wide =
      p.hidden % kChunk == 0 && Aligned(p.residual) && Aligned(p.normed) && Aligned(p.weight);
  for (int rank = 0; rank < p.world; ++rank) wide = wide && Aligned(p.partial[rank]);
  return wide;
}

bool WideRows(const RmsNormParams& p) {
  return p.hidden % kChunk == 0 && p.x_stride % kChunk == 0 && p.y_stride % kChunk == 0 &&
         Aligned(p.x) && Aligned(p.y) && Aligned(p.weight);
}

}  // namespace

bool CanLaunchEarly() {
  static const bool can = [] {  // of the first GPU asked for: those of a machine are alike
    cudaFuncAttributes attributes{};
    Check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(EmbedKernel)));
    return attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90;
  }();
  return can;
}

void SumAddNorm(const SumAddNormParams& p, cudaStream_t stream) {
  if (p.num_rows == 0) return;
  const dim3 grid(static_cast<unsigned>(p.num_rows));
  if (const unsigned threads = ThreadsOf(p.hidden); threads <= kMostThreads) {
    LaunchEarly(SumAddNormKernel<false>, grid, threads, 0, stream, p, PushParams{}, WideRows(p));
  } else {
    LaunchEarly(SumAddNormWideKernel, grid, kThreads, 0, stream, p, WideRows(p));
  }
}

bool CanPushRows(int num_rows, int hidden) {
  return num_rows <= kMostPushBlocks && hidden % kChunk == 0 && ThreadsOf(hidden) <= kMostThreads;
}

void PushSumAddNorm(const PushParams& push, const SumAddNormParams& p, cudaStream_t stream) {
  if (p.num_rows == 0) return;
  LaunchEarly(SumAddNormKernel<true>, dim3(static_cast<unsigned>(p.num_rows)), ThreadsOf(p.hidden),
              0, stream, p, push, WideRows(p));
}

void RmsNorm(const RmsNormParams& p, cudaStream_t stream) {
  if (p.num_rows == 0) return;
  LaunchEarly(RmsNormKernel, dim3(static_cast<unsigned>(p.num_rows)), kThreads, 0, stream, p, p,
              WideRows(p));
}

void RmsNormBoth(const RmsNormParams& p, const RmsNormParams& q, cudaStream_t stream) {
  const int rows = std::max(p.num_rows, q.num_rows);
  if (rows == 0) return;
  LaunchEarly(RmsNormKernel, dim3(static_cast<unsigned>(rows), 2), kThreads, 0, stream, p, q,
              WideRows(p) && WideRows(q));
}

void EmbedRows(const EmbedRowsParams& p, cudaStream_t stream) {
  if (p.num_rows == 0) return;
  LaunchEarly(EmbedKernel, dim3(static_cast<unsigned>(p.num_rows)), kThreads, 0, stream, p);
}

void SwiGlu(const bf16* gate, const bf16* up, bf16* out, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  constexpr int kPack = 8;
  const auto places = reinterpret_cast<uintptr_t>(gate) | reinterpret_cast<uintptr_t>(up) |
                      reinterpret_cast<uintptr_t>(out);
  if (count % kPack == 0 && places % (kPack * sizeof(bf16)) == 0) {
    SwiGluKernel<kPack><<<Blocks(count / kPack), kThreads, 0, stream>>>(gate, up, out, count);
  } else {
    SwiGluKernel<1><<<Blocks(count), kThreads, 0, stream>>>(gate, up, out, count);
  }
  CheckLaunch();
}

void Convert(const ConvertParams& p, cudaStream_t stream) {
  if (p.rows * p.cols == 0) return;
  ConvertKernel<<<Blocks(p.rows * p.cols), kThreads, 0, stream>>>(p);
  CheckLaunch();
}

void PlainGemm(const GemmParams& p, cudaStream_t stream) {
  const int64_t count = int64_t{p.m} * p.n;
  if (count == 0 || p.batch == 0) return;
  const dim3 grid(static_cast<unsigned>((count + kThreads - 1) / kThreads),
                  static_cast<unsigned>(p.batch));
  PlainGemmKernel<<<grid, kThreads, 0, stream>>>(p);
  CheckLaunch();
}

}  // namespace statetap::cuda
