// What an FFN of shared and routed experts ends with, in one pass over its rows: the sum over a
// token's routed experts and the shared experts' last product, whose own traffic with memory would
// be as much again. sm_90a.
//
// A block has 192 tokens, whose x stays in shared memory, and a range of the columns, 128 at a
// time. Three warpgroups hold 64 tokens each. While the product of the columns runs (wgmma), the
// first two routed rows of every token are on their way from memory; then they are added. The
// weights come in an order (MakeWeightMap) in which a thread's accumulators are eight neighbouring
// columns in four places, so that its accesses have 16 bytes. When all are done with the weights
// the first thread fetches the next ones, under the sums.
#include <cuda.h>

#include <algorithm>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/routed_ffn.h"
#include "extractor/backend/cuda/sm90/pipeline.h"
#include "extractor/backend/cuda/sm90/tensor_map.h"
#include "extractor/backend/cuda/sm90/wgmma.h"

namespace statetap::cuda {
namespace {

constexpr int kGroups = 3, kThreads = 128 * kGroups;
constexpr int kTokens = 64 * kGroups, kColumns = 128;
constexpr int kParts = kColumns / 32;  // places of a row where a thread has eight columns
constexpr int kMostPanels = 4;         // of kMapColumns of the width
constexpr int kTokenPanel = kTokens * 128, kWeightPanel = kColumns * 128;  // bytes
constexpr int kMostListed = 8;  // routed experts of a token
constexpr int kWeightsAt = kMostPanels * kTokenPanel,
              kListAt = kWeightsAt + kMostPanels * kWeightPanel,
              kCountsAt = kListAt + kMostListed * kTokens * 8,
              kBarriersAt = kCountsAt + kTokens * 4, kSharedBytes = kBarriersAt + 3 * 8;

struct Maps2 {
  CUtensorMap x, w;
};

struct Listed {  // a routed row of a token
  int32_t row;
  float weight;
};

struct Memory {
  unsigned char* base;
  __device__ unsigned char* tokens() const { return base; }
  __device__ unsigned char* weights() const { return base + kWeightsAt; }
  __device__ Listed& listed(int i, int place) const {
    return reinterpret_cast<Listed*>(base + kListAt)[i * kTokens + place];
  }
  __device__ int* counts() const { return reinterpret_cast<int*>(base + kCountsAt); }
  __device__ uint64_t* barrier(int i) const {
    return reinterpret_cast<uint64_t*>(base + kBarriersAt) + i;
  }
  __device__ uint64_t* full_tokens() const { return barrier(0); }
  __device__ uint64_t* full_weights() const { return barrier(1); }
  __device__ uint64_t* empty_weights() const { return barrier(2); }
};

template <int kPanels>
__device__ void LoadWeights(const Maps2& maps, const Memory& memory, int row) {
  ExpectBytes(memory.full_weights(), kPanels * kWeightPanel);
  for (int c = 0; c < kPanels; ++c) {
    LoadPermuted(memory.weights() + c * kWeightPanel, &maps.w, c * kMapColumns, row / 32,
                 memory.full_weights());
  }
}

// Each token's routed rows by expert, ascending; those of other ranks are left out. Eight lanes a
// token.
__device__ void ListRows(const SumRowsParams& p, const Memory& memory, int first_token) {
#pragma unroll
  for (int i = threadIdx.x; i < kTokens * kMostListed; i += kThreads) {
    const int place = i / kMostListed, k = i % kMostListed, token = first_token + place;
    const int64_t at = static_cast<int64_t>(token) * p.top_k + k;
    const bool real = token < p.num_tokens && k < p.top_k;
    const int row = real ? p.row_of[at] : -1, expert = real ? p.experts[at] : 0;
    const float weight = real ? p.weights[at] : 0;
    int before = 0, count = 0;
#pragma unroll
    for (int other = 0; other < kMostListed; ++other) {
      const int other_row = __shfl_sync(0xffffffffu, row, other, kMostListed),
                other_expert = __shfl_sync(0xffffffffu, expert, other, kMostListed);
      if (other_row < 0) continue;
      ++count;
      before += other_expert < expert || (other_expert == expert && other < k) ? 1 : 0;
    }
    if (row >= 0) memory.listed(before, place) = {row, weight};
    if (k == 0) memory.counts()[place] = count;
  }
}

// The rows of a thread: `place` of the block, which is `token`, and eight on. Its accumulators: of
// each part four pairs of the first row, and behind each pair one of the second.
struct Rows {
  int place, token, counts[2], most;  // most: of any lane's rows
};
__device__ constexpr int AccumulatorOf(int half, int part, int pair) {
  return part * 16 + pair * 4 + half * 2;
}

// What was listed at `i` of both rows.
struct Chunks {
  uint4 bits[2][kParts];
  float weight[2];
};
__device__ __forceinline__ void Load(const SumRowsParams& p, const Memory& memory, const Rows& rows,
                                     int i, int column, Chunks& chunks) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (i >= rows.counts[half]) continue;
    const Listed listed = memory.listed(i, rows.place + half * 8);
    chunks.weight[half] = listed.weight;
    const bf16* from = p.y + static_cast<int64_t>(listed.row) * p.hidden + column;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      chunks.bits[half][part] = __ldcs(reinterpret_cast<const uint4*>(from + part * 32));
  }
}
__device__ __forceinline__ void Add(const Rows& rows, int i, const Chunks& chunks,
                                    float (&sum)[kColumns / 2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (i >= rows.counts[half]) continue;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&chunks.bits[half][part]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = __bfloat1622float2(pairs[j]);
        float* to = sum + AccumulatorOf(half, part, j);
        to[0] = fmaf(chunks.weight[half], pair.x, to[0]);
        to[1] = fmaf(chunks.weight[half], pair.y, to[1]);
      }
    }
  }
}
__device__ __forceinline__ void Write(const SumRowsParams& p, const Rows& rows, int column,
                                      const float (&sum)[kColumns / 2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t token = rows.token + half * 8;
    if (token >= p.num_tokens) continue;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint4 bits;
      auto* words = reinterpret_cast<uint32_t*>(&bits);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* from = sum + AccumulatorOf(half, part, j);
        words[j] = Pack(from[0], from[1]);
      }
      *reinterpret_cast<uint4*>(p.partial + token * p.hidden + column + part * 32) = bits;
    }
  }
}

// Accumulators = the tokens of a warpgroup · the weights of the columns; begins, and commits.
template <int kPanels>
__device__ __forceinline__ void BeginProduct(const unsigned char* tokens,
                                             const unsigned char* weights,
                                             float (&sum)[kColumns / 2]) {
  FenceWgmma();
#pragma unroll
  for (int i = 0; i < kPanels * 4; ++i) {
    WgmmaShared<kColumns>::Multiply(sum, TokenDescriptor(tokens + i / 4 * kTokenPanel) + i % 4 * 2,
                                    TokenDescriptor(weights + i / 4 * kWeightPanel) + i % 4 * 2,
                                    i > 0);
  }
  CommitWgmma();
}

template <int kPanels>
__global__ void __launch_bounds__(kThreads, 1)
    SumProductKernel(const __grid_constant__ Maps2 maps, const SumRowsParams p, int splits) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory memory{shared};
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128, lane = thread % 32;
  const int split = static_cast<int>(blockIdx.x) % splits,
            first_token = static_cast<int>(blockIdx.x) / splits * kTokens;
  const int all = p.hidden / kColumns, first_tile = split * all / splits,
            tiles = (split + 1) * all / splits - first_tile;
  LetNextBegin();
  if (thread == 0) {
    InitBarrier(memory.full_tokens(), 1);
    InitBarrier(memory.full_weights(), 1);
    InitBarrier(memory.empty_weights(), kGroups);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    LoadWeights<kPanels>(maps, memory, first_tile * kColumns);
  }
  WaitForEarlier();
  if (thread == 0) {
    ExpectBytes(memory.full_tokens(), kPanels * kTokenPanel);
    for (int c = 0; c < kPanels; ++c) {
      LoadTokens(memory.tokens() + c * kTokenPanel, &maps.x, c * kMapColumns, first_token,
                 memory.full_tokens());
    }
  }
  ListRows(p, memory, first_token);
  __syncthreads();
  Rows rows;
  rows.place = group * 64 + thread % 128 / 32 * 16 + lane / 4;
  rows.token = first_token + rows.place;
  rows.counts[0] = memory.counts()[rows.place];
  rows.counts[1] = memory.counts()[rows.place + 8];
  rows.most = __reduce_max_sync(0xffffffffu, max(rows.counts[0], rows.counts[1]));
  const unsigned char* tokens = memory.tokens() + group * 64 * 128;
  Wait(memory.full_tokens(), 0);
  for (int tile = 0; tile < tiles; ++tile) {
    const int column = (first_tile + tile) * kColumns + lane % 4 * 8;
    float sum[kColumns / 2];
    Chunks even, odd;
    Wait(memory.full_weights(), tile & 1);
    BeginProduct<kPanels>(tokens, memory.weights(), sum);
    Load(p, memory, rows, 0, column, even);
    Load(p, memory, rows, 1, column, odd);
    WaitWgmma<0>();
    Settle(sum);
    if (thread % 128 == 0) Arrive(memory.empty_weights());
    if (thread == 0 && tile + 1 < tiles) {
      Wait(memory.empty_weights(), tile & 1);
      LoadWeights<kPanels>(maps, memory, (first_tile + tile + 1) * kColumns);
    }
    for (int i = 0; i < rows.most; i += 2) {
      Add(rows, i, even, sum);
      Load(p, memory, rows, i + 2, column, even);
      Add(rows, i + 1, odd, sum);
      Load(p, memory, rows, i + 3, column, odd);
    }
    Write(p, rows, column, sum);
  }
}

// Into how many ranges the columns are cut: the fewest tiles one after the other on a
// multiprocessor; one more for what a block begins with.
int SplitsOf(int token_tiles, int column_tiles) {
  const int processors = Processors();
  int best = 1, least = 0;
  for (int splits = 1; splits <= column_tiles; ++splits) {
    const int rounds = (token_tiles * splits + processors - 1) / processors,
              cost = rounds * ((column_tiles + splits - 1) / splits + 1);
    if (splits == 1 || cost < least) {
      best = splits;
      least = cost;
    }
  }
  return best;
}

}  // namespace

bool HopperSumProductTakes(int hidden, int width, int top_k) {
  return hidden % kColumns == 0 && width % kMapColumns == 0 && width > 0 &&
         width <= kMostPanels * kMapColumns && top_k <= kMostListed;
}

void HopperSumProduct(const SumProductParams& p, cudaStream_t stream) {
  if (p.routed.num_tokens == 0) return;
  const Maps2 maps{MakeTensorMap(p.x, p.routed.num_tokens, p.width, kTokens),
                   MakeWeightMap(p.w, p.routed.hidden, p.width, kColumns)};
  const int token_tiles = (p.routed.num_tokens + kTokens - 1) / kTokens,
            splits = SplitsOf(token_tiles, p.routed.hidden / kColumns);
  const auto launch = [&](auto* kernel) {
    Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    LaunchEarly(kernel, dim3(static_cast<unsigned>(token_tiles * splits)), kThreads, kSharedBytes,
                stream, maps, p.routed, splits);
  };
  switch (p.width / kMapColumns) {
    case 1: return launch(SumProductKernel<1>);
    case 2: return launch(SumProductKernel<2>);
    case 3: return launch(SumProductKernel<3>);
    default: return launch(SumProductKernel<4>);
  }
}

}  // namespace statetap::cuda
