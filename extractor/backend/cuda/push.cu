#include "extractor/backend/cuda/push.h"

#include <algorithm>

#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/push_piece.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 256, kMostBlocks = 128;

// Block b: piece b of as many as there are blocks, equal on all ranks but for the last ones.
__global__ void __launch_bounds__(kThreads) PushKernel(const PushParams p) {
  LetNextBegin();
  WaitForEarlier();
  const size_t most = p.most_bytes / sizeof(uint4), piece = (most + gridDim.x - 1) / gridDim.x,
               count = p.bytes / sizeof(uint4);
  PushPiece(p, static_cast<int>(blockIdx.x), min(blockIdx.x * piece, count),
            min((blockIdx.x + 1) * piece, count));
}

}  // namespace

void Push(const PushParams& params, cudaStream_t stream) {
  if (params.most_bytes == 0 || params.world == 1) return;
  const size_t pieces = (params.most_bytes / sizeof(uint4) + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<size_t>(pieces, 1, kMostBlocks));
  LaunchEarly(PushKernel, dim3(blocks), kThreads, 0, stream, params);
}

}  // namespace statetap::cuda
