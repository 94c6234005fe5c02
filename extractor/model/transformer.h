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
  double inner_eps = 0;    // of the norms inside attention
  int num_boundaries = 4;  // of a step that room is made for at once: three taps and the last
  // Tokens of a sharded step from which its halves take turns, where that hides what ranks
  // exchange.
  int halved_from = 12'288;
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

  // Once, before the first pass.
  void NewKvCache(int num_pages);

  // One pass over the plan's rows. `sharded`: the residual stream by tokens over the ranks, else
  // whole on each. `output` has room; only rank 0 writes tokens, each rank its own rows of
  // the states.
  void Forward(const StepPlan& plan, bool sharded, StepOutput& output);

  // Bytes of a KV page over all layers, on every rank.
  static int64_t PageBytes(const ModelConfig& config, size_t activation_bytes);

 private:
  // A step or half of one, and its part of the buffers below.
  struct Rows {
    const StepPlan& plan;
    Step step;
    std::vector<uint16_t*> states;  // by plan.boundaries; of the first row
    ChosenToken* chosen;            // of the first logit row; null on ranks that do not write
    // `own_`: this rank's rows, at their place among all of them.
    void *residual, *partial, *normed, *own_normed, *latents, *own_latents;
    int32_t *experts, *own_experts;
    float *weights, *own_weights;
  };
  Rows RowsOf(const StepPlan& plan, const Step& step, int first_row, int first_logit,
              StepOutput& output) const;
  // One half as far as its FFN of `layer`, the other through its FFN of `feeds_layer`, in turns, so
  // that what the one exchanges travels beside the other's experts. Either may be null. Layer −1 is
  // the embedding, layer num_layers the end: the last sum and tap.
  void RunLayer(const Rows* attends, int layer, const Rows* feeds, int feeds_layer);
  void EnterLayer(const Rows& rows, int layer);
  void Attend(const Rows& rows, int layer);
  void EnterFfn(const Rows& rows, int layer);
  RoutedFfnParams RoutedParams(const Rows& rows, const LayerWeights& weights) const;
  void RoutedFfn(const Rows& rows, int layer, RoutedStage stage);
  void EndLayer(const Rows& rows, int layer);
  void SampleRows(const Rows& rows);
  int latents_dim() const { return query_dim() + config_.latent_dim(); }
  int query_dim() const { return config_.q_lora_rank > 0 ? config_.q_lora_rank : config_.hidden; }

  const ModelConfig config_;
  const ParallelLayout layout_;
  Backend& backend_;
  const ModelWeights weights_;
  const ModelLimits limits_;
  const float scale_;
  const void* rotary_;
  // [max_tokens, …], planned once. `residual_` holds this rank's rows alone, from the first on.
  void *residual_, *partial_, *normed_, *latents_;
  int32_t* experts_;
  float* expert_weights_;
};

}  // namespace statetap
