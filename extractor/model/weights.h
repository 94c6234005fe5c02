// The weights of one rank, and how they come from a checkpoint.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "extractor/backend/backend.h"
#include "extractor/checkpoint/checkpoint_index.h"
#include "extractor/checkpoint/loader.h"
#include "extractor/model/layout.h"

namespace statetap {

using WeightPtr = std::unique_ptr<Weight>;

struct FfnWeights {
  WeightPtr gate, up, down;
};

struct LayerWeights {
  WeightPtr input_norm, post_attention_norm;
  WeightPtr q_a, q_a_norm;  // null without a query LoRA: then q_b reads from hidden
  WeightPtr q_b, kv_a, kv_a_norm, kv_b, o;
  FfnWeights dense;  // of a dense layer, or the shared experts; null where there are none
  WeightPtr router, router_bias, experts;  // null in a dense layer
};

struct ModelWeights {
  WeightPtr embed, norm, lm_head;
  std::vector<LayerWeights> layers;
};

// Reads every byte once and hands each rank its slices: backends[r] gets the weights of rank r.
absl::StatusOr<std::vector<ModelWeights>> LoadWeights(
    const CheckpointIndex& checkpoint, const ParallelLayout& layout,
    std::span<const std::unique_ptr<Backend>> backends, const LoadOptions& options);

}  // namespace statetap
