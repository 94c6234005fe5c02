// What an FFN of shared and routed experts ends with, in one pass over its rows: the sum over a
// token's routed experts and the shared experts' last product, whose own traffic with memory would
// be as much again. sm_90a.
//
// A block has 256 tokens, whose x stays in shared memory, and a range of the columns, 64 at a time,
// whose weights pass through a ring of two stages. Four warpgroups hold 64 tokens each. While the
// product of the columns runs (wgmma), routed rows are on their way from memory; then they are
// added. For that a thread's accumulators, two neighbouring columns in each of eight places, become
// eight neighbouring ones in two, so that its accesses have 16 bytes. The warpgroup that is the
// last to be done with a stage loads it anew.
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

constexpr int kTokens = 256, kColumns = 64, kStages = 2;
constexpr int kMostPanels = 4;  // of kMapColumns of the width
constexpr int kTokenPanel = kTokens * 128, kWeightPanel = kColumns * 128;  // bytes
constexpr int kMostListed = 8;  // routed experts of a token
constexpr int kThreads = 512, kGroups = kThreads / 128;
constexpr int kWeightsAt = kMostPanels * kTokenPanel,
              kListAt = kWeightsAt + kStages * kMostPanels * kWeightPanel,
              kCountsAt = kListAt + kMostListed * kTokens * 8,
              kBarriersAt = kCountsAt + kTokens * 4,
              kSharedBytes = kBarriersAt + (1 + kStages) * 8 + kStages * 4;

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
  __device__ unsigned char* weights(int stage) const {
    return base + kWeightsAt + stage * kMostPanels * kWeightPanel;
  }
  __device__ Listed* list() const { return reinterpret_cast<Listed*>(base + kListAt); }
  __device__ int* counts() const { return reinterpret_cast<int*>(base + kCountsAt); }
  __device__ uint64_t* barrier(int i) const {
    return reinterpret_cast<uint64_t*>(base + kBarriersAt) + i;
  }
  __device__ uint64_t* full_tokens() const { return barrier(0); }
  __device__ uint64_t* full(int stage) const { return barrier(1 + stage); }
  __device__ int* done(int stage) const {  // warpgroups
    return reinterpret_cast<int*>(barrier(1 + kStages)) + stage;
  }
};

template <int kPanels>
__device__ void LoadWeights(const Maps2& maps, const Memory& memory, int stage, int row) {
  ExpectBytes(memory.full(stage), kPanels * kWeightPanel);
  for (int c = 0; c < kPanels; ++c) {
    LoadTokens(memory.weights(stage) + c * kWeightPanel, &maps.w, c * kMapColumns, row,
               memory.full(stage));
  }
}

// A token's routed rows by expert, ascending; those of other ranks are left out.
__device__ void ListRows(const SumRowsParams& p, const Memory& memory, int token, int place) {
  int32_t rows[kMostListed], experts[kMostListed];
  int count = 0;
  const int64_t first = static_cast<int64_t>(token) * p.top_k;
#pragma unroll
  for (int k = 0; k < kMostListed; ++k) {
    const bool real = token < p.num_tokens && k < p.top_k;
    rows[k] = real ? p.row_of[first + k] : -1;
    experts[k] = real ? p.experts[first + k] : 0;
    count += rows[k] >= 0 ? 1 : 0;
  }
#pragma unroll
  for (int k = 0; k < kMostListed; ++k) {
    if (rows[k] < 0) continue;
    int before = 0;
#pragma unroll
    for (int other = 0; other < kMostListed; ++other) {
      const bool lower = experts[other] < experts[k] || (experts[other] == experts[k] && other < k);
      before += rows[other] >= 0 && lower ? 1 : 0;
    }
    memory.list()[before * kTokens + place] = {rows[k], p.weights[first + k]};
  }
  memory.counts()[place] = count;
}

template <int kCount>
__device__ __forceinline__ void Settle(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Lane q of four holds pairs 4i + {0, 1} (or 2, 3: eight rows down) of columns 8i + 2q. Then it
// holds the eight columns 8q of the first 32 at i = 0…3, and of the others at i = 4…7.
__device__ __forceinline__ void Transpose(float (&d)[kColumns / 2]) {
  const bool odd = threadIdx.x % 2 != 0, high = threadIdx.x % 4 / 2 != 0;
#pragma unroll
  for (int at = 0; at < kColumns / 2; at += 16) {  // four places
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const auto swap = [&](int i, int j, bool keeps_second, int lanes) {
        float &a = d[at + 4 * i + c], &b = d[at + 4 * j + c];
        const float got = __shfl_xor_sync(0xffffffffu, keeps_second ? a : b, lanes);
        (keeps_second ? a : b) = got;
      };
      swap(0, 1, odd, 1);
      swap(2, 3, odd, 1);
      swap(0, 2, high, 2);
      swap(1, 3, high, 2);
    }
  }
}

// The rows of a thread: `place` and eight on, of the block.
struct Rows {
  int place, token, counts[2], most;  // most: of any lane's rows
};

// What was listed at `i` of both rows, for 8 columns in two places.
struct Chunks {
  uint4 bits[2][2];
  float weight[2];
};
__device__ __forceinline__ void Load(const SumRowsParams& p, const Memory& memory, const Rows& rows,
                                     int i, int column, Chunks& chunks) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (i >= rows.counts[half]) continue;
    const Listed listed = memory.list()[i * kTokens + rows.place + half * 8];
    chunks.weight[half] = listed.weight;
    const bf16* from = p.y + static_cast<int64_t>(listed.row) * p.hidden + column;
#pragma unroll
    for (int part = 0; part < 2; ++part)
      chunks.bits[half][part] = __ldcs(reinterpret_cast<const uint4*>(from + part * 32));
  }
}
__device__ __forceinline__ void Add(const Rows& rows, int i, const Chunks& chunks,
                                    float (&d)[kColumns / 2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (i >= rows.counts[half]) continue;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&chunks.bits[half][part]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = __bfloat1622float2(pairs[j]);
        float* to = d + part * 16 + j * 4 + half * 2;
        to[0] = fmaf(chunks.weight[half], pair.x, to[0]);
        to[1] = fmaf(chunks.weight[half], pair.y, to[1]);
      }
    }
  }
}

__device__ __forceinline__ void Write(const SumRowsParams& p, const Rows& rows, int column,
                                      const float (&d)[kColumns / 2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t token = rows.token + half * 8;
    if (token >= p.num_tokens) continue;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint4 bits;
      auto* words = reinterpret_cast<uint32_t*>(&bits);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* from = d + part * 16 + j * 4 + half * 2;
        words[j] = Pack(from[0], from[1]);
      }
      *reinterpret_cast<uint4*>(p.partial + token * p.hidden + column + part * 32) = bits;
    }
  }
}

// Accumulators = the tokens of a warpgroup · the weights of 64 columns; begins, and commits.
template <int kPanels>
__device__ __forceinline__ void BeginProduct(const unsigned char* tokens,
                                             const unsigned char* weights,
                                             float (&d)[kColumns / 2]) {
  FenceWgmma();
#pragma unroll
  for (int i = 0; i < kPanels * 4; ++i) {
    WgmmaShared<kColumns>::Multiply(d, TokenDescriptor(tokens + i / 4 * kTokenPanel) + i % 4 * 2,
                                    TokenDescriptor(weights + i / 4 * kWeightPanel) + i % 4 * 2,
                                    i > 0);
  }
  CommitWgmma();
}

// Of the warpgroups that are done with a stage.
__device__ bool IsLast(int* done) {
  __threadfence_block();
  if (atomicAdd(done, 1) != kGroups - 1) return false;
  __threadfence_block();
  *done = 0;
  return true;
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
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(memory.full(stage), 1);
      *memory.done(stage) = 0;
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    for (int tile = 0; tile < min(kStages, tiles); ++tile)
      LoadWeights<kPanels>(maps, memory, tile, (first_tile + tile) * kColumns);
  }
  WaitForEarlier();
  if (thread == 0) {
    ExpectBytes(memory.full_tokens(), kPanels * kTokenPanel);
    for (int c = 0; c < kPanels; ++c) {
      LoadTokens(memory.tokens() + c * kTokenPanel, &maps.x, c * kMapColumns, first_token,
                 memory.full_tokens());
    }
  }
  if (thread < kTokens) ListRows(p, memory, first_token + thread, thread);
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
    const int stage = tile % kStages, column = (first_tile + tile) * kColumns + lane % 4 * 8;
    float sum[kColumns / 2];
    Chunks even, odd;
    Wait(memory.full(stage), tile / kStages & 1);
    BeginProduct<kPanels>(tokens, memory.weights(stage), sum);
    Load(p, memory, rows, 0, column, even);
    Load(p, memory, rows, 1, column, odd);
    WaitWgmma<0>();
    Settle(sum);
    if (thread % 128 == 0 && tile + kStages < tiles && IsLast(memory.done(stage)))
      LoadWeights<kPanels>(maps, memory, stage, (first_tile + tile + kStages) * kColumns);
    Transpose(sum);
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
// multiprocessor; two more for what a block begins with.
int SplitsOf(int token_tiles, int column_tiles, int processors) {
  int best = 1, least = 0;
  for (int splits = 1; splits <= column_tiles; ++splits) {
    const int rounds = (token_tiles * splits + processors - 1) / processors,
              cost = rounds * ((column_tiles + splits - 1) / splits + 2);
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
                   MakeTensorMap(p.w, p.routed.hidden, p.width, kColumns)};
  int device, processors;
  Check(cudaGetDevice(&device));
  Check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int token_tiles = (p.routed.num_tokens + kTokens - 1) / kTokens,
            splits = SplitsOf(token_tiles, p.routed.hidden / kColumns, processors);
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
