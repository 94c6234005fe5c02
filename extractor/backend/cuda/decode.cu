#include "extractor/backend/cuda/decode.h"

#include <algorithm>

#include "extractor/backend/cuda/cache_rows.h"
#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"

namespace statetap::cuda {
namespace {

constexpr int kPad = 8;  // values behind a row in shared memory: ldmatrix without bank conflicts

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
constexpr int kKeys = 32;                               // of a step of the loop: half a page
constexpr int kHeads = kWarps;                          // of a block: a warp each in the softmax
constexpr int kMaxLatent = 512;                         // columns of c
constexpr int kColumnTiles = kMaxLatent / 16 / kWarps;  // tiles of 16 columns that a warp holds
constexpr int kSlices = 4;                              // of the columns, in the scores
static_assert(kPageTokens % kKeys == 0 && kKeys == 32, "a lane a key in the softmax");

// Slices are of whole k16 steps.
__host__ __device__ constexpr int PaddedLatent(int latent_dim) {
  return (latent_dim + 16 * kSlices - 1) / (16 * kSlices) * (16 * kSlices);
}

// Shared memory: scores by slice, softmax weights, rescales, the factors of a fold; then stages of
// keys, as ChunkOf says.
constexpr int kWeightStride = kKeys + kPad;
constexpr int kSoftmaxBytes = (kSlices * kKeys * 4 + kWeightStride * 2 + 4 + 8) * kHeads;
constexpr int kKeysAt = (kSoftmaxBytes + 127) / 128 * 128;
__host__ __device__ constexpr int StageBytes(int latent_dim) {
  return kKeys * PaddedLatent(latent_dim) * 2;
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

// kKeys keys of `columns` values, zero behind `valid` keys and behind the columns; 16 bytes at once
// where keys are of whole chunks.
__device__ __forceinline__ void LoadKeys(uint32_t to, const bf16* from, int valid, int columns,
                                         int padded) {
  constexpr int kThreadsAKey = kThreads / kKeys, kRound = kThreadsAKey * 8;
  static_assert(kThreadsAKey == 8, "a thread's chunks are exchanged alike");
  const int key = static_cast<int>(threadIdx.x) / kThreadsAKey,
            part = static_cast<int>(threadIdx.x) % kThreadsAKey;
  to = ChunkOf(to, padded * 2, key, part);
  from += static_cast<int64_t>(key < valid ? key : 0) * columns + part * 8;
  const int left = columns - part * 8;
  if (columns == padded && valid == kKeys) {
#pragma unroll
    for (int i = 0; i < padded / kRound; ++i) CopyAsync(to + i * kRound * 2, from + i * kRound, 16);
  } else if (columns % 8 == 0) {
#pragma unroll 1
    for (int i = 0; i < padded; i += kRound) {
      const bool real = key < valid && i < left;
      CopyAsync(to + i * 2, real ? from + i : from - part * 8, real ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < padded; i += kRound) {
      for (int c = 0; c < 8; ++c) {
        const bf16 value = key < valid && i + c < left ? from[i + c] : __float2bfloat16_rn(0.0f);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + (i + c) * 2),
                     "h"(__bfloat16_as_ushort(value))
                     : "memory");
      }
    }
  }
}

// What is known of the shape when a kernel is compiled. kHeld: k16 steps of a slice of the columns
// at most.
template <int kHeldSteps>
struct AnyShape {
  static constexpr int kHeld = kHeldSteps;
  static __device__ int latent_dim(const DecodeParams& p) { return p.latent_dim; }
  static __device__ int kv_lora(const DecodeParams& p) { return p.kv_lora; }
};
// Kimi-K2's and DeepSeek-V3's.
struct KimiShape {
  static constexpr int kLatentDim = 576, kKvLora = 512;
  static constexpr int kHeld = kLatentDim / 16 / kSlices;
  static __device__ constexpr int latent_dim(const DecodeParams&) { return kLatentDim; }
  static __device__ constexpr int kv_lora(const DecodeParams&) { return kKvLora; }
  static bool Is(const DecodeParams& p) {
    return p.latent_dim == kLatentDim && p.kv_lora == kKvLora;
  }
};

// grid: (token, group of heads, `splits` parts of the keys, which are folded into one). Heads are
// the columns of both products. Scores: a warp has 16 keys and every fourth k16 step of the
// columns, whose queries stay in registers. Softmax: a warp has a head, a lane a key. Output: a
// warp has its own columns. Keys pass through kStages stages, loading ahead.
template <typename Shape, int kStages, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    DecodeKernel(const DecodeParams p, const int splits) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kHeld = Shape::kHeld;
  const int latent_dim = Shape::latent_dim(p), kv_lora = Shape::kv_lora(p),
            padded = PaddedLatent(latent_dim), key_bytes = padded * 2,
            stage_bytes = StageBytes(padded);
  auto* scores = reinterpret_cast<float*>(shared);
  auto* weights = reinterpret_cast<bf16*>(scores + kSlices * kHeads * kKeys);
  auto* rescale = reinterpret_cast<float*>(weights + kHeads * kWeightStride);
  auto* folds = reinterpret_cast<float2*>(rescale + kHeads);
  const uint32_t keys = SharedAddress(shared) + kKeysAt;
  const int token = static_cast<int>(blockIdx.x),
            first_head = static_cast<int>(blockIdx.y) * kHeads,
            heads = min(kHeads, p.num_heads - first_head);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            quad = lane / 4, pair = lane % 4 * 2;
  LetNextBegin();
  WaitForEarlier();
  const int sequence = p.sequence[token];
  const int first_split = static_cast<int>(blockIdx.z) * splits;
  const Splits of_row = SplitsOf(p.positions[token]);
  if (first_split >= of_row.count) return;
  const int begin = first_split * of_row.keys,
            end = min((first_split + splits) * of_row.keys, p.positions[token] + 1);

  const auto load_keys = [&](int first_key, int stage) {
    if (first_key < end) {
      LoadKeys(keys + stage * stage_bytes,
               p.cache + CacheRow(p.page_table, p.pages_per_seq, sequence, first_key) * latent_dim,
               min(kKeys, end - first_key), latent_dim, padded);
    }
    CommitCopies();
  };
  for (int i = 0; i + 1 < kStages; ++i) load_keys(begin + i * kKeys, i);
  const int slice = warp % kSlices, key0 = warp / kSlices * 16;
  const int steps = padded / 16 / kSlices;
  uint32_t held[kHeld][2];
  const bf16* queries =
      p.absorbed + (static_cast<int64_t>(token) * p.num_heads + first_head) * latent_dim;
  const auto two_queries = [&](int head, int column) {
    const bf16* from = queries + head * latent_dim + column;
    if (head >= heads || column >= latent_dim) return 0u;
    if (latent_dim % 2 == 0) return *reinterpret_cast<const uint32_t*>(from);
    const __nv_bfloat162 two(from[0],
                             column + 1 < latent_dim ? from[1] : __float2bfloat16_rn(0.0f));
    return *reinterpret_cast<const uint32_t*>(&two);
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i >= steps) break;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      held[i][j] = two_queries(quad, (i * kSlices + slice) * 16 + j * 8 + pair);
  }
  // A head's scores lie where its four quads' stores meet no bank twice.
  const auto score_at = [&](int of_slice, int head, int key) -> float& {
    return scores[(of_slice * kHeads + head) * kKeys + (key ^ (head / 2 % 4 * 8))];
  };

  // Of a part, and of those before it. Maximum and sum: of the warp's head.
  float out[kColumnTiles][4] = {}, all[kColumnTiles][4] = {};
  float maximum = -INFINITY, sum = 0, all_maximum = -INFINITY, all_sum = 0;
  int stage = 0, part_end = min(begin + of_row.keys, end);
  for (int first_key = begin; first_key < end; first_key += kKeys) {
    WaitCopies<kStages - 2>();
    __syncthreads();  // these keys are there for all, the stage before them is free
    load_keys(first_key + (kStages - 1) * kKeys, stage == 0 ? kStages - 1 : stage - 1);
    const uint32_t tile = keys + stage * stage_bytes;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    {
      float s[4] = {};
      const uint32_t at = ChunkOf(tile, key_bytes, key0 + lane % 16, slice * 2 + lane / 16);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (i >= steps) break;
        uint32_t a[4];
        LoadMatrices(a, at + i * kSlices * 32);
        Mma(s, a, held[i][0], held[i][1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) score_at(slice, pair + i % 2, key0 + quad + i / 2 * 8) = s[i];
    }
    __syncthreads();
    if (warp < heads) {
      const bool seen = first_key + lane < end;
      const auto of = [&](int of_slice) { return score_at(of_slice, warp, lane); };
      const float score = seen ? (((of(0) + of(1)) + of(2)) + of(3)) * p.scale : -INFINITY;
      float largest = score;
      for (int offset = 16; offset > 0; offset /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
      const float now = fmaxf(maximum, largest);
      const float weight = seen ? expf(score - now) : 0.0f;
      weights[warp * kWeightStride + lane] = __float2bfloat16_rn(weight);
      float added = weight;
      for (int offset = 16; offset > 0; offset /= 2)
        added += __shfl_xor_sync(0xffffffffu, added, offset);
      const float factor = maximum == now ? 1.0f : expf(maximum - now);
      sum = sum * factor + added;
      maximum = now;
      if (lane == 0) rescale[warp] = factor;
    }
    __syncthreads();
    const uint32_t columns_at =
        ChunkOf(tile, key_bytes, lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
    const float2 factor = *reinterpret_cast<const float2*>(rescale + pair);
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[c][i] *= i % 2 == 0 ? factor.x : factor.y;
    }
    uint32_t b[4];
    LoadMatrices(b, weights + lane % 8 * kWeightStride + lane / 8 * 8);
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      if (kv_lora < kMaxLatent && (c * kWarps + warp) * 16 >= kv_lora) continue;
#pragma unroll
      for (int k16 = 0; k16 < 2; ++k16) {
        uint32_t a[4];
        LoadMatricesTransposed(a, columns_at + k16 * 16 * key_bytes + c * kWarps * 32);
        Mma(out[c], a, b[2 * k16], b[2 * k16 + 1]);
      }
    }
    if (first_key + kKeys < part_end) continue;
    part_end = min(part_end + of_row.keys, end);
    const Fold fold = FoldOf(all_maximum, maximum);
    all_sum = Folded(all_sum, fold.of_a, sum, fold.of_b);
    all_maximum = fold.maximum;
    maximum = -INFINITY;
    sum = 0;
    if (lane == 0) folds[warp] = {fold.of_a, fold.of_b};
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 by = folds[pair + i % 2];
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        all[c][i] = Folded(all[c][i], by.x, out[c][i], by.y);
        out[c][i] = 0;
      }
    }
  }

  const int64_t part = PartOf(p, token, static_cast<int>(blockIdx.z), splits) + first_head;
  if (warp < heads && lane == 0) p.stats[part + warp] = {all_maximum, all_sum};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int head = pair + i % 2;
    if (head >= heads) continue;
    float* to = p.parts + (part + head) * kv_lora;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      const int column = (c * kWarps + warp) * 16 + quad + i / 2 * 8;
      if (column < kv_lora) to[column] = all[c][i];
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

int HeadGroups(const DecodeParams& p) { return (p.num_heads + kHeads - 1) / kHeads; }
int SharedBytes(int latent_dim, int stages) { return kKeysAt + stages * StageBytes(latent_dim); }

template <typename Shape, int kStages, int kBlocks>
void Launch(const DecodeParams& p, int parts, int splits, cudaStream_t stream) {
  const int bytes = SharedBytes(p.latent_dim, kStages);
  auto* kernel = DecodeKernel<Shape, kStages, kBlocks>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const dim3 grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(HeadGroups(p)),
                  static_cast<unsigned>(parts));
  LaunchEarly(kernel, grid, kThreads, static_cast<size_t>(bytes), stream, p, splits);
}

void LaunchDecode(const DecodeParams& p, int parts, int splits, cudaStream_t stream) {
  if (!KimiShape::Is(p)) {
    if (PaddedLatent(p.latent_dim) <= 9 * 16 * kSlices)
      return Launch<AnyShape<9>, 2, 2>(p, parts, splits, stream);
    return Launch<AnyShape<32>, 2, 1>(p, parts, splits, stream);
  }
  // As far ahead as shared memory allows, for a block that has its multiprocessor to itself or for
  // two; a kilobyte a block is the driver's.
  constexpr int kReserved = 1024;
  const int limit = SharedLimit(), latent_dim = KimiShape::kLatentDim;
  if (int64_t{p.num_tokens} * HeadGroups(p) * parts <= Processors() &&
      SharedBytes(latent_dim, 6) <= limit)
    return Launch<KimiShape, 6, 1>(p, parts, splits, stream);
  if (2 * (SharedBytes(latent_dim, 3) + kReserved) <= limit + kReserved)
    return Launch<KimiShape, 3, 2>(p, parts, splits, stream);
  return Launch<KimiShape, 2, 2>(p, parts, splits, stream);
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
  // At most so many splits, whatever the positions.
  const int most = std::min(kMaxSplits, (p.pages_per_seq + kPagesASplit - 1) / kPagesASplit);
  for (int left = params.num_tokens; left > 0; left -= p.num_tokens) {
    // A block a split fills the GPU with few rows; with many a block has kFolded of them, so that
    // it is seldom at a beginning or an end, and writes an eighth. The bits are the same.
    const int folded = (most + kFolded - 1) / kFolded,
              splits = int64_t{left} * HeadGroups(p) * folded >= Processors() ? kFolded : 1;
    p.num_tokens = std::min(left, kSplitTokens * splits);
    LaunchDecode(p, splits == 1 ? most : folded, splits, stream);
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
