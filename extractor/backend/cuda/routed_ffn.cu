#include "extractor/backend/cuda/routed_ffn.h"

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPairsABlock = 1024;
constexpr int kWidths = 32;  // tiles are classed by rows / 8, the widest first; a lane a class

// The slots of a block's pairs, −1 where the expert is another rank's or there is no pair.
__device__ int SlotOf(const SortRowsParams& p, int64_t pair) {
  return pair < static_cast<int64_t>(p.num_tokens) * p.top_k ? p.slot_of_expert[p.experts[pair]]
                                                             : -1;
}

// A slot's rows in equal tiles: the first `longer` of `parts` tiles have rows + 1 of them.
struct Split {
  int parts, longer, rows;
  __device__ Split(int count, int most)
      : parts((count + most - 1) / most),
        longer(parts > 0 ? count % parts : 0),
        rows(parts > 0 ? count / parts : 0) {}
};
__device__ int WidthOf(int rows) { return (rows + 7) / 8 * 8; }
__device__ int ClassOf(int width) { return kWidths - width / 8; }

// Sums of a warp's values up to each lane.
__device__ int SumUntil(int value, int lane) {
  for (int offset = 1; offset < 32; offset *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, value, offset);
    if (lane >= offset) value += before;
  }
  return value;
}

// On all threads of one block. rows, shared: of each slot; becomes the slot's first row.
__device__ void ListTiles(const SortRowsParams& p, int32_t* rows) {
  __shared__ int32_t places[kWidths], of_warps[32], rows_before;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x),
            warp = thread / 32, lane = thread % 32;
  const auto count_of = [&](int slot) {  // all tokens, room for a full tile
    return p.whole_step && rows[slot] > 0 ? p.tile_rows : rows[slot];
  };
  if (thread < kWidths) places[thread] = 0;
  if (thread == 0) rows_before = 0;
  __syncthreads();
  for (int slot = thread; slot < p.num_slots; slot += threads) {
    const Split split(count_of(slot), p.tile_rows);
    if (split.longer > 0) atomicAdd(&places[ClassOf(WidthOf(split.rows + 1))], split.longer);
    if (split.parts > 0)
      atomicAdd(&places[ClassOf(WidthOf(split.rows))], split.parts - split.longer);
  }
  __syncthreads();
  if (warp == 0) {
    const int tiles = places[lane], until = SumUntil(tiles, lane);
    places[lane] = until - tiles;
    if (lane == kWidths - 1) *p.num_tiles = until;
  }
  for (int base = 0; base < p.num_slots; base += threads) {
    const int slot = base + thread, count = slot < p.num_slots ? count_of(slot) : 0;
    const int until = SumUntil(count, lane);
    if (lane == 31) of_warps[warp] = until;
    __syncthreads();
    int first = rows_before + until - count;
    for (int w = 0; w < warp; ++w) first += of_warps[w];
    const Split split(count, p.tile_rows);
    if (slot < p.num_slots) rows[slot] = first;
    int row = first;
    const auto list = [&](int tiles, int tile_rows) {  // a slot's tiles of one width lie together
      if (tiles == 0) return;
      const int width = WidthOf(tile_rows), place = atomicAdd(&places[ClassOf(width)], tiles);
      for (int i = 0; i < tiles; ++i, row += tile_rows)
        p.tiles[place + i] = {slot, row, p.whole_step ? p.num_tokens : tile_rows, width};
    };
    list(split.longer, split.rows + 1);
    list(split.parts - split.longer, split.rows);
    __syncthreads();
    if (thread == threads - 1) rows_before = first + count;
    __syncthreads();
  }
}

// A block counts kPairsABlock pairs in shared memory; the last one to end lists the tiles.
__global__ void __launch_bounds__(kThreads) CountKernel(const SortRowsParams p) {
  extern __shared__ int32_t rows[];
  __shared__ bool last;
  LetNextBegin();
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) rows[slot] = 0;
  __syncthreads();
  WaitForEarlier();
  for (int i = threadIdx.x; i < kPairsABlock; i += kThreads) {
    const int slot = SlotOf(p, static_cast<int64_t>(blockIdx.x) * kPairsABlock + i);
    if (slot >= 0) atomicAdd(&rows[slot], 1);  // integers: any order gives the same sum
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) {
    if (rows[slot] > 0) atomicAdd(&p.counts[slot], rows[slot]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&p.counts[p.num_slots], 1) + 1 == gridDim.x;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int slot = threadIdx.x; slot <= p.num_slots; slot += kThreads) {
    const int count = atomicExch(&p.counts[slot], 0);
    if (slot < p.num_slots) rows[slot] = count;
  }
  __syncthreads();
  ListTiles(p, rows);
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) p.next_row[slot] = rows[slot];
}

// A block places kPairsABlock pairs: ranks among its own in shared memory, then one claim a slot.
__global__ void __launch_bounds__(kThreads) PlaceKernel(const SortRowsParams p) {
  extern __shared__ int32_t rows[];
  constexpr int kEach = kPairsABlock / kThreads;
  LetNextBegin();
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) rows[slot] = 0;
  __syncthreads();
  WaitForEarlier();
  int slots[kEach], ranks[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    slots[i] =
        SlotOf(p, static_cast<int64_t>(blockIdx.x) * kPairsABlock + i * kThreads + threadIdx.x);
    ranks[i] = slots[i] >= 0 ? atomicAdd(&rows[slots[i]], 1) : 0;
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) {
    const int mine = rows[slot];
    if (mine > 0) rows[slot] = atomicAdd(&p.next_row[slot], mine);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t pair =
        static_cast<int64_t>(blockIdx.x) * kPairsABlock + i * kThreads + threadIdx.x;
    if (pair >= static_cast<int64_t>(p.num_tokens) * p.top_k) continue;
    const int32_t row = slots[i] >= 0 ? rows[slots[i]] + ranks[i] : -1;
    p.row_of[pair] = row;
    if (row >= 0) p.token_of_row[row] = static_cast<int32_t>(pair / p.top_k);
  }
}

// All of it in one block.
template <int kBlock>
__global__ void __launch_bounds__(kBlock) SortFewKernel(const SortRowsParams p) {
  extern __shared__ int32_t rows[];
  const int thread = static_cast<int>(threadIdx.x), pairs = p.num_tokens * p.top_k;
  LetNextBegin();
  for (int slot = thread; slot < p.num_slots; slot += kBlock) rows[slot] = 0;
  __syncthreads();
  WaitForEarlier();
#pragma unroll 4
  for (int pair = thread; pair < pairs; pair += kBlock) {
    const int slot = SlotOf(p, pair);
    if (slot >= 0) atomicAdd(&rows[slot], 1);
  }
  __syncthreads();
  ListTiles(p, rows);
#pragma unroll 4
  for (int pair = thread; pair < pairs; pair += kBlock) {
    const int slot = SlotOf(p, pair);
    int row = -1;
    if (slot >= 0) {
      row = p.whole_step ? rows[slot] + pair / p.top_k : atomicAdd(&rows[slot], 1);
      p.token_of_row[row] = pair / p.top_k;
    }
    p.row_of[pair] = row;
  }
}

// Rows of bf16 go through a block's registers, kChunks loads of a thread under way together: 7168
// columns are one round.
constexpr int kCopyThreads = 128, kChunks = 7, kRound = kCopyThreads * kChunks * 8;

// One block a token, whose row is read once for all its experts.
__global__ void __launch_bounds__(kCopyThreads)
    GatherKernel(const bf16* x, const SortRowsParams p, int hidden, bf16* to) {
  LetNextBegin();
  WaitForEarlier();
  const int64_t token = blockIdx.x;
  const int32_t* rows = p.row_of + token * p.top_k;
  bool any = false;
  for (int k = 0; k < p.top_k; ++k) any |= rows[k] >= 0;
  if (!any) return;
  for (int first = static_cast<int>(threadIdx.x) * 8; first < hidden; first += kRound) {
    uint4 values[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int column = first + i * kCopyThreads * 8;
      if (column < hidden) values[i] = *reinterpret_cast<const uint4*>(x + token * hidden + column);
    }
    for (int k = 0; k < p.top_k; ++k) {
      if (rows[k] < 0) continue;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int column = first + i * kCopyThreads * 8;
        if (column < hidden)
          *reinterpret_cast<uint4*>(to + static_cast<int64_t>(rows[k]) * hidden + column) =
              values[i];
      }
    }
  }
}

// One block a token.
__global__ void __launch_bounds__(kCopyThreads) SumKernel(const SumRowsParams p) {
  __shared__ int32_t listed_rows[kMaxTopK], experts[kMaxTopK], rows[kMaxTopK];
  __shared__ float weights[kMaxTopK];
  __shared__ int count;
  const int64_t token = blockIdx.x;
  LetNextBegin();
  WaitForEarlier();
  const int64_t first = token * p.top_k;
  for (int k = threadIdx.x; k < p.top_k; k += kCopyThreads) {
    listed_rows[k] = p.row_of[first + k];
    experts[k] = p.experts[first + k];
  }
  __syncthreads();
  // By expert, ascending; those of other ranks are left out.
  for (int k = threadIdx.x; k < p.top_k; k += kCopyThreads) {
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
  for (int c = static_cast<int>(threadIdx.x) * 8; c < p.hidden; c += kRound) {
    float sum[kChunks][8] = {};
    for (int i = 0; i < count; ++i) {
      const bf16* y = p.y + static_cast<int64_t>(rows[i]) * p.hidden;
      uint4 bits[kChunks];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int column = c + chunk * kCopyThreads * 8;
        if (column < p.hidden) bits[chunk] = *reinterpret_cast<const uint4*>(y + column);
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits[chunk]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = __bfloat1622float2(pairs[j]);
          sum[chunk][2 * j] += weights[i] * pair.x;
          sum[chunk][2 * j + 1] += weights[i] * pair.y;
        }
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = c + chunk * kCopyThreads * 8;
      if (column >= p.hidden) continue;
      uint4 bits;
      auto* pairs = reinterpret_cast<__nv_bfloat162*>(&bits);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        pairs[j] = __floats2bfloat162_rn(sum[chunk][2 * j], sum[chunk][2 * j + 1]);
      *reinterpret_cast<uint4*>(p.partial + token * p.hidden + column) = bits;
    }
  }
}

}  // namespace

void SortRows(const SortRowsParams& p, cudaStream_t stream) {
  const int64_t pairs = static_cast<int64_t>(p.num_tokens) * p.top_k;
  if (pairs == 0) return;
  const size_t shared = static_cast<size_t>(p.num_slots) * sizeof(int32_t);
  // Decode's steps wait for this.
  if (pairs <= 1024) return LaunchEarly(SortFewKernel<256>, dim3(1), 256, shared, stream, p);
  if (pairs <= kFewPairs) return LaunchEarly(SortFewKernel<1024>, dim3(1), 1024, shared, stream, p);
  const dim3 blocks(static_cast<unsigned>((pairs + kPairsABlock - 1) / kPairsABlock));
  LaunchEarly(CountKernel, blocks, kThreads, shared, stream, p);
  LaunchEarly(PlaceKernel, blocks, kThreads, shared, stream, p);
}

void GatherTokens(const bf16* x, const SortRowsParams& p, int hidden, bf16* to,
                  cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  LaunchEarly(GatherKernel, dim3(static_cast<unsigned>(p.num_tokens)), kCopyThreads, 0, stream, x,
              p, hidden, to);
}

void SumExpertRows(const SumRowsParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  LaunchEarly(SumKernel, dim3(static_cast<unsigned>(p.num_tokens)), kCopyThreads, 0, stream, p);
}

}  // namespace statetap::cuda
