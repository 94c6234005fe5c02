// The choice of experts from the router's logits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace statetap::cuda {

// score = sigmoid(logit); the top_k largest of score + bias among the top_groups best groups (a
// group is worth the sum of its two best), ties to the lower index, NaN last; weights = scores,
// normalised if asked, times scaling. All in fp32.
struct ChooseExpertsParams {
  const float* logits;  // [num_tokens, num_experts]
  const float* bias;    // [num_experts]
  int num_tokens, num_experts, top_k, num_groups, top_groups;
  bool normalise;
  float scaling;
  int32_t* experts;  // [num_tokens, top_k], best first
  float* weights;    // [num_tokens, top_k]
};
void ChooseExperts(const ChooseExpertsParams& params, cudaStream_t stream);

}  // namespace statetap::cuda
