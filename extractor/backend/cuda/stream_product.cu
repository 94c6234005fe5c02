#include "extractor/backend/cuda/stream_product.h"

#include <cassert>

#include "extractor/backend/cuda/wide_product.h"

namespace statetap::cuda {
namespace {

static_assert(kThreads / 32 == kSegments, "a warp a segment in the narrow form");

// Stores the value of one fragment row, or of a pair of rows q, q + 8 for SwiGLU.
template <Epilogue kEpilogue>
__device__ void Store(const StreamProductParams& p, int64_t batch, int token, int fragment_row,
                      float value, float up) {
  int64_t at = batch * p.y_batch + token * p.y_stride;
  if constexpr (kEpilogue == Epilogue::kSwiGlu) {
    const int column = fragment_row / 16 * 8 + fragment_row % 8;
    if (column >= p.n) return;
    static_cast<bf16*>(p.y)[at + column] = __float2bfloat16_rn(ExactSilu(value) * up);
  } else {
    if (fragment_row >= p.n + p.n2) return;
    at += fragment_row;
    if constexpr (kEpilogue == Epilogue::kFloat) {
      static_cast<float*>(p.y)[at] = value;
    } else {
      bf16* to = static_cast<bf16*>(p.y) + at;
      *to =
          __float2bfloat16_rn(kEpilogue == Epilogue::kAdd ? __bfloat162float(*to) + value : value);
    }
  }
}

// A lane's address for ldmatrix: of 16 rows as operand A; of 16 tokens, or of 8 at two k16 steps,
// as operand B.
__device__ uint32_t LaneOfRows(uint32_t tile, int lane) {
  return PlaceOf(tile, lane % 16, lane / 16);
}
template <int kTokenTiles>
__device__ uint32_t LaneOfTokens(uint32_t tile, int lane) {
  return kTokenTiles == 1 ? PlaceOf(tile, lane % 8, lane / 8)
                          : PlaceOf(tile, lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// A step of 32 K: acc += rows · tokens, by two k16 steps. Where lanes read: as above, of this step.
template <int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void MultiplyStep(float (&acc)[kRowTiles][kTokenTiles][4], uint32_t rows,
                                             uint32_t tokens) {
  static_assert(kTokenTiles == 1 || kTokenTiles % 2 == 0);
  uint32_t both[4];
  if constexpr (kTokenTiles == 1) LoadMatrices(both, tokens);
#pragma unroll
  for (int k16 = 0; k16 < 2; ++k16) {
    uint32_t b[kTokenTiles][2];
    if constexpr (kTokenTiles == 1) {
      b[0][0] = both[2 * k16];
      b[0][1] = both[2 * k16 + 1];
    } else {
#pragma unroll
      for (int t = 0; t < kTokenTiles; t += 2) {
        LoadMatrices(both, (tokens ^ k16 * 32) + t * 8 * kLine);
        b[t][0] = both[0];
        b[t][1] = both[1];
        b[t + 1][0] = both[2];
        b[t + 1][1] = both[3];
      }
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      uint32_t a[4];
      LoadMatrices(a, (rows ^ k16 * 32) + r * 16 * kLine);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) Mma(acc[r][t], a, b[t][0], b[t][1]);
    }
  }
}

// 16 · kRowTiles fragment rows × a tile of tokens (blockIdx.y) of a batch entry (blockIdx.z). A
// warp a segment of K, with a ring of its own, so that nothing waits for other warps until the
// segments are summed.
template <int kRowTiles, int kTokenTiles, int kStages, Epilogue kEpilogue>
__device__ __forceinline__ void Narrow(const StreamProductParams& p, int row_tile) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles,
                kStageBytes = (kRows + kTokens) * kLine;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int quad = lane / 4, part = lane % 4;
  const int64_t batch = blockIdx.z;
  const int first_row = row_tile * kRows, first_token = static_cast<int>(blockIdx.y) * kTokens;
  const int steps = p.k / kStep, begin = SegmentBegin(steps, warp),
            end = SegmentBegin(steps, warp + 1);
  const uint32_t ring = SharedAddress(shared) + warp * kStages * kStageBytes;
  LetNextBegin();
  // A lane copies the same chunk of every fourth row.
  const int chunk = lane % kChunks, lane_row = lane / kChunks;
  const bf16* rows[kRows / 4];
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i)
    rows[i] = WeightRow<kEpilogue>(p, first_row + lane_row + i * 4, batch) + chunk * 8;
  const auto load_weights = [&](int step, uint32_t stage) {
    if (step + chunk / 4 >= end) return;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i)
      CopyAsync(PlaceOf(stage, lane_row + i * 4, chunk), rows[i] + step * kStep, 16);
  };
  const bf16* x = p.x + batch * p.x_batch + chunk * 8;
  const auto load_tokens = [&](int step, uint32_t stage) {
    if (step + chunk / 4 >= end) return;
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      const int row = lane_row + i * 4;
      CopyAsync(PlaceOf(stage + kRows * kLine, row, chunk),
                x + min(first_token + row, p.m - 1) * p.x_stride + step * kStep, 16);
    }
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) load_weights(begin + i * kStageSteps, ring + i * kStageBytes);
  WaitForEarlier();
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    load_tokens(begin + i * kStageSteps, ring + i * kStageBytes);
    CommitCopies();
  }
  float acc[kRowTiles][kTokenTiles][4] = {};
  uint32_t stage = ring;
  for (int step = begin; step < end; step += kStageSteps) {
    WaitCopies<kStages - 1>();
    __syncwarp();
    const uint32_t rows_at = LaneOfRows(stage, lane),
                   tokens_at = LaneOfTokens<kTokenTiles>(stage + kRows * kLine, lane);
    MultiplyStep(acc, rows_at, tokens_at);
    if (step + 1 < end) MultiplyStep(acc, rows_at ^ 64, tokens_at ^ 64);
    __syncwarp();
    load_weights(step + kStages * kStageSteps, stage);
    load_tokens(step + kStages * kStageSteps, stage);
    CommitCopies();
    stage = stage + kStageBytes == ring + kStages * kStageBytes ? ring : stage + kStageBytes;
  }

  WaitCopies<0>();
  __syncthreads();  // the rings become the segments' sums: [segment][token][row]
  constexpr int kStride = kRows + 4;
  auto* sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = t * 8 + part * 2 + i % 2, row = r * 16 + quad + i / 2 * 8;
        sums[(warp * kTokens + token) * kStride + row] = acc[r][t][i];
      }
    }
  }
  __syncthreads();
  constexpr bool kGated = kEpilogue == Epilogue::kSwiGlu;
  constexpr int kRowsOut = kGated ? kRows / 2 : kRows;
  for (int i = thread; i < kTokens * kRowsOut; i += kThreads) {
    const int token = i / kRowsOut, out = i % kRowsOut, row = kGated ? out / 8 * 16 + out % 8 : out;
    if (first_token + token >= p.m) break;
    const auto sum = [&](int of) {
      const auto at = [&](int s) { return sums[(s * kTokens + token) * kStride + of]; };
      return ((at(0) + at(1)) + (at(2) + at(3))) + ((at(4) + at(5)) + (at(6) + at(7)));
    };
    Store<kEpilogue>(p, batch, first_token + token, first_row + row, sum(row),
                     kGated ? sum(row + 8) : 0.0f);
  }
}

// grid: (tiles of rows, of one product or of one behind the other; tiles of tokens; batch).
template <int kRowTiles, int kTokenTiles, int kStages, Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads) NarrowKernel(const StreamProductParams p) {
  Narrow<kRowTiles, kTokenTiles, kStages, kEpilogue>(p, static_cast<int>(blockIdx.x));
}
template <int kTokenTiles, int kStages, Epilogue kFirst, Epilogue kSecond>
__global__ void __launch_bounds__(kThreads)
    NarrowBothKernel(const StreamProductParams p, const StreamProductParams q, int tiles) {
  const auto tile = static_cast<int>(blockIdx.x);
  if (tile < tiles) {
    Narrow<1, kTokenTiles, kStages, kFirst>(p, tile);
  } else {
    Narrow<1, kTokenTiles, kStages, kSecond>(q, tile - tiles);
  }
}

// By mma.sync: eight warps hold 16 rows × 32 tokens each.
class MmaForm {
 public:
  static constexpr int kTokens = 64, kStages = 4, kBlocks = 2, kAhead = kStages - 1, kValues = 16,
                       kRegisterLevels = 1;
  __device__ MmaForm(uint32_t ring, int thread)
      : lane_(thread % 32),
        row0_(thread / 64 * 16),
        token0_(thread / 32 % 2 * 32),
        rows_(LaneOfRows(ring + row0_ * kLine, lane_)),
        tokens_(LaneOfTokens<kTokenTiles>(ring + (kWideRows + token0_) * kLine, lane_)) {}
  __device__ static void Arrived() {}
  __device__ void Multiply(float (&sums)[kValues], int stage, int steps, bool first) {
    auto& acc = reinterpret_cast<float(&)[1][kTokenTiles][4]>(sums);
    if (first) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) sums[i] = 0;
    }
    const int at = stage * WideMemory<MmaForm>::kStageBytes;
    MultiplyStep(acc, rows_ + at, tokens_ + at);
    if (steps > 1) MultiplyStep(acc, (rows_ + at) ^ 64, (tokens_ + at) ^ 64);
  }
  __device__ void Finish(float (&)[kValues]) const {}
  __device__ int row(int i) const { return row0_ + lane_ / 4 + i / 2 % 2 * 8; }
  __device__ int token(int i) const { return token0_ + i / 4 * 8 + lane_ % 4 * 2 + i % 2; }

 private:
  static constexpr int kTokenTiles = 4;
  int lane_, row0_, token0_;
  uint32_t rows_, tokens_;
};

constexpr int kAloneBytes = 192 << 10;

template <int kRowTiles, int kTokenTiles, int kStages, Epilogue kEpilogue>
void LaunchNarrow(const StreamProductParams& p, cudaStream_t stream) {
  constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles,
                kBytes = kSegments * kStages * (kRows + kTokens) * kLine;
  static_assert(kBytes >= kSegments * kTokens * (kRows + 4) * 4, "the sums take the rings' place");
  auto* kernel = NarrowKernel<kRowTiles, kTokenTiles, kStages, kEpilogue>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 grid(Tiles(FragmentRows(p), kRows), Tiles(p.m, kTokens),
                  static_cast<unsigned>(p.batch));
  LaunchEarly(kernel, grid, kThreads, kBytes, stream, p);
}

template <int kTokenTiles, int kStages, Epilogue kFirst, Epilogue kSecond>
void LaunchNarrowBoth(const StreamProductParams& p, const StreamProductParams& q,
                      cudaStream_t stream) {
  constexpr int kTokens = 8 * kTokenTiles, kBytes = kSegments * kStages * (16 + kTokens) * kLine;
  auto* kernel = NarrowBothKernel<kTokenTiles, kStages, kFirst, kSecond>;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const unsigned first = Tiles(FragmentRows(p), 16), second = Tiles(FragmentRows(q), 16);
  LaunchEarly(kernel, dim3(first + second, Tiles(p.m, kTokens)), kThreads, kBytes, stream, p, q,
              static_cast<int>(first));
}

bool IsLong(int k) { return k > 4 * kSegments * kStep; }
// Where a multiprocessor has one block at most, that one keeps as much in flight as fits.
bool Alone(int64_t blocks) { return blocks <= Processors() && SharedLimit() >= kAloneBytes; }

template <Epilogue kEpilogue>
void Launch(const StreamProductParams& p, cudaStream_t stream) {
  const bool is_long = IsLong(p.k),
             alone = is_long && Alone(int64_t{Tiles(FragmentRows(p), 16)} * p.batch);
  // K of up to two stages: all of it is loaded at once, of 32 rows, so that one wave takes them
  // all.
  if (p.m <= 8)
    return alone     ? LaunchNarrow<1, 1, 8, kEpilogue>(p, stream)
           : is_long ? LaunchNarrow<1, 1, 4, kEpilogue>(p, stream)
                     : LaunchNarrow<2, 1, 2, kEpilogue>(p, stream);
  return alone     ? LaunchNarrow<1, 2, 6, kEpilogue>(p, stream)
         : is_long ? LaunchNarrow<1, 2, 3, kEpilogue>(p, stream)
                   : LaunchNarrow<2, 2, 2, kEpilogue>(p, stream);
}

}  // namespace

StreamWorkspace::StreamWorkspace(Family family)
    : family_(family),
      sums_(size_t{kWideSums} * sizeof(float)),
      arrived_(kWideSums / (kWideRows * MmaForm::kTokens) * sizeof(int), /*zeroed=*/true) {}

bool Streamable(const StreamProductParams& p) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  return p.k % kStep == 0 && p.k > 0 && p.x_stride % 8 == 0 && p.w_stride % 8 == 0 &&
         p.x_batch % 8 == 0 && p.w_batch % 8 == 0 && aligned(p.x) && aligned(p.w) && aligned(p.w2);
}

void StreamProduct(const StreamProductParams& p, const StreamWorkspace& workspace,
                   cudaStream_t stream) {
  if (p.m == 0 || p.n + p.n2 == 0 || p.batch == 0) return;
  if (p.m > 16) {
    return workspace.family() == Family::kHopper ? HopperWideProduct(p, workspace, stream)
                                                 : LaunchWide<MmaForm>(p, workspace, stream);
  }
  switch (p.epilogue) {
    case Epilogue::kBf16: return Launch<Epilogue::kBf16>(p, stream);
    case Epilogue::kAdd: return Launch<Epilogue::kAdd>(p, stream);
    case Epilogue::kFloat: return Launch<Epilogue::kFloat>(p, stream);
    case Epilogue::kSwiGlu: return Launch<Epilogue::kSwiGlu>(p, stream);
  }
}

void StreamProductBoth(const StreamProductParams& p, const StreamProductParams& q,
                       const StreamWorkspace& workspace, cudaStream_t stream) {
  if (p.m == 0) return;
  constexpr Epilogue kFirst = Epilogue::kFloat, kSecond = Epilogue::kSwiGlu;
  assert(p.epilogue == kFirst && q.epilogue == kSecond && p.m == q.m);
  if (p.m > 16) {
    return workspace.family() == Family::kHopper ? HopperWideProductBoth(p, q, workspace, stream)
                                                 : LaunchWideBoth<MmaForm>(p, q, workspace, stream);
  }
  const bool alone = IsLong(p.k) && IsLong(q.k) &&
                     Alone(int64_t{Tiles(FragmentRows(p), 16)} + Tiles(FragmentRows(q), 16));
  if (p.m <= 8) {
    return alone ? LaunchNarrowBoth<1, 8, kFirst, kSecond>(p, q, stream)
                 : LaunchNarrowBoth<1, 4, kFirst, kSecond>(p, q, stream);
  }
  return alone ? LaunchNarrowBoth<2, 6, kFirst, kSecond>(p, q, stream)
               : LaunchNarrowBoth<2, 3, kFirst, kSecond>(p, q, stream);
}

}  // namespace statetap::cuda
