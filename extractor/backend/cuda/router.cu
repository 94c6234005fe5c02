#include "extractor/backend/cuda/router.h"

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"

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

// Larger values have larger keys; NaN has none.
__device__ uint32_t KeyOf(float value) {
  if (value != value) return 0;
  const uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);  // −0 ties with 0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

struct LaneBest {
  uint32_t key;
  int index;
};
// Of values[lane], values[lane + 32], …: the largest, ties to the lower index.
__device__ LaneBest BestOfLane(const float* values, int count, int lane) {
  LaneBest best{0, lane};
  for (int i = lane; i < count; i += 32) {
    const uint32_t key = KeyOf(values[i]);
    if (key > best.key) best = {key, i};
  }
  return best;
}

__global__ void ChooseKernel(const ChooseExpertsParams p) {
  extern __shared__ float memory[];  // a warp: scores, scores + bias, worth of groups
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokens + warp;
  LetNextBegin();
  WaitForEarlier();
  if (token >= p.num_tokens) return;
  float* scores = memory + warp * (2 * p.num_experts + p.num_groups);
  float *biased = scores + p.num_experts, *worth = biased + p.num_experts;
  // All loads of a round at once.
  constexpr int kAtOnce = 12;
  const float* logits = p.logits + token * p.num_experts;
  for (int first = lane; first < p.num_experts; first += 32 * kAtOnce) {
    float logit[kAtOnce], bias[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int e = min(first + 32 * i, p.num_experts - 1);
      logit[i] = logits[e];
      bias[i] = p.bias[e];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int e = first + 32 * i;
      if (e >= p.num_experts) break;
      const float score = 1.0f / (1.0f + expf(-logit[i]));
      const float value = score + bias[i];
      scores[e] = score;
      biased[e] = value != value ? -INFINITY : value;
    }
  }
  __syncwarp();
  if (p.num_groups > 1) MaskGroups(biased, worth, p, lane);
  int32_t* experts = p.experts + token * p.top_k;
  float* weights = p.weights + token * p.top_k;
  float sum = 0;
  // The best of the lane's own, kept from round to round; only the lane that gives one away looks
  // again.
  LaneBest own = BestOfLane(biased, p.num_experts, lane);
  for (int k = 0; k < p.top_k; ++k) {
    const uint32_t largest = __reduce_max_sync(kAll, own.key);
    const auto best = static_cast<int>(
        __reduce_min_sync(kAll, own.key == largest ? static_cast<unsigned>(own.index) : ~0u));
    sum += scores[best];
    if (best % 32 == lane) {
      experts[k] = best;
      biased[best] = NAN;  // taken
      own = BestOfLane(biased, p.num_experts, lane);
    }
  }
  __syncwarp();
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
  LaunchEarly(ChooseKernel, dim3(static_cast<unsigned>((p.num_tokens + kTokens - 1) / kTokens)),
              kTokens * 32, bytes, stream, p);
}

}  // namespace statetap::cuda
