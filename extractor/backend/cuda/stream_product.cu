#include "extractor/backend/cuda/stream_product.h"

#include <algorithm>
#include <cassert>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStep = 32;  // of K
static_assert(kThreads / 32 == kSegments, "a warp a segment in the narrow form");

// The narrow form takes up to 16 rows of x; the wide form tiles of kWideRows × kWideTokens.
constexpr int kWideRows = 64, kWideTokens = 64, kWideStages = 4;
constexpr int kWideStep = 64;  // of K: two steps of 32 in a stage
constexpr int kWideStageBytes = (kWideRows + kWideTokens) * kWideStep * 2;
constexpr int kWideSumBytes = kWideRows * kWideTokens * 4, kWideSumStride = kWideRows + 4;
static_assert(kWideTokens * kWideSumStride * 4 <= kWideStages * kWideStageBytes);
constexpr int kMostWideBlocks = 264;  // that share their K: one wave of two a multiprocessor

// First step of segment s, of `steps` in all.
__device__ int SegmentBegin(int steps, int s) { return steps * s / kSegments; }

// The rows of weights that a block's fragment rows are: for SwiGLU rows q and q + 8 of 16 are gate
// and up of one column. Behind the last: the last, whose results are not stored.
template <Epilogue kEpilogue>
__device__ const bf16* WeightRow(const StreamProductParams& p, int fragment_row, int64_t batch) {
  if constexpr (kEpilogue == Epilogue::kSwiGlu) {
    const int column = min(fragment_row / 16 * 8 + fragment_row % 8, p.n - 1);
    return (fragment_row % 16 < 8 ? p.w : p.w2) + column * p.w_stride;
  } else {
    const int row = min(fragment_row, p.n + p.n2 - 1);
    return (row < p.n ? p.w + row * p.w_stride : p.w2 + (row - p.n) * p.w_stride) +
           batch * p.w_batch;
  }
}

__device__ float Silu(float x) { return x / (1.0f + expf(-x)); }

// Stores the value of one fragment row, or of a pair of rows q, q + 8 for SwiGLU.
template <Epilogue kEpilogue>
__device__ void Store(const StreamProductParams& p, int64_t batch, int token, int fragment_row,
                      float value, float up) {
  int64_t at = batch * p.y_batch + token * p.y_stride;
  if constexpr (kEpilogue == Epilogue::kSwiGlu) {
    const int column = fragment_row / 16 * 8 + fragment_row % 8;
    if (column >= p.n) return;
    static_cast<bf16*>(p.y)[at + column] = __float2bfloat16_rn(Silu(value) * up);
  } else {
    if (fragment_row >= p.n + p.n2) return;
    at += fragment_row;
    if constexpr (kEpilogue == Epilogue::kFloat) {
      static_cast<float*>(p.y)[at] = value;
    } else {
      bf16* to = static_cast<bf16*>(p.y) + at;
      *to =
          __float2bfloat16_rn(kEpilogue == Epilogue::kAdd ? __bfloat162float(*to) + value : value);
    }
  }
}

// Stores eight neighbours of y from a token's fragment rows: of a tile that begins with
// `first_row`, piece 0 first.
template <Epilogue kEpilogue>
__device__ void StoreEight(const StreamProductParams& p, int64_t batch, int token, int first_row,
                           int piece, const float* rows) {
  constexpr bool kGated = kEpilogue == Epilogue::kSwiGlu;
  rows += piece * (kGated ? 16 : 8);
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = kGated ? Silu(rows[i]) * rows[8 + i] : rows[i];
  const int first = (kGated ? first_row / 2 : first_row) + piece * 8,
            columns = min(kGated ? p.n : p.n + p.n2, first + 8) - first;
  const int64_t at = batch * p.y_batch + token * p.y_stride + first;
  if constexpr (kEpilogue == Epilogue::kFloat) {
    auto* to = static_cast<float*>(p.y) + at;
    if (columns == 8 && reinterpret_cast<uintptr_t>(to) % sizeof(float4) == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        reinterpret_cast<float4*>(to)[i] = {values[4 * i], values[4 * i + 1], values[4 * i + 2],
                                            values[4 * i + 3]};
      }
    } else {
      for (int i = 0; i < columns; ++i) to[i] = values[i];
    }
  } else {
    auto* to = static_cast<bf16*>(p.y) + at;
    const auto result = [&](int i, bf16 before) {
      return __float2bfloat16_rn(kEpilogue == Epilogue::kAdd ? __bfloat162float(before) + values[i]
                                                             : values[i]);
    };
    if (columns == 8 && reinterpret_cast<uintptr_t>(to) % sizeof(uint4) == 0) {
      alignas(16) bf16 eight[8];
      auto* all = reinterpret_cast<uint4*>(eight);
      if constexpr (kEpilogue == Epilogue::kAdd) *all = *reinterpret_cast<const uint4*>(to);
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = result(i, eight[i]);
      *reinterpret_cast<uint4*>(to) = *all;
    } else {
      for (int i = 0; i < columns; ++i) to[i] = result(i, to[i]);
    }
  }
}

// Shared memory holds rows of 64 K, 128 bytes: whole lines of global memory. A row's chunks of 16
// bytes are exchanged by its last three bits, so that ldmatrix meets no bank twice. Chunks two
// apart are the next k16 step's: an address ^ 32.
constexpr int kLine = 128, kChunks = 8, kStageSteps = 2;
__device__ uint32_t PlaceOf(uint32_t tile, int row, int chunk) {
  return tile + row * kLine + (chunk ^ (row & 7)) * 16;
}
// A lane's address for ldmatrix: of 16 rows as operand A; of 16 tokens, or of 8 at two k16 steps,
// as operand B.
__device__ uint32_t LaneOfRows(uint32_t tile, int lane) {
  return PlaceOf(tile, lane % 16, lane / 16);
}
template <int kTokenTiles>
__device__ uint32_t LaneOfTokens(uint32_t tile, int lane) {
  return kTokenTiles == 1 ? PlaceOf(tile, lane % 8, lane / 8)
                          : PlaceOf(tile, lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// A step of 32 K: acc += rows · tokens, by two k16 steps. Where lanes read: as above, of this step.
template <int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void MultiplyStep(float (&acc)[kRowTiles][kTokenTiles][4], uint32_t rows,
                                             uint32_t tokens) {
  static_assert(kTokenTiles == 1 || kTokenTiles % 2 == 0);
  uint32_t both[4];
  if constexpr (kTokenTiles == 1) LoadMatrices(both, tokens);
#pragma unroll
  for (int k16 = 0; k16 < 2; ++k16) {
    uint32_t b[kTokenTiles][2];
    if constexpr (kTokenTiles == 1) {
      b[0][0] = both[2 * k16];
      b[0][1] = both[2 * k16 + 1];
    } else {
#pragma unroll
      for (int t = 0; t < kTokenTiles; t += 2) {
        LoadMatrices(both, (tokens ^ k16 * 32) + t * 8 * kLine);
        b[t][0] = both[0];
        b[t][1] = both[1];
        b[t + 1][0] = both[2];
        b[t + 1][1] = both[3];
      }
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      uint32_t a[4];
      LoadMatrices(a, (rows ^ k16 * 32) + r * 16 * kLine);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) Mma(acc[r][t], a, b[t][0], b[t][1]);
    }
  }
}

// 16 · kRowTiles fragment rows × a tile of tokens (blockIdx.y) of a batch entry (blockIdx.z). A
// warp a segment of K, with a ring of its own, so that nothing waits for other warps until the
// segments are summed.
template <int kRowTiles, int kTokenTiles, int kStages, Epilogue kEpilogue>
__device__ __forceinline__ void Narrow(const StreamProductParams& p, int row_tile) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles,
                kStageBytes = (kRows + kTokens) * kLine;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int quad = lane / 4, part = lane % 4;
  const int64_t batch = blockIdx.z;
  const int first_row = row_tile * kRows, first_token = static_cast<int>(blockIdx.y) * kTokens;
  const int steps = p.k / kStep, begin = SegmentBegin(steps, warp),
            end = SegmentBegin(steps, warp + 1);
  const uint32_t ring = SharedAddress(shared) + warp * kStages * kStageBytes;
  LetNextBegin();
  // A lane copies the same chunk of every fourth row.
  const int chunk = lane % kChunks, lane_row = lane / kChunks;
  const bf16* rows[kRows / 4];
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i)
    rows[i] = WeightRow<kEpilogue>(p, first_row + lane_row + i * 4, batch) + chunk * 8;
  const auto load_weights = [&](int step, uint32_t stage) {
    if (step + chunk / 4 >= end) return;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i)
      CopyAsync(PlaceOf(stage, lane_row + i * 4, chunk), rows[i] + step * kStep, 16);
  };
  const bf16* x = p.x + batch * p.x_batch + chunk * 8;
  const auto load_tokens = [&](int step, uint32_t stage) {
    if (step + chunk / 4 >= end) return;
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      const int row = lane_row + i * 4;
      CopyAsync(PlaceOf(stage + kRows * kLine, row, chunk),
                x + min(first_token + row, p.m - 1) * p.x_stride + step * kStep, 16);
    }
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) load_weights(begin + i * kStageSteps, ring + i * kStageBytes);
  WaitForEarlier();
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    load_tokens(begin + i * kStageSteps, ring + i * kStageBytes);
    CommitCopies();
  }
  float acc[kRowTiles][kTokenTiles][4] = {};
  uint32_t stage = ring;
  for (int step = begin; step < end; step += kStageSteps) {
    WaitCopies<kStages - 1>();
    __syncwarp();
    const uint32_t rows_at = LaneOfRows(stage, lane),
                   tokens_at = LaneOfTokens<kTokenTiles>(stage + kRows * kLine, lane);
    MultiplyStep(acc, rows_at, tokens_at);
    if (step + 1 < end) MultiplyStep(acc, rows_at ^ 64, tokens_at ^ 64);
    __syncwarp();
    load_weights(step + kStages * kStageSteps, stage);
    load_tokens(step + kStages * kStageSteps, stage);
    CommitCopies();
    stage = stage + kStageBytes == ring + kStages * kStageBytes ? ring : stage + kStageBytes;
  }

  WaitCopies<0>();
  __syncthreads();  // the rings become the segments' sums: [segment][token][row]
  constexpr int kStride = kRows + 4;
  auto* sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = t * 8 + part * 2 + i % 2, row = r * 16 + quad + i / 2 * 8;
        sums[(warp * kTokens + token) * kStride + row] = acc[r][t][i];
      }
    }
  }
  __syncthreads();
  constexpr bool kGated = kEpilogue == Epilogue::kSwiGlu;
  constexpr int kRowsOut = kGated ? kRows / 2 : kRows;
  for (int i = thread; i < kTokens * kRowsOut; i += kThreads) {
    const int token = i / kRowsOut, out = i % kRowsOut, row = kGated ? out / 8 * 16 + out % 8 : out;
    if (first_token + token >= p.m) break;
    const auto sum = [&](int of) {
      const auto at = [&](int s) { return sums[(s * kTokens + token) * kStride + of]; };
      return ((at(0) + at(1)) + (at(2) + at(3))) + ((at(4) + at(5)) + (at(6) + at(7)));
    };
    Store<kEpilogue>(p, batch, first_token + token, first_row + row, sum(row),
                     kGated ? sum(row + 8) : 0.0f);
  }
}

// grid: (tiles of rows, of one product or of one behind the other; tiles of tokens; batch).
template <int kRowTiles, int kTokenTiles, int kStages, Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads) NarrowKernel(const StreamProductParams p) {
  Narrow<kRowTiles, kTokenTiles, kStages, kEpilogue>(p, static_cast<int>(blockIdx.x));
}
template <int kTokenTiles, int kStages, Epilogue kFirst, Epilogue kSecond>
__global__ void __launch_bounds__(kThreads)
    NarrowBothKernel(const StreamProductParams p, const StreamProductParams q, int tiles) {
  const auto tile = static_cast<int>(blockIdx.x);
  if (tile < tiles) {
    Narrow<1, kTokenTiles, kStages, kFirst>(p, tile);
  } else {
    Narrow<1, kTokenTiles, kStages, kSecond>(q, tile - tiles);
  }
}

struct WidePart {
  int row_tiles, groups;  // 1, 2, 4 or 8 blocks share a tile's K, in equal parts
  float* sums;
  int* arrived;
};

// A tile of weights for one of its groups × a tile of tokens (blockIdx.y) of a batch entry
// (blockIdx.z). Eight warps hold 16 rows × 32 tokens each.
template <Epilogue kEpilogue>
__device__ __forceinline__ void Wide(const StreamProductParams& p, const WidePart& part,
                                     int tile_and_group) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ bool last;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int quad = lane / 4, column = lane % 4;
  const int64_t batch = blockIdx.z;
  const int row_tile = tile_and_group / part.groups, group = tile_and_group % part.groups;
  const int first_row = row_tile * kWideRows,
            first_token = static_cast<int>(blockIdx.y) * kWideTokens;
  const int row0 = warp / 2 * 16, token0 = warp % 2 * 32;
  const int each = kSegments / part.groups, steps = p.k / kStep;
  LetNextBegin();

  // Stages: up to two steps of one segment. The loads run through all segments of the block.
  struct Cursor {
    int segment, step, end;
  };
  const int first_segment = group * each, last_segment = first_segment + each;
  const auto open = [&](int segment) {
    // Segments may be empty where K is short.
    Cursor c{segment, SegmentBegin(steps, segment), SegmentBegin(steps, segment + 1)};
    while (c.step == c.end && c.segment + 1 < last_segment) {
      ++c.segment;
      c.step = c.end;
      c.end = SegmentBegin(steps, c.segment + 1);
    }
    return c;
  };
  const auto advance = [&](Cursor& c) {
    c.step = min(c.step + 2, c.end);
    if (c.step == c.end && c.segment + 1 < last_segment) c = open(c.segment + 1);
  };
  const auto done = [&](const Cursor& c) { return c.step >= c.end; };
  // A thread's rows of a stage are 32 apart, its chunk of 16 bytes is the same.
  const int chunk = thread % kChunks, load_row = thread / kChunks;
  constexpr int kRowsApart = kThreads / kChunks;
  const bf16 *weights_from[kWideRows / kRowsApart], *tokens_from[kWideTokens / kRowsApart];
#pragma unroll
  for (int i = 0; i < kWideRows / kRowsApart; ++i)
    weights_from[i] =
        WeightRow<kEpilogue>(p, first_row + load_row + i * kRowsApart, batch) + chunk * 8;
#pragma unroll
  for (int i = 0; i < kWideTokens / kRowsApart; ++i)
    tokens_from[i] = p.x + batch * p.x_batch +
                     min(first_token + load_row + i * kRowsApart, p.m - 1) * p.x_stride + chunk * 8;
  const uint32_t ring = SharedAddress(shared), load_to = PlaceOf(ring, load_row, chunk);
  static_assert(kRowsApart % 8 == 0, "their chunks are exchanged alike");
  const auto load_weights = [&](const Cursor& c, int stage) {
    if (c.step + chunk / 4 >= c.end) return;
#pragma unroll
    for (int i = 0; i < kWideRows / kRowsApart; ++i)
      CopyAsync(load_to + stage * kWideStageBytes + i * kRowsApart * kLine,
                weights_from[i] + c.step * kStep, 16);
  };
  const auto load_tokens = [&](const Cursor& c, int stage) {
    if (c.step + chunk / 4 >= c.end) return;
#pragma unroll
    for (int i = 0; i < kWideTokens / kRowsApart; ++i)
      CopyAsync(load_to + stage * kWideStageBytes + (kWideRows + i * kRowsApart) * kLine,
                tokens_from[i] + c.step * kStep, 16);
  };
  Cursor ahead = open(first_segment);
  for (int stage = 0; stage < kWideStages - 1; ++stage) {
    load_weights(ahead, stage);
    advance(ahead);
  }
  WaitForEarlier();
  ahead = open(first_segment);
  for (int stage = 0; stage < kWideStages - 1; ++stage) {
    load_tokens(ahead, stage);
    CommitCopies();
    advance(ahead);
  }

  constexpr int kRowTiles = 1, kTokenTiles = 4;
  using Sums = float[kRowTiles][kTokenTiles][4];
  const uint32_t of_rows = LaneOfRows(ring + row0 * kLine, lane),
                 of_tokens = LaneOfTokens<kTokenTiles>(ring + (kWideRows + token0) * kLine, lane);
  Sums acc = {}, ones = {};
  const auto each_value = [&](const auto& body) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) body(r, t, i);
      }
    }
  };
  Cursor now = {first_segment, SegmentBegin(steps, first_segment),
                SegmentBegin(steps, first_segment + 1)};
  for (int stage = 0, segment = 0; segment < each; ++segment) {
    now.end = SegmentBegin(steps, first_segment + segment + 1);
    each_value([&](int r, int t, int i) { acc[r][t][i] = 0; });
    for (; now.step < now.end; now.step = min(now.step + 2, now.end)) {
      WaitCopies<kWideStages - 2>();
      __syncthreads();  // this stage is there for all, and the one before it is free
      const int free = stage == 0 ? kWideStages - 1 : stage - 1;
      if (!done(ahead)) {
        load_weights(ahead, free);
        load_tokens(ahead, free);
        advance(ahead);
      }
      CommitCopies();
      const uint32_t rows_at = of_rows + stage * kWideStageBytes,
                     tokens_at = of_tokens + stage * kWideStageBytes;
      MultiplyStep(acc, rows_at, tokens_at);
      if (now.step + 1 < now.end) MultiplyStep(acc, rows_at ^ 64, tokens_at ^ 64);
      stage = stage + 1 == kWideStages ? 0 : stage + 1;
    }
    // Pairs, then pairs of pairs, as a counter carries. Pairs wait in registers, fours and the
    // lower half in shared memory.
    if (segment + 1 == each && each == 1) break;
    if (segment % 2 == 0) {
      each_value([&](int r, int t, int i) { ones[r][t][i] = acc[r][t][i]; });
      continue;
    }
    each_value([&](int r, int t, int i) { acc[r][t][i] = ones[r][t][i] + acc[r][t][i]; });
    for (int level = 0, size = 2; size < each; ++level, size *= 2) {
      auto* waiting =
          reinterpret_cast<float*>(shared + kWideStages * kWideStageBytes + level * kWideSumBytes) +
          thread;
      const bool comes_back = (segment & size) != 0;
      int at = 0;
      each_value([&](int r, int t, int i) {
        float& value = waiting[at++ * kThreads];
        if (comes_back) {
          acc[r][t][i] = value + acc[r][t][i];
        } else {
          value = acc[r][t][i];
        }
      });
      if (!comes_back) break;
    }
  }
  WaitCopies<0>();

  if (part.groups > 1) {
    // The last block of the tile to come adds them up, in the order of K.
    const int64_t tile = (batch * gridDim.y + blockIdx.y) * part.row_tiles + row_tile;
    constexpr int kQuads = kRowTiles * kTokenTiles;
    const auto at = [&](int g) {
      return reinterpret_cast<float4*>(part.sums) + (tile * part.groups + g) * kQuads * kThreads +
             thread;
    };
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float(&v)[4] = acc[i / kTokenTiles][i % kTokenTiles];
      __stcg(at(group) + i * kThreads, make_float4(v[0], v[1], v[2], v[3]));
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) {
      last = atomicAdd(&part.arrived[tile], 1) == part.groups - 1;
      if (last) part.arrived[tile] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const auto add = [](float4 a, float4 b) {
        return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
      };
      const auto get = [&](int g) { return __ldcg(at(g) + i * kThreads); };
      float4 v = add(get(0), get(1));
      if (part.groups >= 4) v = add(v, add(get(2), get(3)));
      if (part.groups == 8) v = add(v, add(add(get(4), get(5)), add(get(6), get(7))));
      float(&to)[4] = acc[i / kTokenTiles][i % kTokenTiles];
      to[0] = v.x;
      to[1] = v.y;
      to[2] = v.z;
      to[3] = v.w;
    }
  }
  // By way of shared memory, so that a thread stores neighbours.
  auto* sums = reinterpret_cast<float*>(shared);
  __syncthreads();
  each_value([&](int r, int t, int i) {
    const int token = token0 + t * 8 + column * 2 + i % 2, row = row0 + r * 16 + quad + i / 2 * 8;
    sums[token * kWideSumStride + row] = acc[r][t][i];
  });
  __syncthreads();
  constexpr int kPieces = kWideRows / (kEpilogue == Epilogue::kSwiGlu ? 16 : 8);
  for (int i = thread; i < kWideTokens * kPieces; i += kThreads) {
    const int token = i / kPieces, piece = i % kPieces;
    if (first_token + token >= p.m) break;
    StoreEight<kEpilogue>(p, batch, first_token + token, first_row, piece,
                          sums + token * kWideSumStride);
  }
}

// grid: (tiles of rows · groups, of one product or of one behind the other; tiles of tokens;
// batch).
template <Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads, 2)
    WideKernel(const StreamProductParams p, const WidePart part) {
  Wide<kEpilogue>(p, part, static_cast<int>(blockIdx.x));
}
template <Epilogue kFirst, Epilogue kSecond>
__global__ void __launch_bounds__(kThreads, 2)
    WideBothKernel(const StreamProductParams p, const WidePart part, const StreamProductParams q,
                   const WidePart other) {
  const int tile = static_cast<int>(blockIdx.x), first = part.row_tiles * part.groups;
  if (tile < first) {
    Wide<kFirst>(p, part, tile);
  } else {
    Wide<kSecond>(q, other, tile - first);
  }
}

constexpr int kAloneBytes = 192 << 10;

unsigned Tiles(int count, int each) { return static_cast<unsigned>((count + each - 1) / each); }

int FragmentRows(const StreamProductParams& p) {
  return p.epilogue == Epilogue::kSwiGlu ? (p.n + 7) / 8 * 16 : p.n + p.n2;
}

template <int kRowTiles, int kTokenTiles, int kStages, Epilogue kEpilogue>
void LaunchNarrow(const StreamProductParams& p, cudaStream_t stream) {
  constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles,
                kBytes = kSegments * kStages * (kRows + kTokens) * kLine;
  static_assert(kBytes >= kSegments * kTokens * (kRows + 4) * 4, "the sums take the rings' place");
  auto* kernel = NarrowKernel<kRowTiles, kTokenTiles, kStages, kEpilogue>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 grid(Tiles(FragmentRows(p), kRows), Tiles(p.m, kTokens),
                  static_cast<unsigned>(p.batch));
  LaunchEarly(kernel, grid, kThreads, kBytes, stream, p);
}

constexpr int kWideBytes = kWideStages * kWideStageBytes + 2 * kWideSumBytes;

// As many groups as give about one wave, of products whose tiles of rows are `row_tiles` in all.
int GroupsOf(unsigned row_tiles, unsigned token_tiles, unsigned batch) {
  int groups = 1;
  while (groups < kSegments &&
         int64_t{2} * groups * row_tiles * token_tiles * batch <= kMostWideBlocks)
    groups *= 2;
  return groups;
}

template <Epilogue kEpilogue>
void LaunchWide(const StreamProductParams& p, const StreamWorkspace& workspace,
                cudaStream_t stream) {
  Check(cudaFuncSetAttribute(WideKernel<kEpilogue>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kWideBytes));
  const unsigned row_tiles = Tiles(FragmentRows(p), kWideRows),
                 token_tiles = Tiles(p.m, kWideTokens), batch = static_cast<unsigned>(p.batch);
  const int groups = GroupsOf(row_tiles, token_tiles, batch);
  const WidePart part{static_cast<int>(row_tiles), groups, workspace.sums(), workspace.arrived()};
  const dim3 grid(row_tiles * static_cast<unsigned>(groups), token_tiles, batch);
  LaunchEarly(WideKernel<kEpilogue>, grid, kThreads, kWideBytes, stream, p, part);
}

template <int kTokenTiles, int kStages, Epilogue kFirst, Epilogue kSecond>
void LaunchNarrowBoth(const StreamProductParams& p, const StreamProductParams& q,
                      cudaStream_t stream) {
  constexpr int kTokens = 8 * kTokenTiles, kBytes = kSegments * kStages * (16 + kTokens) * kLine;
  auto* kernel = NarrowBothKernel<kTokenTiles, kStages, kFirst, kSecond>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const unsigned first = Tiles(FragmentRows(p), 16), second = Tiles(FragmentRows(q), 16);
  LaunchEarly(kernel, dim3(first + second, Tiles(p.m, kTokens)), kThreads, kBytes, stream, p, q,
              static_cast<int>(first));
}

template <Epilogue kFirst, Epilogue kSecond>
void LaunchWideBoth(const StreamProductParams& p, const StreamProductParams& q,
                    const StreamWorkspace& workspace, cudaStream_t stream) {
  auto* kernel = WideBothKernel<kFirst, kSecond>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWideBytes));
  const unsigned first = Tiles(FragmentRows(p), kWideRows),
                 second = Tiles(FragmentRows(q), kWideRows), token_tiles = Tiles(p.m, kWideTokens);
  const int groups = GroupsOf(first + second, token_tiles, 1);
  const auto before = static_cast<int64_t>(first) * token_tiles;  // tiles of the first product
  const WidePart part{static_cast<int>(first), groups, workspace.sums(), workspace.arrived()};
  const WidePart other{
      static_cast<int>(second), groups,
      workspace.sums() + (groups > 1 ? before * groups * kWideRows * kWideTokens : 0),
      workspace.arrived() + (groups > 1 ? before : 0)};
  const dim3 grid((first + second) * static_cast<unsigned>(groups), token_tiles);
  LaunchEarly(kernel, grid, kThreads, kWideBytes, stream, p, part, q, other);
}

bool IsLong(int k) { return k > 4 * kSegments * kStep; }
// Where a multiprocessor has one block at most, that one keeps as much in flight as fits.
bool Alone(int64_t blocks) { return blocks <= Processors() && SharedLimit() >= kAloneBytes; }

template <Epilogue kEpilogue>
void Launch(const StreamProductParams& p, const StreamWorkspace& workspace, cudaStream_t stream) {
  if (p.m > 16) return LaunchWide<kEpilogue>(p, workspace, stream);
  const bool is_long = IsLong(p.k),
             alone = is_long && Alone(int64_t{Tiles(FragmentRows(p), 16)} * p.batch);
  // K of up to two stages: all of it is loaded at once, of 32 rows, so that one wave takes them
  // all.
  if (p.m <= 8)
    return alone     ? LaunchNarrow<1, 1, 8, kEpilogue>(p, stream)
           : is_long ? LaunchNarrow<1, 1, 4, kEpilogue>(p, stream)
                     : LaunchNarrow<2, 1, 2, kEpilogue>(p, stream);
  return alone     ? LaunchNarrow<1, 2, 6, kEpilogue>(p, stream)
         : is_long ? LaunchNarrow<1, 2, 3, kEpilogue>(p, stream)
                   : LaunchNarrow<2, 2, 2, kEpilogue>(p, stream);
}

}  // namespace

StreamWorkspace::StreamWorkspace()
    : sums_(size_t{kMostWideBlocks} * kWideRows * kWideTokens * sizeof(float)),
      arrived_(kMostWideBlocks * sizeof(int), /*zeroed=*/true) {}

bool Streamable(const StreamProductParams& p) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  return p.k % kStep == 0 && p.k > 0 && p.x_stride % 8 == 0 && p.w_stride % 8 == 0 &&
         p.x_batch % 8 == 0 && p.w_batch % 8 == 0 && aligned(p.x) && aligned(p.w) && aligned(p.w2);
}

void StreamProduct(const StreamProductParams& p, const StreamWorkspace& workspace,
                   cudaStream_t stream) {
  if (p.m == 0 || p.n + p.n2 == 0 || p.batch == 0) return;
  switch (p.epilogue) {
    case Epilogue::kBf16: return Launch<Epilogue::kBf16>(p, workspace, stream);
    case Epilogue::kAdd: return Launch<Epilogue::kAdd>(p, workspace, stream);
    case Epilogue::kFloat: return Launch<Epilogue::kFloat>(p, workspace, stream);
    case Epilogue::kSwiGlu: return Launch<Epilogue::kSwiGlu>(p, workspace, stream);
  }
}

void StreamProductBoth(const StreamProductParams& p, const StreamProductParams& q,
                       const StreamWorkspace& workspace, cudaStream_t stream) {
  if (p.m == 0) return;
  constexpr Epilogue kFirst = Epilogue::kFloat, kSecond = Epilogue::kSwiGlu;
  assert(p.epilogue == kFirst && q.epilogue == kSecond && p.m == q.m);
  if (p.m > 16) return LaunchWideBoth<kFirst, kSecond>(p, q, workspace, stream);
  const bool alone = IsLong(p.k) && IsLong(q.k) &&
                     Alone(int64_t{Tiles(FragmentRows(p), 16)} + Tiles(FragmentRows(q), 16));
  if (p.m <= 8) {
    return alone ? LaunchNarrowBoth<1, 8, kFirst, kSecond>(p, q, stream)
                 : LaunchNarrowBoth<1, 4, kFirst, kSecond>(p, q, stream);
  }
  return alone ? LaunchNarrowBoth<2, 6, kFirst, kSecond>(p, q, stream)
               : LaunchNarrowBoth<2, 3, kFirst, kSecond>(p, q, stream);
}

}  // namespace statetap::cuda
