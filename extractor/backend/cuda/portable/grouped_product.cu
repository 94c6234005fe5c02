// Grouped product of routed experts by mma.sync and cp.async: sm_80 and later.
//
// A block multiplies one weight tile (256 fragment rows) with one token tile, over all of K.
// Weights are operand A: they go from shared memory to registers in fragment order and are
// dequantised there, so tokens are the columns of the result. Eight warps: warp w of pair w / 4
// holds fragment rows of two blocks, so that SwiGLU and the stores need no other thread's values.
// The grid is one wave of blocks that walk (token tile, weight tile): how many there are is known
// on the device only.
#include <algorithm>
#include <cassert>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/mma.h"
#include "extractor/backend/cuda/routed_ffn.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokenStride = kBlockK + 8;  // values of a token's row in shared memory

template <Format kFormat>
constexpr int kBlockBytes = kFormat == Format::kInt4 ? kInt4BlockBytes : kBf16BlockBytes;

// What fits in 99 KB: the bf16 blocks are four times as large.
template <Format kFormat>
constexpr int kStages = kFormat == Format::kInt4 ? 3 : 2;

template <Format kFormat, int kRows>
constexpr int kStageBytes = kTileBlocks* kBlockBytes<kFormat> + kRows* kTokenStride * 2;

// Nibbles 0 and 4 of `word` as two bf16: (n − 8) · scale, rounded once, as the CPU does.
__device__ uint32_t Dequantise(uint32_t word, uint32_t scale_twice) {
  uint32_t biased, value, scaled;
  // 0x4300 is 128 in bf16; a nibble in its low mantissa bits makes 128 + n.
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(biased) : "r"(word));
  // − 136 (0x4308) is exact. fma, not sub and mul, which need sm_90: 1 · x + c and x · s + (−0).
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(value)
      : "r"(biased), "r"(0x3f803f80u), "r"(0xc308c308u));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(scaled)
      : "r"(value), "r"(scale_twice), "r"(0x80008000u));
  return scaled;
}

// Operand A of k16 step `step` of one block for this thread.
template <Format kFormat>
__device__ void LoadWeights(const unsigned char* block, int step, uint32_t (&a)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 128;
  if constexpr (kFormat == Format::kInt4) {
    const auto word =
        *reinterpret_cast<const uint32_t*>(block + step / 2 * 1024 + lane * 8 + step % 2 * 4);
    const auto scales =
        *reinterpret_cast<const uint32_t*>(block + kScalesOffset + step / 2 * 128 + lane / 4 * 4);
    const uint32_t low = __byte_perm(scales, scales, 0x1010),
                   high = __byte_perm(scales, scales, 0x3232);
    a[0] = Dequantise(word, low);
    a[1] = Dequantise(word >> 4, high);
    a[2] = Dequantise(word >> 8, low);
    a[3] = Dequantise(word >> 12, high);
  } else {
    const uint4 bits = *reinterpret_cast<const uint4*>(block + (step * 128 + lane) * 16);
    a[0] = bits.x;
    a[1] = bits.y;
    a[2] = bits.z;
    a[3] = bits.w;
  }
}

template <Format kFormat, int kRows>
__device__ void LoadStage(const GroupedProductParams& p, const TokenTile& tile,
                          const unsigned char* weights, int k_block, unsigned char* stage) {
  constexpr int kWeightBytes = kTileBlocks * kBlockBytes<kFormat>;
  const unsigned char* from = weights + static_cast<int64_t>(k_block) * kWeightBytes;
  for (int i = static_cast<int>(threadIdx.x) * 16; i < kWeightBytes; i += kThreads * 16)
    CopyAsync(stage + i, from + i, 16);
  auto* tokens = reinterpret_cast<bf16*>(stage + kWeightBytes);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * 8; i += kThreads) {
    const int row = i / 8, column = i % 8 * 8, k = k_block * kBlockK + column;
    const bool real = row < tile.rows && k < p.k;
    const int64_t listed = tile.first_row + (real ? row : 0);
    const int64_t x_row = p.row_of_x == nullptr ? listed : p.row_of_x[listed];
    CopyAsync(tokens + row * kTokenStride + column, p.x + x_row * p.x_stride + (real ? k : 0),
              real ? 16 : 0);
  }
  CommitCopies();
}

template <Format kFormat, int kRows>
__device__ void MultiplyStage(const unsigned char* stage, float (&acc)[2][kRows / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, pair = static_cast<int>(threadIdx.x) / 128;
  const unsigned char* blocks = stage + pair * 2 * kBlockBytes<kFormat>;
  const auto* tokens = reinterpret_cast<const bf16*>(stage + kTileBlocks * kBlockBytes<kFormat>);
#pragma unroll
  for (int step = 0; step < kBlockK / 16; ++step) {
    uint32_t a[2][4];
    LoadWeights<kFormat>(blocks, step, a[0]);
    LoadWeights<kFormat>(blocks + kBlockBytes<kFormat>, step, a[1]);
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      uint32_t b[4];
      LoadMatrices(b, tokens + (n * 16 + lane / 16 * 8 + lane % 8) * kTokenStride + step * 16 +
                          lane / 8 % 2 * 8);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        Mma(acc[block][2 * n], a[block], b[0], b[1]);
        Mma(acc[block][2 * n + 1], a[block], b[2], b[3]);
      }
    }
  }
}

template <Product kProduct, int kRows>
__device__ void StoreTile(const GroupedProductParams& p, const TokenTile& tile, int weight_tile,
                          const float (&acc)[2][kRows / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, quad = lane / 4,
            warp = static_cast<int>(threadIdx.x) % 128 / 32,
            pair = static_cast<int>(threadIdx.x) / 128;
  const int column = kProduct == Product::kGateUp
                         ? weight_tile * kTileColumnsOfH + pair * 64 + warp * 16 + quad * 2
                         : weight_tile * kTileColumnsOfY + pair * 128 + warp * 32 + quad * 4;
  if (column >= p.out_columns) return;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = j * 8 + lane % 4 * 2 + c;
      if (row >= tile.rows) continue;
      bf16* out = p.out + (tile.first_row + row) * p.out_stride + column;
      const float v0 = acc[0][j][c], v1 = acc[0][j][2 + c], v2 = acc[1][j][c],
                  v3 = acc[1][j][2 + c];
      if constexpr (kProduct == Product::kGateUp) {
        *reinterpret_cast<uint32_t*>(out) = Pack(ExactSilu(v0) * v1, ExactSilu(v2) * v3);
      } else {
        *reinterpret_cast<uint2*>(out) = {Pack(v0, v1), Pack(v2, v3)};
      }
    }
  }
}

template <Product kProduct, Format kFormat, int kRows>
__global__ void __launch_bounds__(kThreads) GroupedKernel(const GroupedProductParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kBytes = kStageBytes<kFormat, kRows>, kAhead = kStages<kFormat> - 1;
  const int total = *p.num_tiles * p.weight_tiles;
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    const TokenTile tile = p.tiles[i / p.weight_tiles];
    const int weight_tile = i % p.weight_tiles;
    const unsigned char* weights =
        p.weights + tile.slot * p.slot_bytes +
        static_cast<int64_t>(weight_tile) * p.k_blocks * kTileBlocks * kBlockBytes<kFormat>;
    float acc[2][kRows / 8][4] = {};
    __syncthreads();  // all are done with the last tile's stages
    for (int k = 0; k < kAhead; ++k) {
      if (k < p.k_blocks) {
        LoadStage<kFormat, kRows>(p, tile, weights, k, shared + k * kBytes);
      } else {
        CommitCopies();
      }
    }
    for (int k = 0; k < p.k_blocks; ++k) {
      WaitCopies<kAhead - 1>();
      __syncthreads();  // stage k is there for all, and stage k − 1 is free
      const int next = k + kAhead;
      if (next < p.k_blocks) {
        LoadStage<kFormat, kRows>(p, tile, weights, next, shared + next % (kAhead + 1) * kBytes);
      } else {
        CommitCopies();
      }
      MultiplyStage<kFormat, kRows>(shared + k % (kAhead + 1) * kBytes, acc);
    }
    StoreTile<kProduct, kRows>(p, tile, weight_tile, acc);
  }
}

template <Product kProduct, Format kFormat, int kRows>
void Launch(const GroupedProductParams& p, cudaStream_t stream) {
  constexpr int kBytes = kStages<kFormat> * kStageBytes<kFormat, kRows>;
  auto* kernel = GroupedKernel<kProduct, kFormat, kRows>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  int blocks;
  Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, kBytes));
  if (blocks == 0) {
    Fail("the grouped product needs " + std::to_string(kBytes) + " bytes of shared memory");
  }
  kernel<<<static_cast<unsigned>(Processors() * blocks), kThreads, kBytes, stream>>>(p);
  CheckLaunch();
}

template <Product kProduct, Format kFormat>
void LaunchRows(const GroupedProductParams& p, int tile_rows, cudaStream_t stream) {
  if (tile_rows == 16) return Launch<kProduct, kFormat, 16>(p, stream);
  if (tile_rows == 32) return Launch<kProduct, kFormat, 32>(p, stream);
  if (tile_rows == 64) return Launch<kProduct, kFormat, 64>(p, stream);
  if constexpr (kFormat == Format::kInt4) return Launch<kProduct, kFormat, 128>(p, stream);
  assert(false);
}

}  // namespace

void GroupedProduct(const GroupedProductParams& p, Product product, Format format, int tile_rows,
                    cudaStream_t stream) {
  if (product == Product::kGateUp) {
    return format == Format::kInt4
               ? LaunchRows<Product::kGateUp, Format::kInt4>(p, tile_rows, stream)
               : LaunchRows<Product::kGateUp, Format::kBf16>(p, tile_rows, stream);
  }
  return format == Format::kInt4 ? LaunchRows<Product::kDown, Format::kInt4>(p, tile_rows, stream)
                                 : LaunchRows<Product::kDown, Format::kBf16>(p, tile_rows, stream);
}

}  // namespace statetap::cuda
