// Grouped product of routed experts for few rows an expert (decode): TMA and mma.sync on Hopper.
//
// Weights stream from memory once, so the work is cut finely: a block multiplies kGroups block rows
// of weights (64 fragment rows each, side by side in memory) with one token tile over all of K,
// then goes on. Four warps a block row, one producer warp with a deep ring. With kGroups = 1 there
// are most blocks, for a step that meets one or two experts; with 4 the tokens are read least
// often. Instructions are what it is bound by next to memory: three quarters of them convert
// weights. At few tokens wgmma with weights from registers spends most of its time on loading them
// (30 cycles of 34 at 8 tokens), so mma.sync is faster; k16 steps in the same order give the same
// bits as grouped_product.cu (a test compares them).
#include <cuda.h>

#include <cstring>
#include <type_traits>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"
#include "extractor/backend/cuda/routed_ffn.h"
#include "extractor/backend/cuda/sm90/pipeline.h"

namespace statetap::cuda {
namespace {

constexpr int kStageBlocks = 2;          // of K, in a stage: a wait is for 128 K
constexpr int kStepBytes = kBlockK * 2;  // of a row of tokens

// Of the products of tiles up to kMaxWidth tokens wide. Several blocks share a multiprocessor, as
// one alone waits for its own loads half of the time.
template <int kMaxWidth>
struct Form {
  static constexpr int kGroups = kMaxWidth == 8 ? 1 : kTileBlocks;
  static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 32;
  static constexpr int kBlocks = kMaxWidth == 8 ? 3 : 2;
  // In memory: stages of tokens, stages of weights, barriers. Bytes of tokens and weights: of a
  // block of K.
  static constexpr int kTokenBytes = kMaxWidth * kStepBytes,
                       kWeightBytes = kGroups * kInt4BlockBytes;
  static constexpr int kStageBytes = kStageBlocks * (kTokenBytes + kWeightBytes);
  static constexpr int kStages = ((kMaxWidth == 8 ? 72 : 111) << 10) / (kStageBytes + 16);
  static constexpr int kWeightsAt = kStages * kStageBlocks * kTokenBytes,
                       kBarriersAt = kStages * kStageBytes, kBytes = kBarriersAt + kStages * 16;
};

struct Place {
  int stage = 0, phase;
  __device__ explicit Place(int first_phase) : phase(first_phase) {}
  template <int kStages>
  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Which tiles pair number i multiplies.
template <int kGroups>
struct Unit {
  static constexpr int kATile = kTileBlocks / kGroups;
  TokenTile tile;
  int weight_tile, block;  // the first of kGroups
  __device__ Unit(const GroupedProductParams& p, int i)
      : tile(p.tiles[i / (p.weight_tiles * kATile)]),
        weight_tile(i / kATile % p.weight_tiles),
        block(i % kATile * kGroups) {}
};

template <typename F>
__device__ void Produce(const GroupedProductParams& p, const Maps& maps, int total,
                        unsigned char* ring) {
  const auto full = [&](int stage) {
    return reinterpret_cast<uint64_t*>(ring + F::kBarriersAt) + stage;
  };
  Place place(1);
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    const Unit<F::kGroups> unit(p, i);
    const unsigned char* weights =
        p.weights + unit.tile.slot * p.slot_bytes +
        (static_cast<int64_t>(unit.weight_tile) * p.k_blocks * kTileBlocks + unit.block) *
            kInt4BlockBytes;
    const CUtensorMap* map = &maps.of_width[unit.tile.width / 8 - 1];
    const int bytes = unit.tile.width * kStepBytes + F::kWeightBytes;
    const int first_row = p.from_first_row ? 0 : unit.tile.first_row;
    for (int k = 0; k < p.k_blocks; k += kStageBlocks) {
      const int blocks = min(kStageBlocks, p.k_blocks - k);
      Wait(full(F::kStages + place.stage), place.phase);
      ExpectBytes(full(place.stage), blocks * bytes);
      for (int b = 0; b < blocks; ++b) {
        const int at = place.stage * kStageBlocks + b;
        LoadBytes(ring + F::kWeightsAt + at * F::kWeightBytes,
                  weights + static_cast<int64_t>(k + b) * kTileBlocks * kInt4BlockBytes,
                  F::kWeightBytes, full(place.stage));
        LoadTokens(ring + at * F::kTokenBytes, map, (k + b) * kBlockK, first_row,
                   full(place.stage));
      }
      place.Advance<F::kStages>();
    }
  }
}

// Shared memory by its address.
__device__ __forceinline__ uint32_t LoadWord(uint32_t at) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at));
  return word;
}
__device__ __forceinline__ uint2 LoadWords(uint32_t at) {
  uint2 words;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(at));
  return words;
}

// Operand A of the two k16 steps of half a block.
__device__ __forceinline__ void Convert(uint2 words, uint32_t scales, uint32_t (&to)[2][4]) {
  const uint32_t low = __byte_perm(scales, scales, 0x1010),
                 high = __byte_perm(scales, scales, 0x3232);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t word = i == 0 ? words.x : words.y;
    to[i][0] = Dequantise(word, low);
    to[i][1] = Dequantise(word >> 4, high);
    to[i][2] = Dequantise(word >> 8, low);
    to[i][3] = Dequantise(word >> 12, high);
  }
}

template <Product kProduct, int kWidth, typename F>
__device__ __forceinline__ void Consume(const GroupedProductParams& p, const Unit<F::kGroups>& unit,
                                        uint32_t ring, Place& place) {
  const int group = static_cast<int>(threadIdx.x) / 128,
            thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
  const uint32_t words_at = ring + F::kWeightsAt + group * kInt4BlockBytes + thread * 8,
                 scales_at = words_at + kScalesOffset + thread / 4 * 4 - thread * 8;
  // Four 8 × 8 matrices at once are two n8 tiles of one k16 step, or two steps of one tile.
  const int row = kWidth == 8 ? lane % 8 : lane / 16 * 8 + lane % 8,
            chunk = kWidth == 8 ? lane / 8 : lane / 8 % 2;
  const uint32_t tokens_at = ChunkOf(ring, kStepBytes, row, chunk);
  float acc[kWidth / 8][4] = {};
  const auto multiply_stage = [&](auto blocks) {
    const uint32_t barrier = ring + F::kBarriersAt + place.stage * 8;
    const uint32_t weights = place.stage * (kStageBlocks * F::kWeightBytes),
                   tokens = tokens_at + place.stage * (kStageBlocks * F::kTokenBytes);
    Wait(barrier, place.phase);
#pragma unroll
    for (int half = 0; half < 2 * blocks(); ++half) {
      const uint32_t of_block = weights + half / 2 * F::kWeightBytes;
      const uint2 words = LoadWords(words_at + of_block + half % 2 * (kScalesOffset / 2));
      const uint32_t scales = LoadWord(scales_at + of_block + half % 2 * 128);
      uint32_t fragments[2][4];
      Convert(words, scales, fragments);
      const uint32_t of_half = (tokens ^ half % 2 * 64) + half / 2 * F::kTokenBytes;
      if constexpr (kWidth == 8) {
        uint32_t x[4];
        LoadMatrices(x, of_half);
        Mma(acc[0], fragments[0], x[0], x[1]);
        Mma(acc[0], fragments[1], x[2], x[3]);
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t x[4];
          LoadMatrices(x, of_half ^ step * 32);
          Mma(acc[0], fragments[step], x[0], x[1]);
          Mma(acc[1], fragments[step], x[2], x[3]);
        }
      }
    }
    __syncwarp();  // all lanes have read the stage
    if (lane == 0) Arrive(barrier + F::kStages * 8);
    place.Advance<F::kStages>();
  };
  for (int k = 0; k + kStageBlocks <= p.k_blocks; k += kStageBlocks)
    multiply_stage(std::integral_constant<int, kStageBlocks>());
  if (p.k_blocks % kStageBlocks != 0) multiply_stage(std::integral_constant<int, 1>());

  const int block = unit.block + group, quad = lane / 4, pair = block / 2, odd = block % 2;
  const int column =
      kProduct == Product::kGateUp
          ? unit.weight_tile * kTileColumnsOfH + pair * 64 + warp * 16 + quad * 2 + odd
          : unit.weight_tile * kTileColumnsOfY + pair * 128 + warp * 32 + quad * 4 + odd * 2;
  if (column >= p.out_columns) return;
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int of_tile = j * 8 + lane % 4 * 2 + c;
      if (of_tile >= unit.tile.rows) continue;
      bf16* out = p.out + (unit.tile.first_row + of_tile) * p.out_stride + column;
      const float low = acc[j][c], high = acc[j][2 + c];
      if constexpr (kProduct == Product::kGateUp) {
        *out = __float2bfloat16_rn(Silu(low) * high);
      } else {
        *reinterpret_cast<uint32_t*>(out) = Pack(low, high);
      }
    }
  }
}

template <Product kProduct, int kMaxWidth, typename F = Form<kMaxWidth>>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks)
    FewRowsKernel(const __grid_constant__ Maps maps, const GroupedProductParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  LetNextBegin();
  if (threadIdx.x == 0) {
    auto* barriers = reinterpret_cast<uint64_t*>(shared + F::kBarriersAt);
    for (int stage = 0; stage < F::kStages; ++stage) {
      InitBarrier(barriers + stage, 1);
      InitBarrier(barriers + F::kStages + stage, F::kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  WaitForEarlier();
  const int total = *p.num_tiles * p.weight_tiles * Unit<F::kGroups>::kATile;
  if (threadIdx.x >= F::kConsumers) {
    if (threadIdx.x == F::kConsumers) Produce<F>(p, maps, total, shared);
    return;
  }
  const uint32_t ring = SharedAddress(shared);
  Place place(0);
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    const Unit<F::kGroups> unit(p, i);
    // A tile may be narrower than the launch allows for.
    if constexpr (kMaxWidth > 8) {
      if (unit.tile.width > 8) {
        Consume<kProduct, 16, F>(p, unit, ring, place);
        continue;
      }
    }
    Consume<kProduct, 8, F>(p, unit, ring, place);
  }
}

template <Product kProduct, int kMaxWidth>
void Launch(const GroupedProductParams& p, const Maps& maps, cudaStream_t stream) {
  using F = Form<kMaxWidth>;
  auto* kernel = FewRowsKernel<kProduct, kMaxWidth>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, F::kBytes));
  LaunchEarly(kernel, dim3(F::kBlocks * static_cast<unsigned>(Processors())), F::kThreads,
              F::kBytes, stream, maps, p);
}

template <Product kProduct>
void LaunchWidth(const GroupedProductParams& p, const Maps& maps, int tile_rows,
                 cudaStream_t stream) {
  return tile_rows == 8 ? Launch<kProduct, 8>(p, maps, stream)
                        : Launch<kProduct, kFewRows>(p, maps, stream);
}

}  // namespace

void FewRowsProduct(const GroupedProductParams& p, const RowMaps& row_maps, Product product,
                    int tile_rows, cudaStream_t stream) {
  Maps maps;
  std::memcpy(&maps, row_maps.maps, sizeof(maps));
  return product == Product::kGateUp ? LaunchWidth<Product::kGateUp>(p, maps, tile_rows, stream)
                                     : LaunchWidth<Product::kDown>(p, maps, tile_rows, stream);
}

}  // namespace statetap::cuda
