#include "extractor/model/transformer.h"

#include <algorithm>

#include "extractor/model/rotary.h"

namespace statetap {

Transformer::Transformer(const ModelConfig& config, const ParallelLayout& layout, Backend& backend,
                         ModelWeights weights, const ModelLimits& limits)
    : config_(config),
      layout_(layout),
      backend_(backend),
      weights_(std::move(weights)),
      limits_(limits),
      scale_(SoftmaxScale(config)),
      rotary_(backend.NewRotary(InverseFrequencies(config), limits.max_context)) {
  const auto rows = [&](int width, size_t element) {
    return backend_.Allocate(static_cast<size_t>(limits_.max_tokens) * static_cast<size_t>(width) *
                             element);
  };
  const size_t element = backend_.activation_bytes();
  const int latents = query_dim() + config_.latent_dim();
  residual_ = rows(config_.hidden, element);
  partial_ = rows(config_.hidden, element);
  own_normed_ = rows(config_.hidden, element);
  own_latents_ = rows(latents, element);
  own_experts_ = static_cast<int32_t*>(rows(std::max(1, config_.top_k), sizeof(int32_t)));
  own_weights_ = static_cast<float*>(rows(std::max(1, config_.top_k), sizeof(float)));
  normed_ = rows(config_.hidden, element);
  latents_ = rows(latents, element);
  experts_ = static_cast<int32_t*>(rows(std::max(1, config_.top_k), sizeof(int32_t)));
  expert_weights_ = static_cast<float*>(rows(std::max(1, config_.top_k), sizeof(float)));
  backend_.NewKvCache(config_.num_layers, limits_.num_pages, config_.latent_dim());
  Backend::Limits scratch;
  scratch.max_tokens = limits_.max_tokens;
  scratch.max_context = limits_.max_context;
  scratch.max_logit_rows = limits_.max_logit_rows;
  scratch.hidden = config_.hidden;
  scratch.num_heads = layout_.heads();
  scratch.num_experts = config_.num_experts;
  scratch.top_k = config_.top_k;
  scratch.num_boundaries = std::min(limits_.num_boundaries, config_.num_layers + 1);
  scratch.query_dim = layout_.heads() * config_.qk_dim();
  scratch.heads_dim = layout_.heads() * config_.v_dim;
  scratch.rope_dim = config_.rope_dim;
  scratch.latent_dim = config_.latent_dim();
  scratch.max_width =
      std::max({layout_.dense_width(), layout_.shared_width(), layout_.expert_width()});
  scratch.padded_vocab = layout_.vocab_per_rank() * layout_.world();
  backend_.PlanScratch(scratch);
}

int64_t Transformer::PageBytes(const ModelConfig& config, size_t activation_bytes) {
  return int64_t{config.num_layers} * kPageTokens * config.latent_dim() *
         static_cast<int64_t>(activation_bytes);
}

void Transformer::Forward(const StepPlan& plan, bool sharded, StepOutput& output) {
  const Step step = backend_.Begin(plan, sharded);
  const int rank = backend_.communicator().rank(), vocab_begin = layout_.vocab_per_rank() * rank;
  const int vocab_count = std::clamp(config_.vocab - vocab_begin, 0, layout_.vocab_per_rank());
  backend_.Embed(step, {*weights_.embed, vocab_begin, vocab_count, config_.hidden, partial_});
  Exchange(step, /*first=*/true, weights_.layers[0].input_norm.get());
  CaptureBoundary(step, plan, 0, output);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    Attend(step, layer);
    Exchange(step, /*first=*/false,
             weights_.layers[static_cast<size_t>(layer)].post_attention_norm.get());
    FeedForward(step, layer);
    const bool last = layer + 1 == config_.num_layers;
    Exchange(step, /*first=*/false,
             last ? nullptr : weights_.layers[static_cast<size_t>(layer) + 1].input_norm.get());
    CaptureBoundary(step, plan, layer + 1, output);
  }
  SampleRows(step, output);
  backend_.Finish();
}

void Transformer::Exchange(const Step& step, bool first, const Weight* norm) {
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  backend_.ExchangeAddNorm(step,
                           {partial_, residual_, first, norm, eps, config_.hidden, own_normed_});
}

void Transformer::Attend(const Step& step, int layer) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const auto eps = static_cast<float>(limits_.inner_eps);
  backend_.LatentProject(
      step, {own_normed_, w.q_a.get(), w.q_a_norm.get(), *w.kv_a, *w.kv_a_norm, eps, config_.hidden,
             query_dim(), config_.kv_lora_rank, config_.rope_dim, own_latents_});
  const auto width = static_cast<size_t>(query_dim() + config_.latent_dim());
  backend_.Gather(step, {own_latents_, latents_, width * backend_.activation_bytes()});
  backend_.Attention(
      step, {step.sharded ? latents_ : own_latents_, *w.q_b, *w.kv_b, *w.o, rotary_, layer,
             layout_.heads(), query_dim(), config_.kv_lora_rank, config_.nope_dim, config_.rope_dim,
             config_.v_dim, config_.hidden, scale_, partial_});
}

void Transformer::FeedForward(const Step& step, int layer) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const void* x = step.sharded ? normed_ : own_normed_;
  backend_.Gather(step, {own_normed_, normed_,
                         static_cast<size_t>(config_.hidden) * backend_.activation_bytes()});
  if (w.router == nullptr) {
    backend_.DenseFfn(step, {x, *w.dense.gate, *w.dense.up, *w.dense.down, config_.hidden,
                             layout_.dense_width(), /*accumulate=*/false, partial_});
    return;
  }
  const auto top_k = static_cast<size_t>(config_.top_k);
  RouteParams route{own_normed_,
                    *w.router,
                    *w.router_bias,
                    config_.hidden,
                    config_.num_experts,
                    config_.top_k,
                    config_.num_groups,
                    config_.top_groups,
                    config_.norm_topk_prob,
                    static_cast<float>(config_.routed_scaling),
                    own_experts_,
                    own_weights_};
  route.shared_gate = w.dense.gate.get();
  route.shared_up = w.dense.up.get();
  backend_.Route(step, route);
  backend_.Gather(step, {own_experts_, experts_, top_k * sizeof(int32_t)});
  backend_.Gather(step, {own_weights_, expert_weights_, top_k * sizeof(float)});
  backend_.RoutedFfn(
      step, {x, step.sharded ? experts_ : own_experts_,
             step.sharded ? expert_weights_ : own_weights_, *w.experts, config_.top_k, partial_});
  if (w.dense.gate != nullptr) {
    backend_.DenseFfn(step, {x, *w.dense.gate, *w.dense.up, *w.dense.down, config_.hidden,
                             layout_.shared_width(), /*accumulate=*/true, partial_});
  }
}

void Transformer::CaptureBoundary(const Step& step, const StepPlan& plan, int boundary,
                                  StepOutput& output) {
  const auto found = std::find(plan.boundaries.begin(), plan.boundaries.end(), boundary);
  if (found == plan.boundaries.end()) return;
  const auto index = static_cast<size_t>(found - plan.boundaries.begin());
  backend_.Capture(step, {residual_, config_.hidden, output.states[index].data()});
}

void Transformer::SampleRows(const Step& step, StepOutput& output) {
  // All ranks compute the same; one of them writes.
  const bool writes = backend_.communicator().rank() == 0;
  for (int first = 0; first < step.num_logit_rows; first += limits_.max_logit_rows) {
    const int count = std::min(limits_.max_logit_rows, step.num_logit_rows - first);
    backend_.Sample(
        step, {residual_, *weights_.norm, static_cast<float>(config_.rms_norm_eps),
               *weights_.lm_head, config_.hidden, config_.vocab, layout_.vocab_per_rank(), first,
               count, writes ? output.chosen.data() + first : nullptr});
  }
}

}  // namespace statetap
