#include "extractor/backend/cuda/routed_ffn.h"

#include <algorithm>

#include "extractor/backend/cuda/check.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;

__device__ int SlotOf(const SortRowsParams& p, int64_t pair) {
  return p.slot_of_expert[p.experts[pair]];
}

// One block a slot.
__global__ void CountKernel(const SortRowsParams p) {
  __shared__ int32_t total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  const int64_t pairs = static_cast<int64_t>(p.num_tokens) * p.top_k;
  int count = 0;
  for (int64_t i = threadIdx.x; i < pairs; i += kThreads)
    count += SlotOf(p, i) == static_cast<int>(blockIdx.x);
  atomicAdd(&total, count);  // integers: any order gives the same sum
  __syncthreads();
  if (threadIdx.x == 0) p.counts[blockIdx.x] = total;
}

// One thread: a few hundred slots.
__global__ void TilesKernel(const SortRowsParams p) {
  int row = 0, tiles = 0;
  for (int slot = 0; slot < p.num_slots; ++slot) {
    p.first_row[slot] = row;
    const int count = p.counts[slot], parts = (count + p.tile_rows - 1) / p.tile_rows;
    for (int part = 0, done = 0; part < parts; ++part) {
      const int rows = (count - done + parts - part - 1) / (parts - part);  // equal parts
      p.tiles[tiles++] = {slot, row + done, rows};
      done += rows;
    }
    row += count;
  }
  p.first_row[p.num_slots] = row;
  *p.num_tiles = tiles;
}

// One block a slot: a running count in order of the pairs. Block 0 also marks what is elsewhere.
__global__ void PlaceKernel(const SortRowsParams p) {
  __shared__ int32_t warps[kThreads / 32];
  const int slot = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t pairs = static_cast<int64_t>(p.num_tokens) * p.top_k;
  int32_t next = p.first_row[slot];
  for (int64_t begin = 0; begin < pairs; begin += kThreads) {
    const int64_t pair = begin + threadIdx.x;
    const int here = pair < pairs ? SlotOf(p, pair) : -2;
    if (here == -1 && slot == 0) p.row_of[pair] = -1;
    const unsigned mine = __ballot_sync(0xffffffffu, here == slot);
    if (lane == 0) warps[warp] = __popc(mine);
    __syncthreads();
    int32_t before = 0, all = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += warps[w];
      all += warps[w];
    }
    if (here == slot) {
      const int32_t row = next + before + __popc(mine & ((1u << lane) - 1));
      p.token_of_row[row] = static_cast<int32_t>(pair / p.top_k);
      p.row_of[pair] = row;
    }
    next += all;
    __syncthreads();
  }
}

// One block a token.
__global__ void SumKernel(const SumRowsParams p) {
  __shared__ int32_t rows[kMaxTopK];
  __shared__ float weights[kMaxTopK];
  __shared__ int count;
  const int64_t token = blockIdx.x;
  if (threadIdx.x == 0) {
    const int32_t* experts = p.experts + token * p.top_k;
    const int32_t* row_of = p.row_of + token * p.top_k;
    int32_t order[kMaxTopK];
    count = 0;
    for (int k = 0; k < p.top_k; ++k) {
      if (row_of[k] < 0) continue;
      int at = count++;  // insertion by expert
      for (; at > 0 && order[at - 1] > experts[k]; --at) {
        order[at] = order[at - 1];
        rows[at] = rows[at - 1];
        weights[at] = weights[at - 1];
      }
      order[at] = experts[k];
      rows[at] = row_of[k];
      weights[at] = p.weights[token * p.top_k + k];
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x) * 8; c < p.hidden; c += kThreads * 8) {
    float sum[8] = {};
    for (int i = 0; i < count; ++i) {
      const uint4 bits =
          *reinterpret_cast<const uint4*>(p.y + static_cast<int64_t>(rows[i]) * p.hidden + c);
      const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = __bfloat1622float2(pairs[j]);
        sum[2 * j] += weights[i] * pair.x;
        sum[2 * j + 1] += weights[i] * pair.y;
      }
    }
    uint4 bits;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&bits);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = __floats2bfloat162_rn(sum[2 * j], sum[2 * j + 1]);
    *reinterpret_cast<uint4*>(p.partial + token * p.hidden + c) = bits;
  }
}

}  // namespace

void SortRows(const SortRowsParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const auto slots = static_cast<unsigned>(p.num_slots);
  CountKernel<<<slots, kThreads, 0, stream>>>(p);
  CheckLaunch();
  TilesKernel<<<1, 1, 0, stream>>>(p);
  CheckLaunch();
  PlaceKernel<<<slots, kThreads, 0, stream>>>(p);
  CheckLaunch();
}

void SumExpertRows(const SumRowsParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  SumKernel<<<static_cast<unsigned>(p.num_tokens), kThreads, 0, stream>>>(p);
  CheckLaunch();
}

}  // namespace statetap::cuda
