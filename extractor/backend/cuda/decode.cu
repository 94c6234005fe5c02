#include "extractor/backend/cuda/decode.h"

#include <algorithm>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"

namespace statetap::cuda {
namespace {

constexpr int kPad = 8;  // values behind a row in shared memory: ldmatrix without bank conflicts

__device__ int64_t CacheRow(const int32_t* page_table, int pages_per_seq, int sequence,
                            int position) {
  const int page =
      page_table[static_cast<int64_t>(sequence) * pages_per_seq + position / kPageTokens];
  return static_cast<int64_t>(page) * kPageTokens + position % kPageTokens;
}

__device__ uint32_t Pack(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ float2 Rotate(float a, float b, float2 cos_sin) {
  return {a * cos_sin.x - b * cos_sin.y, a * cos_sin.y + b * cos_sin.x};
}

constexpr int kAbsorbThreads = 128, kAbsorbTokens = 16, kAbsorbColumns = 64;

// A head's share of some tokens, side by side: their queries' positional part; head 0 also writes
// the cache rows.
__device__ void RotateTokens(const RotateAndStoreParams& p, int first, int tokens, int head) {
  const int latent_dim = p.kv_lora + p.rope, pairs = p.rope / 2;
  const auto rotate = [&](int64_t t, int pair, const bf16* from, bf16* to) {
    const float2 by = p.rotary[static_cast<int64_t>(p.positions[t]) * pairs + pair];
    const float2 turned =
        Rotate(__bfloat162float(from[2 * pair]), __bfloat162float(from[2 * pair + 1]), by);
    *reinterpret_cast<uint32_t*>(to + 2 * pair) = Pack(turned.x, turned.y);
  };
  for (int i = threadIdx.x; i < tokens * pairs; i += kAbsorbThreads) {
    const int64_t t = first + i / pairs, row = t * p.num_heads + head;
    rotate(t, i % pairs, p.queries + row * (p.nope + p.rope) + p.nope,
           p.absorbed + row * latent_dim + p.kv_lora);
  }
  if (head != 0) return;
  const auto cache_row = [&](int64_t t) {
    return p.cache +
           CacheRow(p.page_table, p.pages_per_seq, p.sequence[t], p.positions[t]) * latent_dim;
  };
  for (int i = threadIdx.x; i < tokens * pairs; i += kAbsorbThreads) {
    const int64_t t = first + i / pairs;
    rotate(t, i % pairs, p.latents + t * p.latent_stride + p.query_dim + p.kv_lora,
           cache_row(t) + p.kv_lora);
  }
  const int pieces = p.kv_lora / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < tokens * pieces; i += kAbsorbThreads) {
    const int64_t t = first + i / pieces;
    const int column = i % pieces * 8;
    const bf16* from = p.latents + t * p.latent_stride + p.query_dim + column;
    bf16* to = cache_row(t) + column;
    if (p.query_dim % 8 == 0 && p.latent_stride % 8 == 0) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int c = 0; c < 8; ++c) to[c] = from[c];
    }
  }
}

// grid: (head, 64 columns of kv_lora, 16 tokens); the last of y rotates and stores instead. Tokens
// are operand A, U is B: its rows are K, so ldmatrix transposes them.
__global__ void __launch_bounds__(kAbsorbThreads) AbsorbKernel(const RotateAndAbsorbParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const RotateAndStoreParams& p = params.rotate;
  const int head = static_cast<int>(blockIdx.x),
            first_column = static_cast<int>(blockIdx.y) * kAbsorbColumns;
  const int first = static_cast<int>(blockIdx.z) * kAbsorbTokens,
            tokens = min(kAbsorbTokens, p.num_tokens - first);
  LetNextBegin();
  if (first_column >= p.kv_lora) {
    WaitForEarlier();
    RotateTokens(p, first, tokens, head);
    return;
  }
  constexpr int kStride = kAbsorbColumns + kPad;
  auto* up = reinterpret_cast<bf16*>(shared);
  bf16* queries = up + p.nope * kStride;
  const int query_stride = p.nope + kPad, head_dim = p.nope + p.rope;
  const bf16* from =
      params.kv_b + static_cast<int64_t>(head) * (p.nope + params.v) * p.kv_lora + first_column;
  for (int i = threadIdx.x; i < p.nope * (kAbsorbColumns / 8); i += kAbsorbThreads) {
    const int row = i / (kAbsorbColumns / 8), column = i % (kAbsorbColumns / 8) * 8;
    CopyAsync(up + row * kStride + column, from + static_cast<int64_t>(row) * p.kv_lora + column,
              16);
  }
  WaitForEarlier();
  for (int i = threadIdx.x; i < kAbsorbTokens * (p.nope / 8); i += kAbsorbThreads) {
    const int row = i / (p.nope / 8), column = i % (p.nope / 8) * 8;
    const int64_t token = first + min(row, tokens - 1);
    CopyAsync(queries + row * query_stride + column,
              p.queries + (token * p.num_heads + head) * head_dim + column, 16);
  }
  CommitCopies();
  WaitCopies<0>();
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float acc[2][4] = {};
  for (int k = 0; k < p.nope; k += 16) {
    uint32_t a[4], b[4];
    LoadMatrices(a, queries + lane % 16 * query_stride + k + lane / 16 * 8);
    LoadMatricesTransposed(b, up + (k + lane % 16) * kStride + warp * 16 + lane / 16 * 8);
    Mma(acc[0], a, b[0], b[1]);
    Mma(acc[1], a, b[2], b[3]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    if (row >= tokens) continue;
    bf16* to = p.absorbed +
               (static_cast<int64_t>(first + row) * p.num_heads + head) * (p.kv_lora + p.rope) +
               first_column + warp * 16 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n)
      *reinterpret_cast<uint32_t*>(to + n * 8) = Pack(acc[n][half * 2], acc[n][half * 2 + 1]);
  }
}

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kKeys = 32;                              // of a step of the loop: half a page
constexpr int kRows = 16;                              // heads of a block
constexpr int kMaxLatent = 512;                        // columns of c
constexpr int kColumnTiles = kMaxLatent / 8 / kWarps;  // n8 tiles of the output that a warp holds
constexpr int kSlices = 4;                             // of the columns, in the scores
static_assert(kPageTokens % kKeys == 0 && kKeys == 32, "a lane a key in the softmax");

// Slices are of whole k16 steps.
__host__ __device__ constexpr int PaddedLatent(int latent_dim) {
  return (latent_dim + 16 * kSlices - 1) / (16 * kSlices) * (16 * kSlices);
}

constexpr int kScoreStride = kKeys + 4, kWeightStride = kKeys + kPad;
// The queries' place is free once they are in registers: scores by slice, rescales, softmax weights
// and the factors of a fold follow there.
constexpr int kSoftmaxBytes =
    (kSlices * kRows * kScoreStride + kRows) * 4 + kRows * kWeightStride * 2 + kRows * 8;
__host__ __device__ constexpr int QueryBytes(int latent_dim) {
  const int bytes = kRows * (PaddedLatent(latent_dim) + kPad) * 2;
  return bytes > kSoftmaxBytes ? bytes : kSoftmaxBytes;
}
int SharedBytes(int latent_dim, int stages) {
  return QueryBytes(latent_dim) + stages * kKeys * (PaddedLatent(latent_dim) + kPad) * 2;
}

// A row's keys in at most kMaxSplits parts of at least two pages.
constexpr int kPagesASplit = 2;
struct Splits {
  int count, keys;  // keys: of each but the last
};
__device__ Splits SplitsOf(int position) {
  const int pages = position / kPageTokens + 1,
            each = max(kPagesASplit, (pages + kMaxSplits - 1) / kMaxSplits);
  return {(pages + each - 1) / each, each * kPageTokens};
}

// What two sums of softmax are worth when they become one: (maximum a, …) and (maximum b, …).
struct Fold {
  float maximum, of_a, of_b;
};
__device__ Fold FoldOf(float a, float b) {
  const float now = fmaxf(a, b);
  return {now, a == now ? 1.0f : expf(a - now), b == now ? 1.0f : expf(b - now)};
}
// The same operations wherever parts are folded. Folded onto nothing (maximum −∞, 0) b keeps its
// bits.
__device__ float Folded(float a, float of_a, float b, float of_b) {
  return fmaf(b, of_b, __fmul_rn(a, of_a));
}

// Where a token's `part` is, of `splits` splits each, for head 0.
__device__ int64_t PartOf(const DecodeParams& p, int64_t token, int part, int splits) {
  return (token * (kMaxSplits / splits) + part) * p.num_heads;
}

// kRowsLoaded rows of `columns` values, zero behind `valid` rows and behind the columns; 16 bytes
// at once where rows are of whole pieces.
template <int kRowsLoaded>
__device__ void LoadRows(bf16* to, int stride, const bf16* from, int valid, int columns,
                         int padded) {
  constexpr int kThreadsARow = kThreads / kRowsLoaded;
  const int row = static_cast<int>(threadIdx.x) / kThreadsARow,
            part = static_cast<int>(threadIdx.x) % kThreadsARow;
  to += row * stride;
  from += static_cast<int64_t>(row < valid ? row : 0) * columns;
  if (columns % 8 == 0) {
    for (int column = part * 8; column < padded; column += kThreadsARow * 8) {
      const bool real = row < valid && column < columns;
      CopyAsync(to + column, real ? from + column : from, real ? 16 : 0);
    }
  } else {
    for (int column = part; column < padded; column += kThreadsARow)
      to[column] = row < valid && column < columns ? from[column] : __float2bfloat16_rn(0.0f);
  }
}

// grid: (token, group of heads, `splits` parts of the keys, which are folded into one). Scores: a
// warp has 16 keys and a slice of the columns, whose queries stay in registers (kHeld k16 steps).
// Softmax: a warp has a row, and one eight on if there are as many heads, a lane a key. Output: a
// warp has its own columns. Keys pass through `stages` stages, loading ahead.
template <int kHeld, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    DecodeKernel(const DecodeParams p, const int splits, const int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int padded = PaddedLatent(p.latent_dim), stride = padded + kPad;
  auto* queries = reinterpret_cast<bf16*>(shared);
  auto* keys = reinterpret_cast<bf16*>(shared + QueryBytes(p.latent_dim));
  auto* scores = reinterpret_cast<float*>(shared);
  auto* rescale = scores + kSlices * kRows * kScoreStride;
  auto* weights = reinterpret_cast<bf16*>(rescale + kRows);
  auto* folds = reinterpret_cast<float2*>(weights + kRows * kWeightStride);
  const int token = static_cast<int>(blockIdx.x), first_head = static_cast<int>(blockIdx.y) * kRows;
  const int heads = min(kRows, p.num_heads - first_head);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  LetNextBegin();
  WaitForEarlier();
  const int sequence = p.sequence[token];
  const int first_split = static_cast<int>(blockIdx.z) * splits;
  const Splits of_row = SplitsOf(p.positions[token]);
  if (first_split >= of_row.count) return;
  const int begin = first_split * of_row.keys,
            end = min((first_split + splits) * of_row.keys, p.positions[token] + 1);

  LoadRows<kRows>(
      queries, stride,
      p.absorbed + (static_cast<int64_t>(token) * p.num_heads + first_head) * p.latent_dim, heads,
      p.latent_dim, padded);
  const auto load_keys = [&](int first_key, int stage) {
    if (first_key < end) {
      LoadRows<kKeys>(
          keys + stage * kKeys * stride, stride,
          p.cache + CacheRow(p.page_table, p.pages_per_seq, sequence, first_key) * p.latent_dim,
          min(kKeys, end - first_key), p.latent_dim, padded);
    }
    CommitCopies();
  };
  // A group of copies for each stage that is waited for; the first has the queries too.
  for (int i = 0; i + 1 < stages; ++i) load_keys(begin + i * kKeys, i);
  if (stages > 2) {
    WaitCopies<2>();
  } else {
    WaitCopies<0>();
  }
  __syncthreads();
  const int slice = warp % kSlices, key0 = warp / kSlices * 16;
  const int steps = padded / 16 / kSlices;
  uint32_t held[kHeld][4];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i < steps)
      LoadMatrices(held[i],
                   queries + lane % 16 * stride + (slice * steps + i) * 16 + lane / 16 * 8);
  }

  // Of a part, and of those before it. Maxima and sums: of rows warp, warp + 8.
  float out[kColumnTiles][4] = {}, all[kColumnTiles][4] = {};
  const int column_tiles = (p.kv_lora + 7) / 8;
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  float all_maximum[2] = {-INFINITY, -INFINITY}, all_sum[2] = {};
  int stage = 0, part_end = min(begin + of_row.keys, end);
  for (int first_key = begin; first_key < end; first_key += kKeys) {
    if (stages > 2) {
      WaitCopies<2>();
    } else {
      WaitCopies<0>();
    }
    __syncthreads();  // these keys are there for all, the stage before them is free
    load_keys(first_key + (stages - 1) * kKeys, stage == 0 ? stages - 1 : stage - 1);
    const bf16* tile = keys + stage * kKeys * stride;
    stage = stage + 1 == stages ? 0 : stage + 1;
    {
      float s[2][4] = {};
      const bf16* row =
          tile + (key0 + lane / 16 * 8 + lane % 8) * stride + slice * steps * 16 + lane / 8 % 2 * 8;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (i >= steps) break;
        uint32_t b[4];
        LoadMatrices(b, row + i * 16);
        Mma(s[0], held[i], b[0], b[1]);
        Mma(s[1], held[i], b[2], b[3]);
      }
      float* to = scores + (slice * kRows + lane / 4) * kScoreStride + key0 + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) = {s[n][0], s[n][1]};
        *reinterpret_cast<float2*>(to + n * 8 + 8 * kScoreStride) = {s[n][2], s[n][3]};
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp + i * kWarps;
      if (row >= heads) break;
      const bool seen = first_key + lane < end;
      const float* at = scores + row * kScoreStride + lane;
      constexpr int kSlice = kRows * kScoreStride;
      const float sliced = ((at[0] + at[kSlice]) + at[2 * kSlice]) + at[3 * kSlice];
      const float score = seen ? sliced * p.scale : -INFINITY;
      float largest = score;
      for (int offset = 16; offset > 0; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
      const float now = fmaxf(maximum[i], largest);
      const float weight = seen ? expf(score - now) : 0.0f;
      weights[row * kWeightStride + lane] = __float2bfloat16_rn(weight);
      float added = weight;
      for (int offset = 16; offset > 0; offset /= 2)
        added += __shfl_xor_sync(0xffffffffu, added, offset);
      const float factor = maximum[i] == now ? 1.0f : expf(maximum[i] - now);
      sum[i] = sum[i] * factor + added;
      maximum[i] = now;
      if (lane == 0) rescale[row] = factor;
    }
    __syncthreads();
    const float low = rescale[lane / 4], high = rescale[lane / 4 + 8];
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      out[c][0] *= low;
      out[c][1] *= low;
      out[c][2] *= high;
      out[c][3] *= high;
    }
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      uint32_t a[4];
      LoadMatrices(a, weights + lane % 16 * kWeightStride + k + lane / 16 * 8);
#pragma unroll
      for (int c = 0; c < kColumnTiles; c += 2) {
        const int column = (c / 2 * kWarps + warp) * 16;
        if (column / 8 >= column_tiles) continue;
        uint32_t b[4];
        LoadMatricesTransposed(b, tile + (k + lane % 16) * stride + column + lane / 16 * 8);
        Mma(out[c], a, b[0], b[1]);
        Mma(out[c + 1], a, b[2], b[3]);
      }
    }
    if (first_key + kKeys < part_end) continue;
    part_end = min(part_end + of_row.keys, end);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Fold fold = FoldOf(all_maximum[i], maximum[i]);
      all_sum[i] = Folded(all_sum[i], fold.of_a, sum[i], fold.of_b);
      all_maximum[i] = fold.maximum;
      maximum[i] = -INFINITY;
      sum[i] = 0;
      if (lane == 0) folds[warp + i * kWarps] = {fold.of_a, fold.of_b};
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 fold = folds[lane / 4 + half * 8];
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          all[c][i] = Folded(all[c][i], fold.x, out[c][i], fold.y);
          out[c][i] = 0;
        }
      }
    }
  }

  const int64_t part = PartOf(p, token, static_cast<int>(blockIdx.z), splits);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp + i * kWarps;
    if (row < heads && lane == 0) p.stats[part + first_head + row] = {all_maximum[i], all_sum[i]};
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    if (row >= heads) continue;
    float* to = p.parts + (part + first_head + row) * p.kv_lora;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      const int column = (c / 2 * kWarps + warp) * 16 + c % 2 * 8 + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i < p.kv_lora) to[column + i] = all[c][half * 2 + i];
      }
    }
  }
}

constexpr int kCombineThreads = 128;

__device__ float4 Folded(float4 a, float of_a, float4 b, float of_b) {
  return {Folded(a.x, of_a, b.x, of_b), Folded(a.y, of_a, b.y, of_b), Folded(a.z, of_a, b.z, of_b),
          Folded(a.w, of_a, b.w, of_b)};
}

// grid: (token, head). A row's parts, of `splits` splits each: those of kFolded splits are folded,
// then these, ascending both.
__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const DecodeParams p, const int splits) {
  __shared__ float2 inner[kMaxSplits], outer[kMaxSplits];
  __shared__ float sums[kMaxSplits];
  const int64_t token = blockIdx.x, head = blockIdx.y;
  const int thread = static_cast<int>(threadIdx.x), together = kFolded / splits;
  LetNextBegin();
  WaitForEarlier();
  const int num_parts = (SplitsOf(p.positions[token]).count + splits - 1) / splits;
  const int64_t first = PartOf(p, token, 0, splits) + head;
  if (thread < 32) {
    static_assert(kMaxSplits == 64 && 32 % kFolded == 0, "two parts a lane, groups in one warp");
    float before = -INFINITY;  // the largest of earlier groups
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = thread + i * 32, lane = part % together;
      const float2 of = part < num_parts ? p.stats[first + part * int64_t{p.num_heads}]
                                         : make_float2(-INFINITY, 0.0f);
      // Maxima up to this part, within its group, and over groups.
      float until = of.x;
      for (int offset = 1; offset < together; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, until, offset);
        if (lane >= offset) until = fmaxf(until, other);
      }
      const float earlier = __shfl_up_sync(0xffffffffu, until, 1);
      const Fold in_group = FoldOf(lane > 0 ? earlier : -INFINITY, of.x);
      float groups =
          __shfl_sync(0xffffffffu, until, part / together * together % 32 + together - 1);
      const float group = groups;
      for (int offset = together; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, groups, offset);
        if (thread >= offset) groups = fmaxf(groups, other);
      }
      const float earlier_groups = __shfl_up_sync(0xffffffffu, groups, together);
      const Fold of_group =
          FoldOf(fmaxf(before, thread >= together ? earlier_groups : -INFINITY), group);
      before = fmaxf(before, __shfl_sync(0xffffffffu, groups, 31));
      inner[part] = {in_group.of_a, in_group.of_b};
      outer[part] = {of_group.of_a, of_group.of_b};
      sums[part] = of.y;
    }
  }
  __syncthreads();
  // The loads of several parts come together, then their folds, one after the other.
  const auto fold = [&](const auto& value_of) {
    decltype(value_of(0)) all{}, values[kFolded];
    for (int base = 0; base < num_parts; base += kFolded) {
#pragma unroll
      for (int i = 0; i < kFolded; ++i) {
        if (base + i < num_parts) values[i] = value_of(base + i);
      }
      decltype(value_of(0)) group{};
#pragma unroll
      for (int i = 0; i < kFolded; ++i) {
        if (base + i >= num_parts) break;
        const float2 in_group = inner[base + i], of_all = outer[base + i];
        if (together > 1) {
          group = Folded(group, in_group.x, values[i], in_group.y);
        } else {
          all = Folded(all, of_all.x, values[i], of_all.y);
        }
      }
      if (together > 1) all = Folded(all, outer[base].x, group, outer[base].y);
    }
    return all;
  };
  const float total = fold([&](int part) { return sums[part]; });
  bf16* to = p.out + (token * p.num_heads + head) * p.kv_lora;
  const float* from = p.parts + first * p.kv_lora;
  const int64_t stride = static_cast<int64_t>(p.num_heads) * p.kv_lora;  // to the next part
  if (p.kv_lora % 4 == 0) {
    for (int column = thread * 4; column < p.kv_lora; column += kCombineThreads * 4) {
      const float4 out = fold([&](int part) {
        return *reinterpret_cast<const float4*>(from + part * stride + column);
      });
      *reinterpret_cast<uint2*>(to + column) = {Pack(out.x / total, out.y / total),
                                                Pack(out.z / total, out.w / total)};
    }
    return;
  }
  for (int column = thread; column < p.kv_lora; column += kCombineThreads) {
    const float out = fold([&](int part) { return from[part * stride + column]; });
    to[column] = __float2bfloat16_rn(out / total);
  }
}

template <int kHeld, int kBlocks>
void LaunchDecode(const DecodeParams& p, dim3 grid, int splits, cudaStream_t stream) {
  // A block that has its multiprocessor to itself loads further ahead.
  int stages = 2;
  if (int64_t{grid.x} * grid.y * grid.z <= Processors() &&
      SharedBytes(p.latent_dim, 4) <= SharedLimit())
    stages = 4;
  const int bytes = SharedBytes(p.latent_dim, stages);
  auto* kernel = DecodeKernel<kHeld, kBlocks>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  LaunchEarly(kernel, grid, kThreads, static_cast<size_t>(bytes), stream, p, splits, stages);
}

}  // namespace

bool Absorbable(int nope, int rope, int kv_lora) {
  return nope % 16 == 0 && nope > 0 && nope <= 128 && rope % 8 == 0 &&
         kv_lora % kAbsorbColumns == 0;
}

void RotateAndAbsorb(const RotateAndAbsorbParams& params, cudaStream_t stream) {
  const RotateAndStoreParams& p = params.rotate;
  if (p.num_tokens == 0) return;
  const int bytes = (p.nope * (kAbsorbColumns + kPad) + kAbsorbTokens * (p.nope + kPad)) * 2;
  const dim3 grid(static_cast<unsigned>(p.num_heads),
                  static_cast<unsigned>(p.kv_lora / kAbsorbColumns + 1),
                  static_cast<unsigned>((p.num_tokens + kAbsorbTokens - 1) / kAbsorbTokens));
  LaunchEarly(AbsorbKernel, grid, kAbsorbThreads, static_cast<size_t>(bytes), stream, params);
}

void AttendDecode(const DecodeParams& params, cudaStream_t stream) {
  DecodeParams p = params;
  if (p.num_tokens == 0) return;
  if (p.kv_lora > kMaxLatent) {
    Fail("kv_lora_rank = " + std::to_string(p.kv_lora) + ": the kernel holds at most " +
         std::to_string(kMaxLatent));
  }
  const int steps = PaddedLatent(p.latent_dim) / 16 / kSlices;
  const int head_groups = (p.num_heads + kRows - 1) / kRows;
  // At most so many splits, whatever the positions.
  const int most = std::min(kMaxSplits, (p.pages_per_seq + kPagesASplit - 1) / kPagesASplit);
  for (int left = params.num_tokens; left > 0; left -= p.num_tokens) {
    // A block a split fills the GPU with few rows; with many a block has kFolded of them, so that
    // it is seldom at a beginning or an end, and writes an eighth. The bits are the same.
    const int folded = (most + kFolded - 1) / kFolded,
              splits = int64_t{left} * head_groups * folded >= Processors() ? kFolded : 1;
    p.num_tokens = std::min(left, kSplitTokens * splits);
    const dim3 grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(head_groups),
                    static_cast<unsigned>(splits == 1 ? most : folded));
    if (steps <= 9) {
      LaunchDecode<9, 2>(p, grid, splits, stream);
    } else {
      LaunchDecode<32, 1>(p, grid, splits, stream);
    }
    LaunchEarly(CombineKernel,
                dim3(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(p.num_heads)),
                kCombineThreads, 0, stream, p, splits);
    const int64_t rows = int64_t{p.num_tokens} * p.num_heads;
    p.absorbed += rows * p.latent_dim;
    p.out += rows * p.kv_lora;
    p.positions += p.num_tokens;
    p.sequence += p.num_tokens;
  }
}

}  // namespace statetap::cuda
