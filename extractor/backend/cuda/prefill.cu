#include "extractor/backend/cuda/prefill.h"

#include <algorithm>
#include <tuple>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"
#include "extractor/backend/step_plan.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kKeys = 64;       // of a step of the loop
constexpr int kQueryDim = 192;  // nope + rope, zero behind the real ones
constexpr int kValueDim = 128;
constexpr int kKeyStride = kQueryDim + 8, kValueStride = kValueDim + 8;  // in shared memory
constexpr int kStageValues = kKeys * (kKeyStride + kValueStride);
constexpr int kSharedBytes = 2 * kStageValues * 2;
static_assert(kPromptTileTokens * kKeyStride <= 2 * kStageValues,
              "queries pass through the stages");

__device__ bool IsFinite(uint4 values) {
  bool finite = true;
  for (const uint32_t pair : {values.x, values.y, values.z, values.w})
    finite = finite && (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
  return finite;
}

// One block a run, a warp a key.
__global__ void CollectKernel(const CollectKeysParams p) {
  LetNextBegin();
  WaitForEarlier();
  const KeyRun run = p.runs[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x) % 32, pieces = p.latent_dim / 8;
  for (int key = static_cast<int>(threadIdx.x) / 32; key < run.count; key += kThreads / 32) {
    const int position = run.first_key + key;
    const int page =
        p.page_table[static_cast<int64_t>(run.sequence) * p.pages_per_seq + position / kPageTokens];
    const int64_t row = static_cast<int64_t>(page) * kPageTokens + position % kPageTokens;
    const auto* from = reinterpret_cast<const uint4*>(p.cache + row * p.latent_dim);
    auto* to =
        reinterpret_cast<uint4*>(p.latents + (static_cast<int64_t>(run.row) + key) * p.latent_dim);
    bool finite = true;
    for (int i = lane; i < pieces; i += 32) finite = finite && IsFinite(from[i]);
    const bool bad = __any_sync(0xffffffffu, !finite);
    for (int i = lane; i < pieces; i += 32) {
      const uint32_t fill = i * 8 < p.kv_lora ? 0 : 0x7fff7fffu;  // NaN
      to[i] = bad ? make_uint4(fill, fill, fill, fill) : from[i];
    }
  }
}

// Keys [first, first + kKeys) of a head, and their values, into one stage. Those at or behind `end`
// are zero.
__device__ void LoadKeys(const AttendPromptsParams& p, int64_t key_row, int head, int first,
                         int end, bf16* stage) {
  const int64_t expanded_dim = p.nope + p.v, latent_dim = p.kv_lora + p.rope;
  bf16* values = stage + kKeys * kKeyStride;
  for (int i = threadIdx.x; i < kKeys * (kQueryDim / 8); i += kThreads) {
    const int key = i / (kQueryDim / 8), column = i % (kQueryDim / 8) * 8;
    const int64_t row = key_row + first + key;
    const bool real = first + key < end && column < p.nope + p.rope;
    const bf16* from = p.expanded;
    if (real) {
      from = column < p.nope ? p.expanded + (row * p.num_heads + head) * expanded_dim + column
                             : p.latents + row * latent_dim + p.kv_lora + column - p.nope;
    }
    CopyAsync(stage + key * kKeyStride + column, from, real ? 16 : 0);
  }
  for (int i = threadIdx.x; i < kKeys * (kValueDim / 8); i += kThreads) {
    const int key = i / (kValueDim / 8), column = i % (kValueDim / 8) * 8;
    const int64_t row = key_row + first + key;
    const bool real = first + key < end && column < p.v;
    CopyAsync(values + key * kValueStride + column,
              real ? p.expanded + (row * p.num_heads + head) * expanded_dim + p.nope + column
                   : p.expanded,
              real ? 16 : 0);
  }
  CommitCopies();
}

// grid: (tile, head). A warp has 16 query rows, in registers for the whole loop; keys and values
// pass through two stages, the next one loading while this one is multiplied.
__global__ void __launch_bounds__(kThreads, 1)
    PromptKernel(const AttendPromptsParams p, float scale_log2) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto* memory = reinterpret_cast<bf16*>(shared);
  const PromptTile tile = p.tiles[blockIdx.x];
  const int head = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int query_dim = p.nope + p.rope;

  for (int i = threadIdx.x; i < kPromptTileTokens * (kQueryDim / 8); i += kThreads) {
    const int row = i / (kQueryDim / 8), column = i % (kQueryDim / 8) * 8;
    const bool real = row < tile.count && column < query_dim;
    const bf16* from =
        p.queries +
        ((static_cast<int64_t>(tile.first_token) + row) * p.num_heads + head) * query_dim + column;
    CopyAsync(memory + row * kKeyStride + column, real ? from : p.queries, real ? 16 : 0);
  }
  CommitCopies();
  WaitCopies<0>();
  __syncthreads();
  uint32_t query[kQueryDim / 16][4];
#pragma unroll
  for (int k = 0; k < kQueryDim / 16; ++k)
    LoadMatrices(query[k], memory + (warp * 16 + lane % 16) * kKeyStride + k * 16 + lane / 16 * 8);
  __syncthreads();

  const int end = tile.first_position + tile.count;  // keys that anyone here sees
  const int steps = (end + kKeys - 1) / kKeys;
  const int low = tile.first_position + warp * 16 + lane / 4, high = low + 8;  // positions
  const int warp_last = min(tile.first_position + warp * 16 + 15, end - 1);
  float out[kValueDim / 8][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  LoadKeys(p, tile.key_row, head, 0, end, memory);
  for (int step = 0; step < steps; ++step) {
    WaitCopies<0>();
    __syncthreads();  // this stage is there for all, the other one is free
    const bf16* keys = memory + step % 2 * kStageValues;
    const bf16* values = keys + kKeys * kKeyStride;
    const int first = step * kKeys;
    if (step + 1 < steps)
      LoadKeys(p, tile.key_row, head, first + kKeys, end, memory + (step + 1) % 2 * kStageValues);
    // None of the keys is seen by this warp: its rows would keep every bit.
    if (first > warp_last) continue;

    float score[kKeys / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kQueryDim / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        LoadMatrices(
            b, keys + (n * 16 + lane / 16 * 8 + lane % 8) * kKeyStride + k * 16 + lane / 8 % 2 * 8);
        Mma(score[2 * n], query[k], b[0], b[1]);
        Mma(score[2 * n + 1], query[k], b[2], b[3]);
      }
    }
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + n * 8 + lane % 4 * 2 + i % 2;
        score[n][i] = key <= (i < 2 ? low : high) ? score[n][i] * scale_log2 : -INFINITY;
        largest[i / 2] = fmaxf(largest[i / 2], score[n][i]);
      }
    }
    float factor[2], added[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
      const float now = fmaxf(maximum[half], largest[half]);
      factor[half] = maximum[half] == now ? 1.0f : exp2f(maximum[half] - now);
      maximum[half] = now;
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A masked score is −∞, but so may be the maximum where every score is NaN.
        const bool seen = first + n * 8 + lane % 4 * 2 + i % 2 <= (i < 2 ? low : high);
        score[n][i] = seen ? exp2f(score[n][i] - maximum[i / 2]) : 0.0f;
        added[i / 2] += score[n][i];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      added[half] += __shfl_xor_sync(0xffffffffu, added[half], 1);
      added[half] += __shfl_xor_sync(0xffffffffu, added[half], 2);
      sum[half] = sum[half] * factor[half] + added[half];
    }
#pragma unroll
    for (int n = 0; n < kValueDim / 8; ++n) {
      out[n][0] *= factor[0];
      out[n][1] *= factor[0];
      out[n][2] *= factor[1];
      out[n][3] *= factor[1];
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      // Two score tiles side by side are operand A of 16 keys.
      const uint32_t a[4] = {Pack(score[2 * k][0], score[2 * k][1]),
                             Pack(score[2 * k][2], score[2 * k][3]),
                             Pack(score[2 * k + 1][0], score[2 * k + 1][1]),
                             Pack(score[2 * k + 1][2], score[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kValueDim / 16; ++n) {
        uint32_t b[4];
        LoadMatricesTransposed(
            b, values + (k * 16 + lane % 16) * kValueStride + n * 16 + lane / 16 * 8);
        Mma(out[2 * n], a, b[0], b[1]);
        Mma(out[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + lane / 4 + half * 8;
    if (row >= tile.count) continue;
    bf16* to = p.out + ((static_cast<int64_t>(tile.first_token) + row) * p.num_heads + head) * p.v;
#pragma unroll
    for (int n = 0; n < kValueDim / 8; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      if (column < p.v) {
        *reinterpret_cast<uint32_t*>(to + column) =
            Pack(out[n][half * 2] / sum[half], out[n][half * 2 + 1] / sum[half]);
      }
    }
  }
}

}  // namespace

bool Expandable(int nope, int rope, int v, int kv_lora) {
  return nope % 8 == 0 && rope % 8 == 0 && v % 8 == 0 && kv_lora % 8 == 0 && rope > 0 &&
         nope + rope <= kQueryDim && v <= kValueDim;
}

void CollectKeys(const CollectKeysParams& p, cudaStream_t stream) {
  if (p.num_runs == 0) return;
  LaunchEarly(CollectKernel, dim3(static_cast<unsigned>(p.num_runs)), kThreads, 0, stream, p);
}

void OrderPromptTiles(std::span<PromptTile> tiles, size_t key_bytes) {
  constexpr size_t kBytesAtOnce = size_t{16} << 20;
  const auto keys = static_cast<int>(std::max<size_t>(1, kBytesAtOnce / key_bytes));
  std::stable_sort(tiles.begin(), tiles.end(), [&](const PromptTile& a, const PromptTile& b) {
    return std::tuple(a.key_row / keys, -(a.first_position + a.count)) <
           std::tuple(b.key_row / keys, -(b.first_position + b.count));
  });
}

void AttendPrompts(const AttendPromptsParams& p, cudaStream_t stream) {
  if (p.num_tiles == 0) return;
  Check(cudaFuncSetAttribute(PromptKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSharedBytes));
  const dim3 grid(static_cast<unsigned>(p.num_tiles), static_cast<unsigned>(p.num_heads));
  constexpr float kLog2E = 1.44269504088896341f;  // exp(x) = 2^(x · log2 e)
  PromptKernel<<<grid, kThreads, kSharedBytes, stream>>>(p, p.scale * kLog2E);
  CheckLaunch();
}

}  // namespace statetap::cuda
