// Grouped product of routed experts for few rows an expert (decode): TMA and mma.sync on Hopper.
//
// Weights stream from memory once, so the work is cut finely: a block multiplies kGroups block rows
// of weights (64 fragment rows each, side by side in memory) with one token tile over all of K,
// then goes on. Four warps a block row, one producer warp with a deep ring. With kGroups = 1 there
// are most blocks, for a step that meets one or two experts; with 4 the tokens are read least
// often. At few tokens wgmma with weights from registers spends most of its time on loading them
// (30 cycles of 34 at 8 tokens), so mma.sync is faster; k16 steps in the same order give the same
// bits as grouped_product.cu (a test compares them).
#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"
#include "extractor/backend/cuda/routed_ffn.h"
#include "extractor/backend/cuda/sm90/pipeline.h"

namespace statetap::cuda {
namespace {

template <int kGroups>
constexpr int kThreads = kGroups * 128 + 32;
constexpr int kMaxStages = 24;
constexpr int kBarrierBytes = 2 * kMaxStages * 8;
// Blocks that share a multiprocessor, and what each has for its ring.
template <int kGroups>
constexpr int kBlocks = kGroups == 1 ? 3 : 1;
template <int kGroups>
constexpr int kRingBytes = kGroups == 1 ? 72 << 10 : 200 << 10;

struct Ring {
  unsigned char* memory;
  int stages, token_bytes, weight_bytes;
  __device__ unsigned char* tokens(int stage) const { return memory + stage * token_bytes; }
  __device__ unsigned char* weights(int stage) const {
    return memory + stages * token_bytes + stage * weight_bytes;
  }
  __device__ uint64_t* full(int stage) const {
    return reinterpret_cast<uint64_t*>(memory + stages * (token_bytes + weight_bytes)) + stage;
  }
  __device__ uint64_t* empty(int stage) const { return full(stages + stage); }
};

struct Place {
  int stage = 0, phase;
  __device__ explicit Place(int first_phase) : phase(first_phase) {}
  __device__ void Advance(int stages) {
    if (++stage == stages) {
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

template <int kGroups>
__device__ void Produce(const GroupedProductParams& p, const Maps& maps, int total,
                        const Ring& ring) {
  Place place(1);
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    const Unit<kGroups> unit(p, i);
    const unsigned char* weights =
        p.weights + unit.tile.slot * p.slot_bytes +
        (static_cast<int64_t>(unit.weight_tile) * p.k_blocks * kTileBlocks + unit.block) *
            kInt4BlockBytes;
    const CUtensorMap* map = &maps.of_width[unit.tile.width / 8 - 1];
    const int bytes = unit.tile.width * kBlockK * 2 + ring.weight_bytes;
    const int first_row = p.from_first_row ? 0 : unit.tile.first_row;
    for (int k = 0; k < p.k_blocks; ++k) {
      uint64_t* full = ring.full(place.stage);
      Wait(ring.empty(place.stage), place.phase);
      ExpectBytes(full, bytes);
      LoadBytes(ring.weights(place.stage),
                weights + static_cast<int64_t>(k) * kTileBlocks * kInt4BlockBytes,
                ring.weight_bytes, full);
      LoadTokens(ring.tokens(place.stage), map, k * kBlockK, first_row, full);
      place.Advance(ring.stages);
    }
  }
}

// Operand A of the four k16 steps of a block.
__device__ __forceinline__ void Convert(const unsigned char* block, int thread,
                                        uint32_t (&fragments)[4][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint2 words = *reinterpret_cast<const uint2*>(block + half * 1024 + thread * 8);
    const uint32_t scales =
        *reinterpret_cast<const uint32_t*>(block + kScalesOffset + half * 128 + thread / 4 * 4);
    const uint32_t low = __byte_perm(scales, scales, 0x1010),
                   high = __byte_perm(scales, scales, 0x3232);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = i == 0 ? words.x : words.y;
      uint32_t(&to)[4] = fragments[half * 2 + i];
      to[0] = Dequantise(word, low);
      to[1] = Dequantise(word >> 4, high);
      to[2] = Dequantise(word >> 8, low);
      to[3] = Dequantise(word >> 12, high);
    }
  }
}

// Operand B from a tile of tokens as TMA lays it down: rows of 128 bytes, chunks of 16 exchanged by
// the row's last three bits. Two n8 tiles of one k16 step, or two steps of one tile.
__device__ __forceinline__ void LoadTokenFragments(uint32_t (&to)[4], const unsigned char* tokens,
                                                   int row, int chunk) {
  LoadMatrices(to, tokens + row * 128 + (chunk ^ (row & 7)) * 16);
}

template <Product kProduct, int kWidth, int kGroups>
__device__ __forceinline__ void Consume(const GroupedProductParams& p, const Unit<kGroups>& unit,
                                        const Ring& ring, Place& place) {
  const int group = static_cast<int>(threadIdx.x) / 128,
            thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
  float acc[kWidth / 8][4] = {};
  for (int k = 0; k < p.k_blocks; ++k) {
    Wait(ring.full(place.stage), place.phase);
    uint32_t fragments[4][4];
    Convert(ring.weights(place.stage) + group * kInt4BlockBytes, thread, fragments);
    const unsigned char* tokens = ring.tokens(place.stage);
    if constexpr (kWidth == 8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t b[4];
        LoadTokenFragments(b, tokens, lane % 8, half * 4 + lane / 8);
        Mma(acc[0], fragments[half * 2], b[0], b[1]);
        Mma(acc[0], fragments[half * 2 + 1], b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int n = 0; n < kWidth / 16; ++n) {
          uint32_t b[4];
          LoadTokenFragments(b, tokens, n * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2);
          Mma(acc[2 * n], fragments[step], b[0], b[1]);
          Mma(acc[2 * n + 1], fragments[step], b[2], b[3]);
        }
      }
    }
    __syncwarp();  // all lanes have read the stage
    if (lane == 0) Arrive(ring.empty(place.stage));
    place.Advance(ring.stages);
  }

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
      const int row = j * 8 + lane % 4 * 2 + c;
      if (row >= unit.tile.rows) continue;
      bf16* out = p.out + (unit.tile.first_row + row) * p.out_stride + column;
      const float low = acc[j][c], high = acc[j][2 + c];
      if constexpr (kProduct == Product::kGateUp) {
        *out = __float2bfloat16_rn(Silu(low) * high);
      } else {
        *reinterpret_cast<uint32_t*>(out) = Pack(low, high);
      }
    }
  }
}

template <Product kProduct, int kMaxWidth, int kGroups>
__global__ void __launch_bounds__(kThreads<kGroups>, kBlocks<kGroups>)
    FewRowsKernel(const __grid_constant__ Maps maps, const GroupedProductParams p, int stages) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring{shared, stages, kMaxWidth * kBlockK * 2, kGroups * kInt4BlockBytes};
  constexpr int kConsumers = kGroups * 128;
  LetNextBegin();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      InitBarrier(ring.full(stage), 1);
      InitBarrier(ring.empty(stage), 4 * kGroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  WaitForEarlier();
  const int total = *p.num_tiles * p.weight_tiles * Unit<kGroups>::kATile;
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) Produce<kGroups>(p, maps, total, ring);
    return;
  }
  Place place(0);
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    const Unit<kGroups> unit(p, i);
    // A tile may be narrower than the launch allows for.
    if constexpr (kMaxWidth > 16) {
      if (unit.tile.width > 16) {
        Consume<kProduct, 32, kGroups>(p, unit, ring, place);
        continue;
      }
    }
    if constexpr (kMaxWidth > 8) {
      if (unit.tile.width > 8) {
        Consume<kProduct, 16, kGroups>(p, unit, ring, place);
        continue;
      }
    }
    Consume<kProduct, 8, kGroups>(p, unit, ring, place);
  }
}

template <Product kProduct, int kMaxWidth, int kGroups>
void Launch(const GroupedProductParams& p, const Maps& maps, cudaStream_t stream) {
  constexpr int kStageBytes = kMaxWidth * kBlockK * 2 + kGroups * kInt4BlockBytes;
  constexpr int kStages = std::min(kMaxStages, (kRingBytes<kGroups> - kBarrierBytes) / kStageBytes);
  constexpr int kBytes = kStages * kStageBytes + 2 * kStages * 8;
  auto* kernel = FewRowsKernel<kProduct, kMaxWidth, kGroups>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  LaunchEarly(kernel, dim3(kBlocks<kGroups> * static_cast<unsigned>(Processors())),
              kThreads<kGroups>, kBytes, stream, maps, p, kStages);
}

template <Product kProduct>
void LaunchWidth(const GroupedProductParams& p, const Maps& maps, int tile_rows,
                 cudaStream_t stream) {
  if (tile_rows == 8) return Launch<kProduct, 8, 1>(p, maps, stream);
  if (tile_rows == 16) return Launch<kProduct, 16, 4>(p, maps, stream);
  return Launch<kProduct, 32, 4>(p, maps, stream);
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
