// Dense products of more rows than 16, whatever instructions multiply: loads, sums of K's segments,
// results. Code of stream_product.cu and sm90/wide_product.cu.
//
// A block has a tile of kWideRows rows of weights × Form::kTokens rows of x and an eighth, a
// quarter, a half or all of K's segments. A Form, an object of each thread, says how:
//   kTokens, kStages, kBlocks (that share a multiprocessor), kAhead (stages that are loaded ahead),
//   kValues (sums of a thread), kRegisterLevels (of the sums that wait to be added, 1 to 3)
//   Arrived(): behind the wait for a stage's copies.
//   Multiply(sums, stage, steps, first): sums += (first: =) the stage's 1 or 2 steps.
//   Finish(sums): of a segment.
//   row(i), token(i): of sums[i] in the tile.
#pragma once

#include <algorithm>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"
#include "extractor/backend/cuda/stream_product.h"

namespace statetap::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kStep = 32;  // of K
inline constexpr int kWideRows = 64;

// First step of segment s, of `steps` in all.
__device__ inline int SegmentBegin(int steps, int s) { return steps * s / kSegments; }

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

// Stores eight neighbours of y from a token's fragment rows: of a tile that begins with
// `first_row`, piece 0 first.
template <Epilogue kEpilogue>
__device__ void StoreEight(const StreamProductParams& p, int64_t batch, int token, int first_row,
                           int piece, const float* rows) {
  constexpr bool kGated = kEpilogue == Epilogue::kSwiGlu;
  rows += piece * (kGated ? 16 : 8);
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = kGated ? ExactSilu(rows[i]) * rows[8 + i] : rows[i];
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
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < columns) to[i] = values[i];
      }
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
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < columns) to[i] = result(i, to[i]);
      }
    }
  }
}

// Shared memory holds rows of 64 K, 128 bytes: whole lines of global memory. Chunks two apart are
// the next k16 step's: an address ^ 32.
inline constexpr int kLine = 128, kChunks = 8, kStageSteps = 2;
__device__ inline uint32_t PlaceOf(uint32_t tile, int row, int chunk) {
  return ChunkOf(tile, kLine, row, chunk);
}

struct WidePart {
  int row_tiles, groups;  // 1, 2, 4 or 8 blocks share a tile's K, in equal parts
  float* sums;
  int* arrived;
};

template <typename Form>
struct WideMemory {
  static constexpr int kStageBytes = (kWideRows + Form::kTokens) * kLine;
  static constexpr int kSumBytes = kWideRows * Form::kTokens * 4, kSumStride = kWideRows + 4;
  static constexpr int kWaitingAt = Form::kStages * kStageBytes,
                       kLastAt = kWaitingAt + (3 - Form::kRegisterLevels) * kSumBytes,
                       kBytes = kLastAt + 16;
  static_assert(Form::kTokens * kSumStride * 4 <= kWaitingAt, "results take the stages' place");
};

// Adds a segment's sums, of `each`, as a counter carries: pairs, then pairs of pairs. What waits
// for its other half is in registers, of the last levels in shared memory.
template <int kLevel, int kLevels, int kValues>
__device__ __forceinline__ void AddUp(float (&sums)[kValues], float (&waiting)[kLevels][kValues],
                                      float* shared, int segment, int each) {
  if (1 << kLevel >= each) return;
  const bool comes_back = (segment >> kLevel & 1) != 0;
  if constexpr (kLevel < kLevels) {
    if (!comes_back) {  // moved by an instruction, as the compiler would keep several copies
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        asm volatile("mov.f32 %0, %1;" : "=f"(waiting[kLevel][i]) : "f"(sums[i]));
      return;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) sums[i] = waiting[kLevel][i] + sums[i];
  } else {
    float* values = shared + (kLevel - kLevels) * kValues * kThreads;
    if (!comes_back) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i * kThreads] = sums[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) sums[i] = values[i * kThreads] + sums[i];
  }
  if constexpr (kLevel < 2) AddUp<kLevel + 1>(sums, waiting, shared, segment, each);
}

// For one of the groups of a tile of weights, a tile of x (blockIdx.y) of a batch entry
// (blockIdx.z).
template <Epilogue kEpilogue, typename Form>
__device__ __forceinline__ void Wide(const StreamProductParams& p, const WidePart& part,
                                     int tile_and_group) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Memory = WideMemory<Form>;
  constexpr int kTokens = Form::kTokens, kStages = Form::kStages, kAhead = Form::kAhead,
                kValues = Form::kValues;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t batch = blockIdx.z;
  const int row_tile = tile_and_group / part.groups, group = tile_and_group % part.groups;
  const int first_row = row_tile * kWideRows, first_token = static_cast<int>(blockIdx.y) * kTokens;
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
  // A thread's rows of a stage are 32 apart, its chunk of 16 bytes is the same.
  constexpr int kRowsApart = kThreads / kChunks;
  static_assert(kRowsApart % 8 == 0, "their chunks are exchanged alike");
  const int chunk = thread % kChunks, load_row = thread / kChunks;
  const bf16* weights_from[kWideRows / kRowsApart];
#pragma unroll
  for (int i = 0; i < kWideRows / kRowsApart; ++i)
    weights_from[i] =
        WeightRow<kEpilogue>(p, first_row + load_row + i * kRowsApart, batch) + chunk * 8;
  const int load_token = first_token + load_row;
  const bf16* tokens_from = p.x + batch * p.x_batch + load_token * p.x_stride + chunk * 8;
  const uint32_t ring = SharedAddress(shared), load_to = PlaceOf(ring, load_row, chunk);
  const auto load_weights = [&](const Cursor& c, int stage) {
    if (c.step + chunk / 4 >= c.end) return;
#pragma unroll
    for (int i = 0; i < kWideRows / kRowsApart; ++i)
      CopyAsync(load_to + stage * Memory::kStageBytes + i * kRowsApart * kLine,
                weights_from[i] + c.step * kStep, 16);
  };
  // What stands in the place of rows behind the last one meets no result that is stored.
  const auto load_tokens = [&](const Cursor& c, int stage) {
    if (c.step + chunk / 4 >= c.end) return;
#pragma unroll
    for (int i = 0; i < kTokens / kRowsApart; ++i) {
      if (load_token + i * kRowsApart < p.m)
        CopyAsync(load_to + stage * Memory::kStageBytes + (kWideRows + i * kRowsApart) * kLine,
                  tokens_from + i * kRowsApart * p.x_stride + c.step * kStep, 16);
    }
  };
  Cursor ahead = open(first_segment);
  for (int stage = 0; stage < kAhead; ++stage) {
    load_weights(ahead, stage);
    advance(ahead);
  }
  WaitForEarlier();
  ahead = open(first_segment);
  for (int stage = 0; stage < kAhead; ++stage) {
    load_tokens(ahead, stage);
    CommitCopies();
    advance(ahead);
  }

  Form form(ring, thread);
  float sums[kValues], waiting[Form::kRegisterLevels][kValues];
  int step = SegmentBegin(steps, first_segment);
  for (int stage = 0, segment = 0; segment < each; ++segment) {
    const int end = SegmentBegin(steps, first_segment + segment + 1);
    if (step == end) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) sums[i] = 0;
    }
    for (bool first = true; step < end; step = min(step + 2, end), first = false) {
      WaitCopies<kAhead - 1>();
      Form::Arrived();
      __syncthreads();  // this stage is there for all, and the kAhead-th from it is free
      if (ahead.step < ahead.end) {
        const int free = stage + kAhead < kStages ? stage + kAhead : stage + kAhead - kStages;
        load_weights(ahead, free);
        load_tokens(ahead, free);
        advance(ahead);
      }
      CommitCopies();
      form.Multiply(sums, stage, min(2, end - step), first);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    form.Finish(sums);
    AddUp<0>(sums, waiting, reinterpret_cast<float*>(shared + Memory::kWaitingAt) + thread, segment,
             each);
  }
  WaitCopies<0>();

  if (part.groups > 1) {
    // The last block of the tile to come adds them up, in the order of K.
    auto& last = *reinterpret_cast<bool*>(shared + Memory::kLastAt);
    const int64_t tile = (batch * gridDim.y + blockIdx.y) * part.row_tiles + row_tile;
    const auto at = [&](int g) {
      return reinterpret_cast<float4*>(part.sums) +
             (tile * part.groups + g) * (kValues / 4) * kThreads + thread;
    };
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      const float* v = sums + 4 * i;
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
    for (int i = 0; i < kValues / 4; ++i) {
      const auto add = [](float4 a, float4 b) {
        return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
      };
      const auto get = [&](int g) { return __ldcg(at(g) + i * kThreads); };
      float4 v = add(get(0), get(1));
      if (part.groups >= 4) v = add(v, add(get(2), get(3)));
      if (part.groups == 8) v = add(v, add(add(get(4), get(5)), add(get(6), get(7))));
      sums[4 * i] = v.x;
      sums[4 * i + 1] = v.y;
      sums[4 * i + 2] = v.z;
      sums[4 * i + 3] = v.w;
    }
  }
  // By way of shared memory, so that a thread stores neighbours.
  auto* results = reinterpret_cast<float*>(shared);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kValues; ++i)
    results[form.token(i) * Memory::kSumStride + form.row(i)] = sums[i];
  __syncthreads();
  constexpr int kPieces = kWideRows / (kEpilogue == Epilogue::kSwiGlu ? 16 : 8);
  for (int i = thread; i < kTokens * kPieces; i += kThreads) {
    const int token = i / kPieces, piece = i % kPieces;
    if (first_token + token >= p.m) break;
    StoreEight<kEpilogue>(p, batch, first_token + token, first_row, piece,
                          results + token * Memory::kSumStride);
  }
}

// grid: (tiles of rows · groups, of one product or of one behind the other; tiles of tokens;
// batch).
template <Epilogue kEpilogue, typename Form>
__global__ void __launch_bounds__(kThreads, Form::kBlocks)
    WideKernel(const StreamProductParams p, const WidePart part) {
  Wide<kEpilogue, Form>(p, part, static_cast<int>(blockIdx.x));
}
template <Epilogue kFirst, Epilogue kSecond, typename Form>
__global__ void __launch_bounds__(kThreads, Form::kBlocks)
    WideBothKernel(const StreamProductParams p, const WidePart part, const StreamProductParams q,
                   const WidePart other) {
  const int tile = static_cast<int>(blockIdx.x), first = part.row_tiles * part.groups;
  if (tile < first) {
    Wide<kFirst, Form>(p, part, tile);
  } else {
    Wide<kSecond, Form>(q, other, tile - first);
  }
}

inline unsigned Tiles(int count, int each) {
  return static_cast<unsigned>((count + each - 1) / each);
}
inline int FragmentRows(const StreamProductParams& p) {
  return p.epilogue == Epilogue::kSwiGlu ? (p.n + 7) / 8 * 16 : p.n + p.n2;
}

// As many groups as give about one wave on so many processors, of products of K ≥ k whose tiles are
// `tiles` in all; each with four stages and more.
template <typename Form>
int GroupsOf(int64_t tiles, int k, int processors) {
  static_assert(Form::kTokens >= 64, "the workspace has a counter for each tile of 64 × 64");
  const int64_t most = std::min<int64_t>(int64_t{Form::kBlocks} * processors,
                                         kWideSums / (kWideRows * Form::kTokens));
  int groups = 1;
  while (groups < kSegments && 2 * groups * tiles <= most && k >= 2 * groups * 8 * kStep)
    groups *= 2;
  return groups;
}

template <Epilogue kEpilogue, typename Form>
void LaunchWide(const StreamProductParams& p, const StreamWorkspace& workspace,
                cudaStream_t stream) {
  constexpr int kBytes = WideMemory<Form>::kBytes;
  auto* kernel = WideKernel<kEpilogue, Form>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const unsigned row_tiles = Tiles(FragmentRows(p), kWideRows),
                 token_tiles = Tiles(p.m, Form::kTokens), batch = static_cast<unsigned>(p.batch);
  const int groups = GroupsOf<Form>(int64_t{row_tiles} * token_tiles * batch, p.k, Processors());
  const WidePart part{static_cast<int>(row_tiles), groups, workspace.sums(), workspace.arrived()};
  const dim3 grid(row_tiles * static_cast<unsigned>(groups), token_tiles, batch);
  LaunchEarly(kernel, grid, kThreads, kBytes, stream, p, part);
}

template <typename Form>
void LaunchWide(const StreamProductParams& p, const StreamWorkspace& workspace,
                cudaStream_t stream) {
  switch (p.epilogue) {
    case Epilogue::kBf16: return LaunchWide<Epilogue::kBf16, Form>(p, workspace, stream);
    case Epilogue::kAdd: return LaunchWide<Epilogue::kAdd, Form>(p, workspace, stream);
    case Epilogue::kFloat: return LaunchWide<Epilogue::kFloat, Form>(p, workspace, stream);
    case Epilogue::kSwiGlu: return LaunchWide<Epilogue::kSwiGlu, Form>(p, workspace, stream);
  }
}

template <typename Form>
void LaunchWideBoth(const StreamProductParams& p, const StreamProductParams& q,
                    const StreamWorkspace& workspace, cudaStream_t stream) {
  constexpr int kBytes = WideMemory<Form>::kBytes;
  auto* kernel = WideBothKernel<Epilogue::kFloat, Epilogue::kSwiGlu, Form>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const unsigned first = Tiles(FragmentRows(p), kWideRows),
                 second = Tiles(FragmentRows(q), kWideRows),
                 token_tiles = Tiles(p.m, Form::kTokens);
  const int groups =
      GroupsOf<Form>(int64_t{first + second} * token_tiles, std::min(p.k, q.k), Processors());
  const auto before = static_cast<int64_t>(first) * token_tiles;  // tiles of the first product
  const WidePart part{static_cast<int>(first), groups, workspace.sums(), workspace.arrived()};
  const WidePart other{
      static_cast<int>(second), groups,
      workspace.sums() + (groups > 1 ? before * groups * kWideRows * Form::kTokens : 0),
      workspace.arrived() + (groups > 1 ? before : 0)};
  const dim3 grid((first + second) * static_cast<unsigned>(groups), token_tiles);
  LaunchEarly(kernel, grid, kThreads, kBytes, stream, p, part, q, other);
}

}  // namespace statetap::cuda
