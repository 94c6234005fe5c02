#include "extractor/backend/cuda/router.h"

#include "extractor/backend/cuda/check.h"

namespace statetap::cuda {
namespace {

constexpr int kTokens = 4;  // of a block: one warp each
constexpr unsigned kAll = 0xffffffffu;

// The largest of values[0, count), ties to the lower index, NaN as if taken; the same on all lanes.
// −1 where all are taken.
__device__ int ArgMax(const float* values, int count, int lane) {
  float best = -INFINITY;
  int index = -1;
  for (int i = lane; i < count; i += 32) {
    const float value = values[i];
    if (value != value) continue;
    if (index < 0 || value > best) {
      best = value;
      index = i;
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(kAll, best, offset);
    const int other_index = __shfl_xor_sync(kAll, index, offset);
    if (other_index >= 0 && (index < 0 || other > best || (other == best && other_index < index))) {
      best = other;
      index = other_index;
    }
  }
  return index;
}

// Groups outside the best become −∞, whatever their bias.
__device__ void MaskGroups(float* biased, float* worth, const ChooseExpertsParams& p, int lane) {
  const int size = p.num_experts / p.num_groups;
  for (int group = lane; group < p.num_groups; group += 32) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < size; ++i) {
      const float value = biased[group * size + i];
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    worth[group] = size > 1 ? first + second : first;
  }
  __syncwarp();
  for (int i = 0; i < p.top_groups; ++i) {
    const int best = ArgMax(worth, p.num_groups, lane);
    __syncwarp();
    if (lane == 0 && best >= 0) worth[best] = NAN;  // kept
    __syncwarp();
  }
  for (int i = lane; i < p.num_experts; i += 32) {
    const float kept = worth[i / size];
    if (kept == kept) biased[i] = -INFINITY;
  }
  __syncwarp();
}

__global__ void ChooseKernel(const ChooseExpertsParams p) {
  extern __shared__ float memory[];  // a warp: scores, scores + bias, worth of groups
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokens + warp;
  if (token >= p.num_tokens) return;
  float* scores = memory + warp * (2 * p.num_experts + p.num_groups);
  float *biased = scores + p.num_experts, *worth = biased + p.num_experts;
  for (int e = lane; e < p.num_experts; e += 32) {
    const float score = 1.0f / (1.0f + expf(-p.logits[token * p.num_experts + e]));
    const float value = score + p.bias[e];
    scores[e] = score;
    biased[e] = value != value ? -INFINITY : value;
  }
  __syncwarp();
  if (p.num_groups > 1) MaskGroups(biased, worth, p, lane);
  int32_t* experts = p.experts + token * p.top_k;
  float* weights = p.weights + token * p.top_k;
  float sum = 0;
  for (int k = 0; k < p.top_k; ++k) {
    const int best = ArgMax(biased, p.num_experts, lane);
    __syncwarp();
    sum += scores[best];
    if (lane == 0) {
      biased[best] = NAN;  // taken
      experts[k] = best;
    }
    __syncwarp();
  }
  for (int k = lane; k < p.top_k; k += 32) {
    const float score = scores[experts[k]];
    weights[k] = (p.normalise ? score / (sum + 1e-20f) : score) * p.scaling;
  }
}

}  // namespace

void ChooseExperts(const ChooseExpertsParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const size_t bytes =
      sizeof(float) * kTokens * static_cast<size_t>(2 * p.num_experts + p.num_groups);
  ChooseKernel<<<static_cast<unsigned>((p.num_tokens + kTokens - 1) / kTokens), kTokens * 32, bytes,
                 stream>>>(p);
  CheckLaunch();
}

}  // namespace statetap::cuda
