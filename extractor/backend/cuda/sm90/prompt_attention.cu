// Attention of prompts in the expanded form by wgmma and TMA: sm_90a, heads of 192 and 128.
//
// The grid is one block a multiprocessor; a block takes the next pair (tile of 128 tokens, head) of
// the list when it has done one, so that what runs at a time lies near in the list and shares keys.
// Warp 8 is the producer: queries once a pair, then 128 keys and their values at a time into a ring
// of two stages. Two consumer warpgroups hold 64 query rows each: the products of the next keys are
// computed while the values of the last ones are added up, the first product of the next pair while
// this one's rows are written, and the softmax of one warpgroup runs under the products of the
// other.
#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/prefill.h"
#include "extractor/backend/cuda/sm90/pipeline.h"
#include "extractor/backend/cuda/sm90/tensor_map.h"
#include "extractor/backend/cuda/sm90/wgmma.h"

namespace statetap::cuda {
namespace {

constexpr int kNope = 128, kRope = 64, kQueryDim = kNope + kRope, kValueDim = 128;
constexpr int kKeys = 128;  // of a step of the loop
constexpr int kStages = 2;
constexpr int kChunk = kMapColumns;            // memory holds [chunk][row][kChunk]
constexpr int kChunkBytes = 128 * kChunk * 2;  // of 128 rows
constexpr int kQueryBytes = kQueryDim / kChunk * kChunkBytes, kKeyBytes = kQueryBytes,
              kValueBytes = kValueDim / kChunk * kChunkBytes;
constexpr int kBarriers = 2 + 4 * kStages;
constexpr int kSharedBytes = kQueryBytes + kStages * (kKeyBytes + kValueBytes) + kBarriers * 8 + 16;
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
static_assert(RegistersSuffice(1, kConsumers, kConsumerRegisters, 128, kProducerRegisters));
static_assert(kPromptTileTokens == 128 && kKeys == 128, "a box has 128 rows");

struct Maps3 {
  CUtensorMap queries, expanded, latents;
};

struct Memory {
  unsigned char* base;
  __device__ unsigned char* queries() const { return base; }
  __device__ unsigned char* keys(int stage) const { return base + kQueryBytes + stage * kKeyBytes; }
  __device__ unsigned char* values(int stage) const {
    return base + kQueryBytes + kStages * kKeyBytes + stage * kValueBytes;
  }
  __device__ uint64_t* barrier(int i) const {
    return reinterpret_cast<uint64_t*>(base + kQueryBytes + kStages * (kKeyBytes + kValueBytes)) +
           i;
  }
  // Whose queries these are: −1 when no pair is left.
  __device__ int* pair() const { return reinterpret_cast<int*>(barrier(kBarriers)); }
  __device__ uint64_t* full_queries() const { return barrier(0); }
  __device__ uint64_t* empty_queries() const { return barrier(1); }
  __device__ uint64_t* full_keys(int stage) const { return barrier(2 + stage); }
  __device__ uint64_t* empty_keys(int stage) const { return barrier(2 + kStages + stage); }
  __device__ uint64_t* full_values(int stage) const { return barrier(2 + 2 * kStages + stage); }
  __device__ uint64_t* empty_values(int stage) const { return barrier(2 + 3 * kStages + stage); }
};

// Step `count` of a ring since the kernel began.
__device__ int StageOf(int count) { return count % kStages; }
__device__ int PhaseOf(int count) { return count / kStages & 1; }

__device__ int StepsOf(const PromptTile& tile) {
  return (tile.first_position + tile.count + kKeys - 1) / kKeys;
}

__device__ void Produce(const AttendPromptsParams& p, const Maps3& maps, const Memory& memory) {
  const int num_pairs = p.num_tiles * p.num_heads, blocks = static_cast<int>(gridDim.x);
  int count = 0, pair = static_cast<int>(blockIdx.x);
  for (int turn = 0; pair < num_pairs; ++turn) {
    const int next = blocks + atomicAdd(&p.taken[0], 1);  // there when it is needed
    const PromptTile tile = p.tiles[pair / p.num_heads];
    const int head = pair % p.num_heads, steps = StepsOf(tile);
    Wait(memory.empty_queries(), (turn & 1) ^ 1);
    *memory.pair() = pair;
    ExpectBytes(memory.full_queries(), kQueryBytes);
    for (int c = 0; c < kQueryDim / kChunk; ++c) {
      LoadTokens(memory.queries() + c * kChunkBytes, &maps.queries, head * kQueryDim + c * kChunk,
                 tile.first_token, memory.full_queries());
    }
    for (int step = 0; step < steps; ++step, ++count) {
      const int stage = StageOf(count), row = tile.key_row + step * kKeys,
                column = head * (kNope + kValueDim);
      uint64_t* keys = memory.full_keys(stage);
      Wait(memory.empty_keys(stage), PhaseOf(count) ^ 1);
      ExpectBytes(keys, kKeyBytes);
      for (int c = 0; c < kNope / kChunk; ++c) {
        LoadTokens(memory.keys(stage) + c * kChunkBytes, &maps.expanded, column + c * kChunk, row,
                   keys);
      }
      LoadTokens(memory.keys(stage) + kNope / kChunk * kChunkBytes, &maps.latents, p.kv_lora, row,
                 keys);
      uint64_t* values = memory.full_values(stage);
      Wait(memory.empty_values(stage), PhaseOf(count) ^ 1);
      ExpectBytes(values, kValueBytes);
      for (int c = 0; c < kValueDim / kChunk; ++c) {
        LoadTokens(memory.values(stage) + c * kChunkBytes, &maps.expanded,
                   column + kNope + c * kChunk, row, values);
      }
    }
    pair = next;
    if (pair < num_pairs) continue;
    Wait(memory.empty_queries(), turn & 1);
    *memory.pair() = -1;
    Arrive(memory.full_queries());
  }
  // The last block leaves the counts as it found them.
  if (atomicAdd(&p.taken[1], 1) == blocks - 1) p.taken[0] = p.taken[1] = 0;
}

// Operand B with rows of N: 64 columns a line, atoms of 8 keys, the other 64 columns a chunk
// behind.
__device__ uint64_t ValueDescriptor(const void* values) {
  return static_cast<uint64_t>((SharedAddress(values) & 0x3ffffu) >> 4) |
         static_cast<uint64_t>(kChunkBytes >> 4) << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}

__device__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr int kFragments = kKeys / 16;

// scores = queries · keysᵀ; begins, and commits one group.
__device__ __forceinline__ void BeginScores(const unsigned char* queries, const unsigned char* keys,
                                            float (&scores)[kKeys / 2]) {
  FenceWgmma();
#pragma unroll
  for (int k = 0; k < kQueryDim / 16; ++k) {
    const int chunk = k / 4 * kChunkBytes, line = k % 4 * 2;
    WgmmaShared<kKeys>::Multiply(scores, TokenDescriptor(queries + chunk) + line,
                                 TokenDescriptor(keys + chunk) + line, k > 0);
  }
  CommitWgmma();
}

// out += weights · values; begins, and commits one group.
__device__ __forceinline__ void BeginValues(const uint32_t (&weights)[kFragments][4],
                                            const unsigned char* values,
                                            float (&out)[kValueDim / 2]) {
  FenceWgmma();
#pragma unroll
  for (int k = 0; k < kFragments; ++k) {
    WgmmaByColumns<kValueDim>::Multiply(out, weights[k],
                                        ValueDescriptor(values) + k * (16 * 128 >> 4));
  }
  CommitWgmma();
}

// The two rows of a thread: their largest score so far (in the scale of 2^x), the sum of their
// weights, this thread's columns only.
struct Rows {
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

// Scores to weights. factor: what the sums so far are worth now.
__device__ __forceinline__ void Softmax(float (&scores)[kKeys / 2], int first_key,
                                        const int (&positions)[2], bool masked, float scale_log2,
                                        Rows& rows, float (&factor)[2]) {
  if (masked) {
    const int column = first_key + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (column + i / 4 * 8 + i % 2 > positions[i % 4 / 2]) scores[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = scores[half * 2];
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i)
      largest = fmaxf(largest, fmaxf(scores[4 * i + half * 2], scores[4 * i + half * 2 + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    largest = fmaxf(rows.largest[half], largest * scale_log2);
    factor[half] = Exp2(rows.largest[half] - largest);
    rows.largest[half] = largest;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[4 * i + half * 2 + c];
        score = Exp2(fmaf(score, scale_log2, -largest));
        sum += score;
      }
    }
    rows.sum[half] = rows.sum[half] * factor[half] + sum;
  }
}

__device__ __forceinline__ void PackWeights(const float (&scores)[kKeys / 2],
                                            uint32_t (&weights)[kFragments][4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i)
    weights[i / 4][i % 4] = Pack(scores[2 * i], scores[2 * i + 1]);
}

// A thread's part of rows `row` and `row` + 8 of the tile.
__device__ __forceinline__ void WriteRows(const AttendPromptsParams& p, const PromptTile& tile,
                                          int head, int row, const Rows& rows,
                                          const float (&out)[kValueDim / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (row + half * 8 >= tile.count) continue;
    const float scale = 1 / sum;
    bf16* to = p.out +
               ((static_cast<int64_t>(tile.first_token) + row + half * 8) * p.num_heads + head) *
                   kValueDim +
               lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kValueDim / 8; ++i) {
      *reinterpret_cast<uint32_t*>(to + i * 8) =
          Pack(out[4 * i + half * 2] * scale, out[4 * i + half * 2 + 1] * scale);
    }
  }
}

__device__ void Consume(const AttendPromptsParams& p, float scale_log2, const Memory& memory) {
  const int group = static_cast<int>(threadIdx.x) / 128,
            thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int row = group * 64 + thread / 32 * 16 + lane / 4;  // and eight rows on
  const unsigned char* queries = memory.queries() + group * 64 * 128;
  float scores[kKeys / 2] = {}, out[kValueDim / 2];
  uint32_t weights[kFragments][4];
  int count = 0, turn = 0;
  // The next pair, −1 if there is none, and its first product. That is begun in any case, as wgmma
  // in a branch would be waited for at its end.
  const auto begin_pair = [&] {
    Wait(memory.full_queries(), turn & 1);
    ++turn;
    const int pair = *memory.pair();
    if (pair >= 0) Wait(memory.full_keys(StageOf(count)), PhaseOf(count));
    BeginScores(queries, memory.keys(StageOf(count)), scores);
    return pair;
  };
  for (int pair = begin_pair(), next_pair; pair >= 0; pair = next_pair) {
    const PromptTile tile = p.tiles[pair / p.num_heads];
    const int steps = StepsOf(tile);
    const int positions[2] = {tile.first_position + row, tile.first_position + row + 8};
    // Every row of the warpgroup sees the keys in front of this one.
    const int first_masked = tile.first_position + group * 64 + 1;
    float factor[2];
    Rows rows;
    WaitWgmma<0>();
    Settle(scores);
    if (thread == 0) {
      Arrive(memory.empty_keys(StageOf(count)));
      if (steps == 1) Arrive(memory.empty_queries());
    }
    Softmax(scores, 0, positions, kKeys > first_masked, scale_log2, rows, factor);
    PackWeights(scores, weights);
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) out[i] = 0;
    for (int step = 1; step < steps; ++step, ++count) {
      const int stage = StageOf(count), next = StageOf(count + 1);
      Wait(memory.full_keys(next), PhaseOf(count + 1));
      BeginScores(queries, memory.keys(next), scores);
      Wait(memory.full_values(stage), PhaseOf(count));
      BeginValues(weights, memory.values(stage), out);
      WaitWgmma<1>();
      Settle(scores);
      if (thread == 0) {
        Arrive(memory.empty_keys(next));
        if (step == steps - 1) Arrive(memory.empty_queries());
      }
      Softmax(scores, step * kKeys, positions, (step + 1) * kKeys > first_masked, scale_log2, rows,
              factor);
      WaitWgmma<0>();
      Settle(out);
      if (thread == 0) Arrive(memory.empty_values(stage));
#pragma unroll
      for (int i = 0; i < kValueDim / 2; ++i) out[i] *= factor[i % 4 / 2];
      PackWeights(scores, weights);
    }
    Wait(memory.full_values(StageOf(count)), PhaseOf(count));
    BeginValues(weights, memory.values(StageOf(count)), out);
    WaitWgmma<0>();
    Settle(out);
    if (thread == 0) Arrive(memory.empty_values(StageOf(count)));
    ++count;
    next_pair = begin_pair();
    WriteRows(p, tile, pair % p.num_heads, row, rows, out);
  }
  WaitWgmma<0>();
}

__global__ void __launch_bounds__(kThreads, 1)
    HopperPromptKernel(const __grid_constant__ Maps3 maps, const AttendPromptsParams p,
                       float scale_log2) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory memory{shared};
  if (threadIdx.x == 0) {
    InitBarrier(memory.full_queries(), 1);
    InitBarrier(memory.empty_queries(), 2);
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(memory.full_keys(stage), 1);
      InitBarrier(memory.full_values(stage), 1);
      InitBarrier(memory.empty_keys(stage), 2);
      InitBarrier(memory.empty_values(stage), 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x == kConsumers) Produce(p, maps, memory);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    Consume(p, scale_log2, memory);
  }
}

}  // namespace

bool HopperPromptsTake(int nope, int rope, int v) {
  return nope == kNope && rope == kRope && v == kValueDim;
}

PromptMaps MakePromptMaps(const AttendPromptsParams& p, int64_t num_tokens, int64_t num_keys) {
  const int64_t heads = p.num_heads;
  const Maps3 maps{MakeTensorMap(p.queries, num_tokens, heads * kQueryDim, kPromptTileTokens),
                   MakeTensorMap(p.expanded, num_keys, heads * (kNope + kValueDim), kKeys),
                   MakeTensorMap(p.latents, num_keys, p.kv_lora + kRope, kKeys)};
  PromptMaps result;
  static_assert(sizeof(maps) == sizeof(result.maps));
  std::memcpy(result.maps, &maps, sizeof(maps));
  return result;
}

void HopperAttendPrompts(const AttendPromptsParams& p, const PromptMaps& prompt_maps,
                         cudaStream_t stream) {
  if (p.num_tiles == 0) return;
  Maps3 maps;
  std::memcpy(&maps, prompt_maps.maps, sizeof(maps));
  Check(cudaFuncSetAttribute(HopperPromptKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSharedBytes));
  const int blocks = std::min(Processors(), p.num_tiles * p.num_heads);
  constexpr float kLog2E = 1.44269504088896341f;  // exp(x) = 2^(x · log2 e)
  HopperPromptKernel<<<static_cast<unsigned>(blocks), kThreads, kSharedBytes, stream>>>(
      maps, p, p.scale * kLog2E);
  CheckLaunch();
}

}  // namespace statetap::cuda
