// Dense products of more rows than 16 (decode of many sequences) by wgmma, both operands from
// shared memory. Two warpgroups hold the same 64 rows of weights and half of the tokens each. Few,
// wide tiles: what is read again and again is x, from the L2, once for each tile of weights.
#include "extractor/backend/cuda/wide_product.h"

#include <algorithm>
#include <type_traits>

#include "extractor/backend/cuda/sm90/pipeline.h"
#include "extractor/backend/cuda/sm90/wgmma.h"
#include "extractor/backend/cuda/stream_product.h"

namespace statetap::cuda {
namespace {

template <int kMostTokens, int kStagesThatFit, int kBlocksThatFit>
class WgmmaForm {
 public:
  static constexpr int kTokens = kMostTokens, kStages = kStagesThatFit, kBlocks = kBlocksThatFit,
                       kAhead = kStages - 2,  // the stage before may still be read
      kEach = kTokens / 2, kValues = kEach / 2, kRegisterLevels = 2;

  __device__ WgmmaForm(uint32_t ring, int thread)
      : lane_(thread % 32),
        row0_(thread / 32 % 4 * 16),
        token0_(thread / 128 * kEach),
        rows_(LineDescriptor(ring)),
        tokens_(LineDescriptor(ring + (kWideRows + token0_) * kLine)) {}
  __device__ static void Arrived() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  __device__ __forceinline__ void Multiply(float (&sums)[kValues], int stage, int steps,
                                           bool first) {
    if (steps == 2) {
      MultiplySteps<2>(sums, stage, first ? 0 : 1);
    } else {
      MultiplySteps<1>(sums, stage, first ? 0 : 1);
    }
    WaitWgmma<1>();
  }
  __device__ void Finish(float (&sums)[kValues]) const {
    WaitWgmma<0>();
    Settle(sums);
  }
  __device__ int row(int i) const { return row0_ + lane_ / 4 + i / 2 % 2 * 8; }
  __device__ int token(int i) const { return token0_ + i / 4 * 8 + lane_ % 4 * 2 + i % 2; }

 private:
  template <int kSteps>
  __device__ __forceinline__ void MultiplySteps(float (&sums)[kValues], int stage, int add) {
    // Descriptors count in 16 bytes.
    const uint64_t at = static_cast<uint64_t>(stage * (WideMemory<WgmmaForm>::kStageBytes / 16));
    FenceWgmma();
#pragma unroll
    for (int k16 = 0; k16 < 2 * kSteps; ++k16)
      WgmmaShared<kEach>::Multiply(sums, rows_ + at + 2 * k16, tokens_ + at + 2 * k16,
                                   k16 == 0 ? add : 1);
    CommitWgmma();
  }

  int lane_, row0_, token0_;
  uint64_t rows_, tokens_;
};

using Tokens64 = WgmmaForm<64, 6, 2>;
using Tokens128 = WgmmaForm<128, 8, 1>;
using Tokens256 = WgmmaForm<256, 4, 1>;

// About what a multiprocessor reads: of weights and x, and what the last block of a tile adds up.
template <typename Form>
int64_t BytesOf(int row_tiles, int m, int k, int batch, int processors) {
  const int64_t tiles = int64_t{row_tiles} * Tiles(m, Form::kTokens) * batch,
                groups = GroupsOf<Form>(tiles, k, processors),
                blocks = (tiles * groups + processors - 1) / processors;
  const int64_t of_block = (kWideRows + std::min(m, Form::kTokens)) * int64_t{k} * 2 / groups;
  return of_block * blocks + (groups > 1 ? (groups + 1) * kWideRows * Form::kTokens * 4 : 0);
}

// Calls `launch` with the type of the form that reads least: the narrowest where all of x fits it.
template <typename Launch>
void WithForm(int row_tiles, int m, int k, int batch, const Launch& launch) {
  const int processors = Processors();
  const int64_t of_64 = BytesOf<Tokens64>(row_tiles, m, k, batch, processors),
                of_128 = BytesOf<Tokens128>(row_tiles, m, k, batch, processors),
                of_256 = BytesOf<Tokens256>(row_tiles, m, k, batch, processors);
  if (m <= Tokens64::kTokens || of_64 <= std::min(of_128, of_256))
    return launch(std::type_identity<Tokens64>());
  if (of_128 <= of_256) return launch(std::type_identity<Tokens128>());
  launch(std::type_identity<Tokens256>());
}

}  // namespace

void HopperWideProduct(const StreamProductParams& p, const StreamWorkspace& workspace,
                       cudaStream_t stream) {
  WithForm(static_cast<int>(Tiles(FragmentRows(p), kWideRows)), p.m, p.k, p.batch,
           [&](auto form) { LaunchWide<typename decltype(form)::type>(p, workspace, stream); });
}

void HopperWideProductBoth(const StreamProductParams& p, const StreamProductParams& q,
                           const StreamWorkspace& workspace, cudaStream_t stream) {
  const unsigned row_tiles = Tiles(FragmentRows(p), kWideRows) + Tiles(FragmentRows(q), kWideRows);
  WithForm(static_cast<int>(row_tiles), p.m, p.k, 1, [&](auto form) {
    LaunchWideBoth<typename decltype(form)::type>(p, q, workspace, stream);
  });
}

}  // namespace statetap::cuda
