// From logits to tokens and scores, on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "extractor/backend/step_plan.h"

namespace statetap::cuda {

// The same rule and the same random numbers as the CPU backend: greedy with ties to the lower id,
// or a draw from the softmax at `temperature` cut to the smallest set of most likely tokens with
// mass ≥ top_p. Scores are sums in fp64, in a fixed order; the masses of a draw are sums of
// integers (2^-44 of the most likely token's), which are the same in any order.
struct ChooseTokensParams {
  const float* logits;  // [ranks, count, vocab_per_rank]
  int count, vocab, vocab_per_rank;
  const StepPlan::Draw* draws;  // [count]
  ChosenToken* chosen;          // [count]
  void* workspace;              // ChooseWorkspaceBytes(count, vocab)
};
size_t ChooseWorkspaceBytes(int count, int vocab);
void ChooseTokens(const ChooseTokensParams& params, cudaStream_t stream);

}  // namespace statetap::cuda
