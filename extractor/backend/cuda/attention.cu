#include "extractor/backend/cuda/attention.h"

#include <algorithm>
#include <type_traits>

#include "extractor/backend/cuda/cache_rows.h"
#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kKeys = kPageTokens;                     // of a step of the loop: one page
constexpr int kMaxLatent = 512;                        // columns of c
constexpr int kColumnTiles = kMaxLatent / 8 / kWarps;  // n8 tiles of the output that a warp holds
constexpr int kPad = 8;  // values behind a row in shared memory: ldmatrix without bank conflicts
constexpr int kSmallRows = 16, kLargeRows = 64;
static_assert(kKeys == 64, "the phases below deal out 64 keys");

// Of a row: by 16 bytes, or, where rows do not lie at multiples of that, pair by pair.
template <bool kWide>
struct alignas(kWide ? 16 : 2) Values {
  static constexpr int kCount = kWide ? 8 : 2;
  bf16 at[kCount];
};

template <bool kWide>
__device__ Values<kWide> Rotated(const bf16* from, const float2* rotary) {
  constexpr int kPairs = Values<kWide>::kCount / 2;
  struct alignas(kWide ? 16 : 8) Angles {
    float2 at[kPairs];
  };
  auto values = *reinterpret_cast<const Values<kWide>*>(from);
  const Angles angles = *reinterpret_cast<const Angles*>(rotary);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 to = Rotate(__bfloat162float(values.at[2 * i]),
                             __bfloat162float(values.at[2 * i + 1]), angles.at[i]);
    values.at[2 * i] = __float2bfloat16_rn(to.x);
    values.at[2 * i + 1] = __float2bfloat16_rn(to.y);
  }
  return values;
}

// One warp a token.
template <bool kWide>
__global__ void __launch_bounds__(kThreads) RotateAndStoreKernel(const RotateAndStoreParams p) {
  using Some = Values<kWide>;
  using Copied = std::conditional_t<kWide, Some, bf16>;
  constexpr int kStep = Some::kCount, kCopied = sizeof(Copied) / sizeof(bf16);
  const int lane = static_cast<int>(threadIdx.x) % 32, pieces = p.rope / kStep;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  LetNextBegin();
  WaitForEarlier();
  if (t >= p.num_tokens) return;
  const int position = p.positions[t], latent_dim = p.kv_lora + p.rope;
  const bf16* latent = p.latents + t * p.latent_stride + p.query_dim;
  bf16* cache =
      p.cache + CacheRow(p.page_table, p.pages_per_seq, p.sequence[t], position) * latent_dim;
  const float2* rotary = p.rotary + static_cast<int64_t>(position) * (p.rope / 2);
  for (int i = lane; i < p.kv_lora / kCopied; i += 32)
    reinterpret_cast<Copied*>(cache)[i] = reinterpret_cast<const Copied*>(latent)[i];
  for (int i = lane; i < pieces; i += 32) {
    const int at = i * kStep;
    *reinterpret_cast<Some*>(cache + p.kv_lora + at) =
        Rotated<kWide>(latent + p.kv_lora + at, rotary + at / 2);
  }
  for (int i = lane; i < p.num_heads * pieces; i += 32) {
    const int head = i / pieces, at = i % pieces * kStep;
    bf16* query = p.queries + (t * p.num_heads + head) * (p.nope + p.rope) + p.nope + at;
    const Some to = Rotated<kWide>(query, rotary + at / 2);
    *reinterpret_cast<Some*>(query) = to;
    if (p.absorbed == nullptr) continue;
    bf16* absorbed = p.absorbed + (t * p.num_heads + head) * latent_dim + p.kv_lora + at;
    *reinterpret_cast<Some*>(absorbed) = to;
  }
}

int PaddedLatent(int latent_dim) { return (latent_dim + 15) / 16 * 16; }

int SharedBytes(int rows, int latent_dim) {
  const int stride = PaddedLatent(latent_dim) + kPad;
  return (rows + kKeys) * stride * 2 +  // queries, keys
         rows * (kKeys + 4) * 4 +       // scores
         rows * (kKeys + kPad) * 2 +    // softmax weights
         rows * 3 * 4;                  // maximum, sum, rescale
}

// Rows of `columns` values into shared memory, zero behind them up to `padded`. Rows at or beyond
// `valid` are zero: what lies in a page behind the sequence's end may be anything, NaN included.
__device__ void LoadRows(bf16* to, int stride, const bf16* from, int rows, int valid, int columns,
                         int padded) {
  if (columns % 8 == 0) {
    const int pieces = padded / 8;
    for (int i = threadIdx.x; i < rows * pieces; i += kThreads) {
      const int row = i / pieces, column = i % pieces * 8;
      const bool real = row < valid && column < columns;
      CopyAsync(to + row * stride + column,
                real ? from + static_cast<int64_t>(row) * columns + column : from, real ? 16 : 0);
    }
    CommitCopies();
    WaitCopies<0>();
    return;
  }
  for (int i = threadIdx.x; i < rows * padded; i += kThreads) {
    const int row = i / padded, column = i % padded;
    to[row * stride + column] = row < valid && column < columns
                                    ? from[static_cast<int64_t>(row) * columns + column]
                                    : __float2bfloat16_rn(0.0f);
  }
}

// grid: (tile, group of heads). A block attends kRows rows (token, head) of one sequence, a cache
// page at a time: scores by all warps, softmax by four lanes a row, then each warp adds to its own
// columns of the output.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    AttendKernel(const AttendParams p, const AttentionTile* tiles, int heads_per_tile) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ bool bad[kKeys];
  const int padded = (p.latent_dim + 15) / 16 * 16, stride = padded + kPad;
  constexpr int kScoreStride = kKeys + 4, kWeightStride = kKeys + kPad;
  auto* queries = reinterpret_cast<bf16*>(shared);
  bf16* keys = queries + kRows * stride;
  auto* scores = reinterpret_cast<float*>(keys + kKeys * stride);
  auto* weights = reinterpret_cast<bf16*>(scores + kRows * kScoreStride);
  auto* maximum = reinterpret_cast<float*>(weights + kRows * kWeightStride);
  float *sum = maximum + kRows, *rescale = sum + kRows;

  const AttentionTile tile = tiles[blockIdx.x];
  const int first_head = static_cast<int>(blockIdx.y) * heads_per_tile;
  const int heads = min(heads_per_tile, p.num_heads - first_head);
  const int num_rows = tile.count * heads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int sequence = p.sequence[tile.first_token];
  const int first_position = p.positions[tile.first_token];
  const int end_key = first_position + tile.count;

  for (int i = threadIdx.x; i < kRows * padded; i += kThreads) {
    const int row = i / padded, column = i % padded;
    const int64_t token = tile.first_token + row / heads, head = first_head + row % heads;
    queries[row * stride + column] =
        row < num_rows && column < p.latent_dim
            ? p.absorbed[(token * p.num_heads + head) * p.latent_dim + column]
            : __float2bfloat16_rn(0.0f);
  }
  for (int row = threadIdx.x; row < kRows; row += kThreads) {
    maximum[row] = -INFINITY;
    sum[row] = 0;
  }

  constexpr int kRowTiles = kRows / 16;
  float out[kRowTiles][kColumnTiles][4] = {};
  const int column_tiles = (p.kv_lora + 7) / 8;

  for (int first_key = 0; first_key < end_key; first_key += kKeys) {
    const int num_keys = min(kKeys, end_key - first_key);
    // Do all rows see all of these keys?
    const bool masks = first_key + kKeys > first_position;
    __syncthreads();  // all are done with the last page
    LoadRows(keys, stride,
             p.cache + CacheRow(p.page_table, p.pages_per_seq, sequence, first_key) * p.latent_dim,
             kKeys, num_keys, p.latent_dim, padded);
    __syncthreads();

    // Scores. A warp takes 16 rows × kSpan keys.
    constexpr int kWarpsARow = kWarps / kRowTiles, kSpan = kKeys / kWarpsARow;
    {
      const int row0 = warp / kWarpsARow * 16, key0 = warp % kWarpsARow * kSpan;
      float s[kSpan / 8][4] = {};
      for (int k = 0; k < padded; k += 16) {
        uint32_t a[4];
        LoadMatrices(a, queries + (row0 + lane % 16) * stride + k + lane / 16 * 8);
        if constexpr (kSpan == 8) {
          uint32_t b[4];  // lanes 16…31 repeat what lanes 0…15 say
          LoadMatrices(b, keys + (key0 + lane % 8) * stride + k + lane / 8 % 2 * 8);
          Mma(s[0], a, b[0], b[1]);
        } else {
#pragma unroll
          for (int n = 0; n < kSpan / 16; ++n) {
            uint32_t b[4];
            LoadMatrices(b, keys + (key0 + n * 16 + lane / 16 * 8 + lane % 8) * stride + k +
                                lane / 8 % 2 * 8);
            Mma(s[2 * n], a, b[0], b[1]);
            Mma(s[2 * n + 1], a, b[2], b[3]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kSpan / 8; ++n) {
        float* to = scores + (row0 + lane / 4) * kScoreStride + key0 + n * 8 + lane % 4 * 2;
        to[0] = s[n][0];
        to[1] = s[n][1];
        to[8 * kScoreStride] = s[n][2];
        to[8 * kScoreStride + 1] = s[n][3];
      }
    }
    // 0 · NaN is NaN: a key that is not finite must not reach the rows in front of it. It leaves
    // the product, and a row that does see it becomes NaN through its weight.
    bool any_bad = false;
    if (masks) {
      __syncthreads();  // the scores have read the keys
      for (int key = static_cast<int>(threadIdx.x) / 4; key < kKeys; key += kThreads / 4) {
        bool finite = true;
        for (int c = static_cast<int>(threadIdx.x) % 4; c < p.kv_lora; c += 4)
          finite = finite && isfinite(__bfloat162float(keys[key * stride + c]));
        const unsigned lanes = 15u << (lane / 4 * 4);
        const unsigned votes = __ballot_sync(0xffffffffu, !finite);
        const bool is_bad = (votes & lanes) != 0;
        if (threadIdx.x % 4 == 0) bad[key] = is_bad;
        any_bad = any_bad || is_bad;
        if (!is_bad) continue;
        for (int c = static_cast<int>(threadIdx.x) % 4; c < padded; c += 4)
          keys[key * stride + c] = __float2bfloat16_rn(0.0f);
      }
    }
    any_bad = __syncthreads_or(any_bad);

    // Softmax of the page: lane i of a row's four takes keys i, i + 4, … Keys behind the row's own
    // position count nothing; a page that holds none of its keys leaves every bit of the row alone.
    if (threadIdx.x < kRows * 4) {
      const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
      const int position = first_position + row / heads;
      float largest = -INFINITY;
      for (int i = part; i < kKeys; i += 4) {
        float& score = scores[row * kScoreStride + i];
        score = first_key + i <= position ? score * p.scale : -INFINITY;
        if (any_bad && bad[i] && first_key + i <= position) score = NAN;
        largest = fmaxf(largest, score);
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float before = maximum[row], now = fmaxf(before, largest);
      float added = 0;
      for (int i = part; i < kKeys; i += 4) {
        const bool seen = first_key + i <= position;
        const float weight = seen ? expf(scores[row * kScoreStride + i] - now) : 0.0f;
        added += weight;
        weights[row * kWeightStride + i] = __float2bfloat16_rn(weight);
      }
      added += __shfl_xor_sync(0xffffffffu, added, 1);
      added += __shfl_xor_sync(0xffffffffu, added, 2);
      __syncwarp();
      if (part == 0) {
        const float factor = before == now ? 1.0f : expf(before - now);
        rescale[row] = factor;
        sum[row] = sum[row] * factor + added;
        maximum[row] = now;
      }
    }
    __syncthreads();

    // Output columns [8 · tile, … + 8) with tile = warp, warp + 8, …: two tiles at a time, so that
    // one ldmatrix feeds both.
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const float low = rescale[r * 16 + lane / 4], high = rescale[r * 16 + lane / 4 + 8];
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        out[r][c][0] *= low;
        out[r][c][1] *= low;
        out[r][c][2] *= high;
        out[r][c][3] *= high;
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
        LoadMatrices(a[r], weights + (r * 16 + lane % 16) * kWeightStride + k + lane / 16 * 8);
#pragma unroll
      for (int c = 0; c < kColumnTiles; c += 2) {
        // Neighbouring tiles 2w, 2w + 1 of the c-th round.
        const int column = (c / 2 * kWarps + warp) * 16;
        if (column / 8 >= column_tiles) continue;
        uint32_t b[4];
        LoadMatricesTransposed(b, keys + (k + lane % 16) * stride + column + lane / 16 * 8);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Mma(out[r][c], a[r], b[0], b[1]);
          Mma(out[r][c + 1], a[r], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = r * 16 + lane / 4 + half * 8;
      if (row >= num_rows) continue;
      const int64_t token = tile.first_token + row / heads, head = first_head + row % heads;
      bf16* to = p.out + (token * p.num_heads + head) * p.kv_lora;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        const int column = (c / 2 * kWarps + warp) * 16 + c % 2 * 8 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (column + i >= p.kv_lora) continue;
          to[column + i] = __float2bfloat16_rn(out[r][c][half * 2 + i] / sum[row]);
        }
      }
    }
  }
}

template <int kRows>
void Launch(const AttendParams& p, const AttentionTile* tiles, int count, cudaStream_t stream) {
  if (count == 0) return;
  if (p.kv_lora > kMaxLatent) {
    Fail("kv_lora_rank = " + std::to_string(p.kv_lora) + ": the kernel holds at most " +
         std::to_string(kMaxLatent));
  }
  const int heads = std::min(p.num_heads, kRows), bytes = SharedBytes(kRows, p.latent_dim);
  auto* kernel = AttendKernel<kRows>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const dim3 grid(static_cast<unsigned>(count),
                  static_cast<unsigned>((p.num_heads + heads - 1) / heads));
  kernel<<<grid, kThreads, static_cast<size_t>(bytes), stream>>>(p, tiles, heads);
  CheckLaunch();
}

}  // namespace

void RotateAndStore(const RotateAndStoreParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  bool wide = true;
  for (const int64_t columns : {p.latent_stride, int64_t{p.query_dim}, int64_t{p.kv_lora},
                                int64_t{p.nope}, int64_t{p.rope}})
    wide = wide && columns % Values<true>::kCount == 0;
  LaunchEarly(wide ? RotateAndStoreKernel<true> : RotateAndStoreKernel<false>,
              dim3(static_cast<unsigned>((p.num_tokens + kWarps - 1) / kWarps)), kThreads, 0,
              stream, p);
}

AttentionForms AttentionFormsOf(int num_heads, int latent_dim) {
  AttentionForms forms;
  forms.small_tokens = std::max(1, kSmallRows / num_heads);
  if (SharedBytes(kLargeRows, latent_dim) <= SharedLimit())
    forms.large_tokens = std::max(1, kLargeRows / num_heads);
  return forms;
}

void Attend(const AttendParams& p, cudaStream_t stream) {
  Launch<kSmallRows>(p, p.tiles, p.num_small, stream);
  Launch<kLargeRows>(p, p.tiles + p.num_small, p.num_large, stream);
}

}  // namespace statetap::cuda
