// Grouped product of routed experts by wgmma and TMA: sm_90a.
//
// A block multiplies one weight tile (256 fragment rows) with one token tile over all of K, then
// goes on to the next pair; the grid is one block a multiprocessor, or two where tiles are narrow
// and the weights' way through the registers takes longer than the products. Where the last round
// of pairs would leave half of the blocks or more without work, its pairs are cut along their
// tokens. Warp 8 is the producer: it keeps a ring of kStages K steps filled, weights by bulk copies
// and tokens by TMA (128-byte swizzle). Two consumer warpgroups hold 128 fragment rows each:
// weights go from shared memory to registers, are dequantised there and are wgmma's operand A,
// tokens are its N. One wgmma is in flight while the next fragment is converted.
//
// Token tiles come in falling width, and the consumers run one loop a width, one after the other: a
// switch over widths inside one loop makes ptxas keep every width's accumulators alive and
// serialise the wgmmas.
#include <cuda.h>

#include <cstring>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/routed_ffn.h"
#include "extractor/backend/cuda/sm90/pipeline.h"
#include "extractor/backend/cuda/sm90/tensor_map.h"
#include "extractor/backend/cuda/sm90/wgmma.h"

namespace statetap::cuda {
namespace {

constexpr int kStages = 6;
constexpr int kWeightBytes = kTileBlocks * kInt4BlockBytes;
constexpr int kBarrierBytes = 2 * kStages * 8;
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
constexpr int kProducerRegisters = 24;

// kRows: of the widest tile. kBlocks: of a multiprocessor, kRegisters: of a consumer's thread.
// Together(width): how many wgmmas are begun together, under which as many fragments are converted.
// The more the better they hide each other; registers for the fragments are what the accumulators
// of a width up to kFour or kTwo leave.
template <int kMostRows, int kBlocksAProcessor, int kConsumerRegisters, int kFour, int kTwo>
struct Form {
  static constexpr int kRows = kMostRows, kBlocks = kBlocksAProcessor,
                       kRegisters = kConsumerRegisters;
  static constexpr int kTokenBytes = kRows * kBlockK * 2;  // multiples of 1,024: swizzle atoms
  static constexpr int kSharedBytes = kStages * (kTokenBytes + kWeightBytes) + kBarrierBytes;
  static constexpr int Together(int width) { return width <= kFour ? 4 : width <= kTwo ? 2 : 1; }
  static_assert(kTokenBytes % 1024 == 0 && kWeightBytes % 16 == 0);
  static_assert(RegistersSuffice(kBlocks, kConsumers, kRegisters, 128, kProducerRegisters));
};
using Wide = Form<kHopperTileRows, 1, 240, 144, 176>;
using Narrow = Form<kHopperNarrowRows, 2, 104, 32, 48>;

// Where a thread is in the ring.
struct Place {
  int stage = 0, phase;
  __device__ explicit Place(int first_phase) : phase(first_phase) {}
  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ int before() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

template <int kTokenBytes>
struct Ring {
  unsigned char* memory;
  __device__ unsigned char* tokens(int stage) const { return memory + stage * kTokenBytes; }
  __device__ unsigned char* weights(int stage) const {
    return memory + kStages * kTokenBytes + stage * kWeightBytes;
  }
  __device__ uint64_t* full(int stage) const {
    return reinterpret_cast<uint64_t*>(memory + kStages * (kTokenBytes + kWeightBytes)) + stage;
  }
  __device__ uint64_t* empty(int stage) const { return full(kStages + stage); }
};

// What there is to multiply: pairs of a token tile and a weight tile, the last ones in parts.
struct Work {
  static constexpr int kMostParts = 4;
  int weight_tiles, first, whole, parts, total;
  const TokenTile* tiles;
  __device__ explicit Work(const GroupedProductParams& p)
      : weight_tiles(p.weight_tiles), parts(1), tiles(p.tiles) {
    const int all = *p.num_tiles * p.weight_tiles, blocks = static_cast<int>(gridDim.x);
    first = Until(p.from_percent, all, blocks);
    const int pairs = Until(p.to_percent, all, blocks) - first, last = pairs % blocks;
    if (last > 0) parts = min(kMostParts, blocks / last);
    whole = pairs - last;
    total = whole + last * parts;
  }
  // So much of all of them, in whole rounds of blocks.
  __device__ static int Until(int percent, int all, int blocks) {
    return percent == 100 ? all : min(all, (all * percent / 100 + blocks / 2) / blocks * blocks);
  }
  __device__ int PairOf(int i) const {
    return first + (i < whole ? i : whole + (i - whole) / parts);
  }
  __device__ int WeightTile(int i) const { return PairOf(i) % weight_tiles; }
  __device__ int Width(int i) const {
    const int width = tiles[PairOf(i) / weight_tiles].width;
    return i < whole ? width : (width / 8 + parts - 1) / parts * 8;
  }
  // `rows` may be 0 or less: a part behind the tile's last row.
  __device__ TokenTile Tile(int i) const {
    TokenTile tile = tiles[PairOf(i) / weight_tiles];
    if (i < whole) return tile;
    tile.width = Width(i);
    const int done = (i - whole) % parts * tile.width;
    tile.first_row += done;
    tile.rows = min(tile.rows - done, tile.width);
    return tile;
  }
};

// Half a K step (32 columns) of a thread's two blocks of weights: the words of two fragments and
// the scales of two rows, each.
struct Words {
  uint2 words[2];
  uint32_t scales[2];
  __device__ __forceinline__ void Load(const unsigned char* blocks, int half, int thread) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const unsigned char* block = blocks + b * kInt4BlockBytes;
      words[b] = *reinterpret_cast<const uint2*>(block + half * 1024 + thread * 8);
      scales[b] =
          *reinterpret_cast<const uint32_t*>(block + kScalesOffset + half * 128 + thread / 4 * 4);
    }
  }
  // The 16 columns of `step` (0, 1) of block b as operand A.
  __device__ __forceinline__ void Convert(int b, int step, uint32_t (&fragment)[4]) const {
    const uint32_t word = step == 0 ? words[b].x : words[b].y,
                   low = __byte_perm(scales[b], scales[b], 0x1010),
                   high = __byte_perm(scales[b], scales[b], 0x3232);
    fragment[0] = Dequantise(word, low);
    fragment[1] = Dequantise(word >> 4, high);
    fragment[2] = Dequantise(word >> 8, low);
    fragment[3] = Dequantise(word >> 12, high);
  }
};

template <Product kProduct, int kWidth, typename Form>
__device__ __forceinline__ void Consume(const GroupedProductParams& p, const TokenTile& tile,
                                        int weight_tile, const Ring<Form::kTokenBytes>& ring,
                                        Place& place) {
  constexpr int kTogether = Form::Together(kWidth), kGroups = 4 / kTogether;
  constexpr bool kAhead = kTogether > 1;
  const int group = static_cast<int>(threadIdx.x) / 128,
            thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
  const auto blocks = [&](const Place& at) {
    return ring.weights(at.stage) + group * 2 * kInt4BlockBytes;
  };
  // Cleared here rather than by the first wgmma: an accumulator that is read before it is written
  // would be live from the kernel's entry, for every width.
  float acc[2][kWidth / 2];
  uint32_t fragments[2][kTogether][4];
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  Words words;
  if constexpr (kAhead) {
    Wait(ring.full(place.stage), place.phase);
    words.Load(blocks(place), 0, thread);
  }
  for (int k = 0; k < p.k_blocks; ++k) {
    if constexpr (!kAhead) Wait(ring.full(place.stage), place.phase);
    const uint64_t tokens = TokenDescriptor(ring.tokens(place.stage));
#pragma unroll
    for (int g = 0; g < 2 * kGroups; ++g) {
      const int half = g / kGroups, first = g % kGroups * kTogether;
      if (!kAhead && first == 0) words.Load(blocks(place), half, thread);
      uint32_t(&fragment)[kTogether][4] = fragments[g % 2];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        words.Convert((first + i) % 2, (first + i) / 2, fragment[i]);
      FenceWgmma();
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        Wgmma<kWidth>::Multiply(acc[(first + i) % 2], fragment[i],
                                tokens + (half * 2 + (first + i) / 2) * 2);
      }
      CommitWgmma();
      if (kAhead && g == kGroups - 1) words.Load(blocks(place), 1, thread);
      if (kAhead && g == 2 * kGroups - 1 && k + 1 < p.k_blocks) {
        Place next = place;
        next.Advance();
        Wait(ring.full(next.stage), next.phase);
        words.Load(blocks(next), 0, thread);
      }
      WaitWgmma<1>();
      // The last wgmma of the step before is done now, and with it that stage.
      if (g == 0 && k > 0 && thread == 0) Arrive(ring.empty(place.before()));
    }
    place.Advance();
  }
  WaitWgmma<0>();
  if (thread == 0) Arrive(ring.empty(place.before()));

  const int quad = lane / 4;
  const int column = kProduct == Product::kGateUp
                         ? weight_tile * kTileColumnsOfH + group * 64 + warp * 16 + quad * 2
                         : weight_tile * kTileColumnsOfY + group * 128 + warp * 32 + quad * 4;
  if (column >= p.out_columns) return;
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = j * 8 + lane % 4 * 2 + c;
      if (row >= tile.rows) continue;
      bf16* out = p.out + (tile.first_row + row) * p.out_stride + column;
      const float v0 = acc[0][4 * j + c], v1 = acc[0][4 * j + 2 + c], v2 = acc[1][4 * j + c],
                  v3 = acc[1][4 * j + 2 + c];
      if constexpr (kProduct == Product::kGateUp) {
        *reinterpret_cast<uint32_t*>(out) = Pack(Silu(v0) * v1, Silu(v2) * v3);
      } else {
        *reinterpret_cast<uint2*>(out) = {Pack(v0, v1), Pack(v2, v3)};
      }
    }
  }
}

template <int kTokenBytes>
__device__ void Produce(const GroupedProductParams& p, const Maps& maps, const Work& work,
                        const Ring<kTokenBytes>& ring) {
  Place place(1);
  for (int i = static_cast<int>(blockIdx.x); i < work.total; i += static_cast<int>(gridDim.x)) {
    const TokenTile tile = work.Tile(i);
    const unsigned char* weights =
        p.weights + tile.slot * p.slot_bytes +
        static_cast<int64_t>(work.WeightTile(i)) * p.k_blocks * kWeightBytes;
    for (int k = 0; k < p.k_blocks; ++k) {
      uint64_t* full = ring.full(place.stage);
      Wait(ring.empty(place.stage), place.phase);
      ExpectBytes(full, tile.width * kBlockK * 2 + kWeightBytes);
      LoadBytes(ring.weights(place.stage), weights + static_cast<int64_t>(k) * kWeightBytes,
                kWeightBytes, full);
      LoadTokens(ring.tokens(place.stage), &maps.of_width[tile.width / 8 - 1], k * kBlockK,
                 tile.first_row, full);
      place.Advance();
    }
  }
}

// The loops of all widths from kWidth down.
template <Product kProduct, int kWidth, typename Form>
__device__ __forceinline__ void ConsumeFrom(const GroupedProductParams& p, const Work& work, int& i,
                                            const Ring<Form::kTokenBytes>& ring, Place& place) {
  for (; i < work.total && work.Width(i) == kWidth; i += static_cast<int>(gridDim.x))
    Consume<kProduct, kWidth, Form>(p, work.Tile(i), work.WeightTile(i), ring, place);
  if constexpr (kWidth > 8) ConsumeFrom<kProduct, kWidth - 8, Form>(p, work, i, ring, place);
}

template <Product kProduct, typename Form>
__global__ void __launch_bounds__(kThreads, Form::kBlocks)
    HopperKernel(const __grid_constant__ Maps maps, const GroupedProductParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring<Form::kTokenBytes> ring{shared};
  LetNextBegin();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(ring.full(stage), 1);
      InitBarrier(ring.empty(stage), 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  WaitForEarlier();
  const Work work(p);
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x == kConsumers) Produce(p, maps, work, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Form::kRegisters));
    Place place(0);
    int i = static_cast<int>(blockIdx.x);
    ConsumeFrom<kProduct, Form::kRows, Form>(p, work, i, ring, place);
  }
}

template <Product kProduct, typename Form>
void Launch(const GroupedProductParams& p, const Maps& maps, cudaStream_t stream) {
  const auto kernel = HopperKernel<kProduct, Form>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             Form::kSharedBytes));
  LaunchEarly(kernel, dim3(static_cast<unsigned>(Processors() * Form::kBlocks)), kThreads,
              Form::kSharedBytes, stream, maps, p);
}

}  // namespace

RowMaps MakeRowMaps(const bf16* x, int64_t rows, int columns) {
  RowMaps result;
  for (int i = 0; i < kHopperTileRows / 8; ++i) {
    const CUtensorMap map = MakeTensorMap(x, rows, columns, 8 * (i + 1));
    static_assert(sizeof(map) == sizeof(result.maps[0]) && kBlockK == kMapColumns);
    std::memcpy(result.maps[i], &map, sizeof(map));
  }
  return result;
}

void HopperProduct(const GroupedProductParams& p, const RowMaps& row_maps, Product product,
                   int tile_rows, cudaStream_t stream) {
  Maps maps;
  static_assert(sizeof(maps) == sizeof(row_maps.maps));
  std::memcpy(&maps, row_maps.maps, sizeof(maps));
  const bool narrow = tile_rows <= kHopperNarrowRows;
  if (product == Product::kGateUp) {
    narrow ? Launch<Product::kGateUp, Narrow>(p, maps, stream)
           : Launch<Product::kGateUp, Wide>(p, maps, stream);
  } else {
    narrow ? Launch<Product::kDown, Narrow>(p, maps, stream)
           : Launch<Product::kDown, Wide>(p, maps, stream);
  }
}

}  // namespace statetap::cuda
