#include "extractor/backend/cuda/routed_ffn.h"

#include <algorithm>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;

constexpr int kPairsABlock = 1024;
constexpr int kMaxWidths = 32;  // tiles are classed by rows / 8

// The slots of a block's pairs, −1 where the expert is another rank's or there is no pair.
__device__ int SlotOf(const SortRowsParams& p, int64_t pair) {
  return pair < static_cast<int64_t>(p.num_tokens) * p.top_k ? p.slot_of_expert[p.experts[pair]]
                                                             : -1;
}

// A block counts kPairsABlock pairs in shared memory.
__global__ void CountKernel(const SortRowsParams p) {
  extern __shared__ int32_t counts[];
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) counts[slot] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < kPairsABlock; i += kThreads) {
    const int slot = SlotOf(p, static_cast<int64_t>(blockIdx.x) * kPairsABlock + i);
    if (slot >= 0) atomicAdd(&counts[slot], 1);  // integers: any order gives the same sum
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) {
    if (counts[slot] > 0) atomicAdd(&p.counts[slot], counts[slot]);
  }
}

// One block, which reads the counts together; then one thread lists a few hundred tiles.
__global__ void TilesKernel(const SortRowsParams p) {
  extern __shared__ int32_t counts[];
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) counts[slot] = p.counts[slot];
  __syncthreads();
  if (threadIdx.x != 0) return;
  const auto for_each_tile = [&](const auto& body) {
    int row = 0;
    for (int slot = 0; slot < p.num_slots; ++slot) {
      const int count = counts[slot], parts = (count + p.tile_rows - 1) / p.tile_rows;
      for (int part = 0, done = 0; part < parts; ++part) {
        const int rows = (count - done + parts - part - 1) / (parts - part);
        body(TokenTile{slot, row + done, rows, (rows + 7) / 8 * 8});
        done += rows;
      }
      row += count;
    }
  };
  int next[kMaxWidths] = {};  // by width, falling: first how many, then where they begin
  for_each_tile([&](const TokenTile& tile) { ++next[kMaxWidths - tile.width / 8]; });
  int tiles = 0;
  for (int& begin : next) {
    const int count = begin;
    begin = tiles;
    tiles += count;
  }
  for_each_tile(
      [&](const TokenTile& tile) { p.tiles[next[kMaxWidths - tile.width / 8]++] = tile; });
  *p.num_tiles = tiles;
  int row = 0;
  for (int slot = 0; slot < p.num_slots; ++slot) {
    p.first_row[slot] = row;
    row += counts[slot];
  }
}

// A block places kPairsABlock pairs: ranks among its own in shared memory, then one claim a slot.
__global__ void PlaceKernel(const SortRowsParams p) {
  extern __shared__ int32_t counts[];
  constexpr int kEach = kPairsABlock / kThreads;
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) counts[slot] = 0;
  __syncthreads();
  int slots[kEach], ranks[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    slots[i] =
        SlotOf(p, static_cast<int64_t>(blockIdx.x) * kPairsABlock + i * kThreads + threadIdx.x);
    ranks[i] = slots[i] >= 0 ? atomicAdd(&counts[slots[i]], 1) : 0;
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) {
    const int mine = counts[slot];
    if (mine > 0) counts[slot] = p.first_row[slot] + atomicAdd(&p.counts[p.num_slots + slot], mine);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t pair =
        static_cast<int64_t>(blockIdx.x) * kPairsABlock + i * kThreads + threadIdx.x;
    if (pair >= static_cast<int64_t>(p.num_tokens) * p.top_k) continue;
    const int32_t row = slots[i] >= 0 ? counts[slots[i]] + ranks[i] : -1;
    p.row_of[pair] = row;
    if (row >= 0) p.token_of_row[row] = static_cast<int32_t>(pair / p.top_k);
  }
}

constexpr int kFewThreads = 1024;
static_assert(kFewSlots <= kFewThreads, "a thread a slot");

// One block: counts, two sums over the slots side by side, tiles, places.
__global__ void __launch_bounds__(kFewThreads) SortFewKernel(const SortRowsParams p) {
  __shared__ int32_t counts[kFewSlots];
  __shared__ int2 warps[kFewThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int pairs = p.num_tokens * p.top_k;
  LetNextBegin();
  if (thread < p.num_slots) counts[thread] = 0;
  __syncthreads();
  WaitForEarlier();
  constexpr int kEach = kFewPairs / kFewThreads;
  int slots[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    slots[i] = SlotOf(p, thread + i * kFewThreads);
    if (slots[i] >= 0) atomicAdd(&counts[slots[i]], 1);
  }
  __syncthreads();
  int count = thread < p.num_slots ? counts[thread] : 0;
  if (p.whole_step && count > 0) count = p.tile_rows;  // all tokens, room for a full tile
  const int parts = (count + p.tile_rows - 1) / p.tile_rows;
  int2 until = {count, parts};  // rows and tiles of the slots up to this one
  for (int offset = 1; offset < 32; offset *= 2) {
    const int rows = __shfl_up_sync(0xffffffffu, until.x, offset),
              tiles = __shfl_up_sync(0xffffffffu, until.y, offset);
    if (lane >= offset) until = {until.x + rows, until.y + tiles};
  }
  if (lane == 31) warps[warp] = until;
  __syncthreads();
  for (int w = 0; w < warp; ++w) until = {until.x + warps[w].x, until.y + warps[w].y};
  const int first_row = until.x - count, first_tile = until.y - parts;
  if (thread < p.num_slots) {
    p.counts[thread] = count;
    p.first_row[thread] = first_row;
    counts[thread] = first_row;
    for (int part = 0, done = 0; part < parts; ++part) {
      const int rows = (count - done + parts - part - 1) / (parts - part);
      p.tiles[first_tile + part] = {thread, first_row + done, p.whole_step ? p.num_tokens : rows,
                                    (rows + 7) / 8 * 8};
      done += rows;
    }
  }
  if (thread == kFewThreads - 1) *p.num_tiles = until.y;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int pair = thread + i * kFewThreads;
    if (pair >= pairs) break;
    int row = -1;
    if (slots[i] >= 0) {
      row = p.whole_step ? counts[slots[i]] + pair / p.top_k : atomicAdd(&counts[slots[i]], 1);
      p.token_of_row[row] = pair / p.top_k;
    }
    p.row_of[pair] = row;
  }
}

// One block a row of the tile list; the rows behind the last are not there.
__global__ void GatherKernel(const bf16* x, const SortRowsParams p, int hidden, bf16* to) {
  LetNextBegin();
  WaitForEarlier();
  const int last = p.num_slots - 1, rows = p.first_row[last] + p.counts[last];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const auto* from =
        reinterpret_cast<const uint4*>(x + static_cast<int64_t>(p.token_of_row[row]) * hidden);
    auto* out = reinterpret_cast<uint4*>(to + row * hidden);
    for (int i = threadIdx.x; i < hidden / 8; i += kThreads) out[i] = from[i];
  }
}

// One block a token.
__global__ void SumKernel(const SumRowsParams p) {
  __shared__ int32_t listed_rows[kMaxTopK], experts[kMaxTopK], rows[kMaxTopK];
  __shared__ float weights[kMaxTopK];
  __shared__ int count;
  const int64_t token = blockIdx.x;
  LetNextBegin();
  WaitForEarlier();
  const int64_t first = token * p.top_k;
  for (int k = threadIdx.x; k < p.top_k; k += kThreads) {
    listed_rows[k] = p.row_of[first + k];
    experts[k] = p.experts[first + k];
  }
  __syncthreads();
  // By expert, ascending; those of other ranks are left out.
  for (int k = threadIdx.x; k < p.top_k; k += kThreads) {
    int before = 0, all = 0;
    for (int other = 0; other < p.top_k; ++other) {
      if (listed_rows[other] < 0) continue;
      ++all;
      before += experts[other] < experts[k] || (experts[other] == experts[k] && other < k) ? 1 : 0;
    }
    if (k == 0) count = all;
    if (listed_rows[k] < 0) continue;
    rows[before] = listed_rows[k];
    weights[before] = p.weights[first + k];
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
  const auto blocks = static_cast<unsigned>(
      (static_cast<int64_t>(p.num_tokens) * p.top_k + kPairsABlock - 1) / kPairsABlock);
  const size_t shared = static_cast<size_t>(p.num_slots) * sizeof(int32_t);
  Check(cudaMemsetAsync(p.counts, 0, 2 * shared, stream));
  CountKernel<<<blocks, kThreads, shared, stream>>>(p);
  CheckLaunch();
  TilesKernel<<<1, kThreads, shared, stream>>>(p);
  CheckLaunch();
  PlaceKernel<<<blocks, kThreads, shared, stream>>>(p);
  CheckLaunch();
}

void SortFewRows(const SortRowsParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  LaunchEarly(SortFewKernel, dim3(1), kFewThreads, 0, stream, p);
}

void GatherTokens(const bf16* x, const SortRowsParams& p, int hidden, bf16* to,
                  cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(int64_t{p.num_tokens} * p.top_k, 132 * 16));
  LaunchEarly(GatherKernel, dim3(blocks), kThreads, 0, stream, x, p, hidden, to);
}

void SumExpertRows(const SumRowsParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  LaunchEarly(SumKernel, dim3(static_cast<unsigned>(p.num_tokens)), kThreads, 0, stream, p);
}

}  // namespace statetap::cuda
