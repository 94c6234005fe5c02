// The DeepSeek-V3 architecture (Kimi-K2, K2.5, Moonlight), written once over Backend: the layer
// loop with taps. One object is one rank; its methods are called from that rank's thread, the same
// calls on every rank.
#pragma once

#include <span>
#include <vector>

#include "extractor/backend/backend.h"
#include "extractor/model/layout.h"
#include "extractor/model/weights.h"

namespace statetap {

struct ModelLimits {
  int max_tokens = 0;      // of a step
  int max_context = 0;     // positions of a sequence
  int max_logit_rows = 0;  // at once; more are done in turns
  int num_pages = 0;       // of the KV cache
  double inner_eps = 0;    // of the norms inside attention
  int num_boundaries = 4;  // of a step that room is made for at once: three taps and the last
};

// Where a step leaves what it made, in host memory that all ranks share.
struct StepOutput {
  std::vector<std::span<uint16_t>> states;  // by plan.boundaries: bf16 [max_tokens, hidden]
  std::vector<ChosenToken> chosen;          // [logit rows]
};

class Transformer {
 public:
  Transformer(const ModelConfig& config, const ParallelLayout& layout, Backend& backend,
              ModelWeights weights, const ModelLimits& limits);

  // One pass over the plan's rows. `sharded`: the residual stream by tokens over the ranks, else
  // whole on each. `output` has room; only rank 0 writes tokens, each rank its own rows of
  // the states.
  void Forward(const StepPlan& plan, bool sharded, StepOutput& output);

  // Bytes of a KV page over all layers, on every rank.
  static int64_t PageBytes(const ModelConfig& config, size_t activation_bytes);

 private:
  void Attend(const Step& step, int layer);
  void FeedForward(const Step& step, int layer);
  void Exchange(const Step& step, bool first, const Weight* norm);
  void CaptureBoundary(const Step& step, const StepPlan& plan, int boundary, StepOutput& output);
  void SampleRows(const Step& step, StepOutput& output);
  int query_dim() const { return config_.q_lora_rank > 0 ? config_.q_lora_rank : config_.hidden; }

  const ModelConfig config_;
  const ParallelLayout layout_;
  Backend& backend_;
  const ModelWeights weights_;
  const ModelLimits limits_;
  const float scale_;
  const void* rotary_;
  // [max_tokens, …], planned once. The `own_` buffers hold this rank's rows; without sharding they
  // are the whole.
  void *residual_, *own_normed_, *own_latents_, *normed_, *latents_, *partial_;
  int32_t *own_experts_, *experts_;
  float *own_weights_, *expert_weights_;
};

}  // namespace statetap
