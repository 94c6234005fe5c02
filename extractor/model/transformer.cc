#include "extractor/model/transformer.h"

#include <algorithm>
#include <optional>

#include "extractor/model/rotary.h"

namespace statetap {
namespace {

// Where the second half of a step begins: with a sequence, if one begins near the middle.
int MiddleOf(const StepPlan& plan) {
  const int middle = plan.num_tokens() / 2, near = plan.num_tokens() / 8;
  const auto begins = [&](int t) {
    const auto i = static_cast<size_t>(t);
    return plan.sequence[i] != plan.sequence[i - 1];
  };
  for (int away = 0; away < near; ++away) {
    if (begins(middle - away)) return middle - away;
    if (begins(middle + away)) return middle + away;
  }
  return middle;
}

StepPlan Cut(const StepPlan& plan, int begin, int end) {
  const auto tokens = [&](const std::vector<int32_t>& of) {
    return std::vector<int32_t>(of.begin() + begin, of.begin() + end);
  };
  StepPlan part;
  part.ids = tokens(plan.ids);
  part.positions = tokens(plan.positions);
  part.sequence = tokens(plan.sequence);
  part.num_seqs = plan.num_seqs;
  part.pages_per_seq = plan.pages_per_seq;
  part.page_table = plan.page_table;
  part.decodes = plan.decodes;
  part.boundaries = plan.boundaries;
  for (size_t i = 0; i < plan.logit_rows.size(); ++i) {
    if (plan.logit_rows[i] < begin || plan.logit_rows[i] >= end) continue;
    part.logit_rows.push_back(plan.logit_rows[i] - begin);
    part.draws.push_back(plan.draws[i]);
  }
  return part;
}

}  // namespace

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
  residual_ = rows(config_.hidden, element);
  partial_ = rows(config_.hidden, element);
  normed_ = rows(config_.hidden, element);
  latents_ = rows(latents_dim(), element);
  experts_ = static_cast<int32_t*>(rows(std::max(1, config_.top_k), sizeof(int32_t)));
  expert_weights_ = static_cast<float*>(rows(std::max(1, config_.top_k), sizeof(float)));
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

void Transformer::NewKvCache(int num_pages) {
  backend_.NewKvCache(config_.num_layers, num_pages, config_.latent_dim());
}

int64_t Transformer::PageBytes(const ModelConfig& config, size_t activation_bytes) {
  return int64_t{config.num_layers} * kPageTokens * config.latent_dim() *
         static_cast<int64_t>(activation_bytes);
}

void Transformer::Forward(const StepPlan& plan, bool sharded, StepOutput& output) {
  std::vector<StepPlan> halves;
  if (sharded && plan.num_tokens() >= std::max(2, limits_.halved_from) && backend_.Overlaps()) {
    const int middle = MiddleOf(plan);
    halves.push_back(Cut(plan, 0, middle));
    halves.push_back(Cut(plan, middle, plan.num_tokens()));
  }
  const std::span plans = halves.empty() ? std::span(&plan, 1) : std::span<const StepPlan>(halves);
  const std::vector<Step> steps = backend_.BeginSteps(plans, sharded);
  std::vector<Rows> rows;
  for (int i = 0, first_row = 0, first_logit = 0; const Step& step : steps) {
    rows.push_back(RowsOf(plans[static_cast<size_t>(i++)], step, first_row, first_logit, output));
    first_row += step.num_tokens;
    first_logit += step.num_logit_rows;
  }
  const Rows *front = &rows.front(), *behind = rows.size() > 1 ? &rows.back() : nullptr;
  RunLayer(nullptr, 0, front, -1);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    RunLayer(front, layer, behind, layer - 1);
    RunLayer(behind, layer, front, layer);
  }
  RunLayer(front, config_.num_layers, behind, config_.num_layers - 1);
  RunLayer(behind, config_.num_layers, nullptr, 0);
  for (const Rows& part : rows) SampleRows(part);
  backend_.Finish();
}

Transformer::Rows Transformer::RowsOf(const StepPlan& plan, const Step& step, int first_row,
                                      int first_logit, StepOutput& output) const {
  const auto first = static_cast<size_t>(first_row),
             own = first + static_cast<size_t>(step.own.begin),
             hidden = static_cast<size_t>(config_.hidden),
             top_k = static_cast<size_t>(config_.top_k);
  const auto at = [&](void* buffer, size_t row, int width) -> void* {
    return static_cast<std::byte*>(buffer) +
           row * static_cast<size_t>(width) * backend_.activation_bytes();
  };
  std::vector<uint16_t*> states;
  for (size_t i = 0; i < plan.boundaries.size(); ++i)
    states.push_back(output.states[i].data() + first * hidden);
  // All ranks draw the same; one of them writes.
  const bool writes = backend_.communicator().rank() == 0;
  return {plan,
          step,
          std::move(states),
          writes ? output.chosen.data() + first_logit : nullptr,
          at(residual_, first, config_.hidden),
          at(partial_, first, config_.hidden),
          at(normed_, first, config_.hidden),
          at(normed_, own, config_.hidden),
          at(latents_, first, latents_dim()),
          at(latents_, own, latents_dim()),
          experts_ + first * top_k,
          experts_ + own * top_k,
          expert_weights_ + first * top_k,
          expert_weights_ + own * top_k};
}

void Transformer::RunLayer(const Rows* attends, int layer, const Rows* feeds, int feeds_layer) {
  if (feeds != nullptr) RoutedFfn(*feeds, feeds_layer, RoutedStage::kGateUpFirst);
  if (attends != nullptr) EnterLayer(*attends, layer);
  if (feeds != nullptr) RoutedFfn(*feeds, feeds_layer, RoutedStage::kGateUpSecond);
  if (attends != nullptr && layer < config_.num_layers) Attend(*attends, layer);
  if (feeds != nullptr) RoutedFfn(*feeds, feeds_layer, RoutedStage::kGateUpThird);
  if (attends != nullptr && layer < config_.num_layers) EnterFfn(*attends, layer);
  if (feeds != nullptr) EndLayer(*feeds, feeds_layer);
}

void Transformer::EnterLayer(const Rows& rows, int layer) {
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const bool last = layer == config_.num_layers;
  const Weight* norm =
      last ? nullptr : weights_.layers[static_cast<size_t>(layer)].input_norm.get();
  backend_.ExchangeAddNorm(rows.step, {rows.partial, rows.residual, /*first=*/layer == 0, norm, eps,
                                       config_.hidden, rows.own_normed});
  const auto found = std::find(rows.plan.boundaries.begin(), rows.plan.boundaries.end(), layer);
  if (found != rows.plan.boundaries.end()) {
    const auto index = static_cast<size_t>(found - rows.plan.boundaries.begin());
    backend_.Capture(rows.step, {rows.residual, config_.hidden, rows.states[index]});
  }
  if (last) return;
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  backend_.LatentProject(rows.step,
                         {rows.own_normed, w.q_a.get(), w.q_a_norm.get(), *w.kv_a, *w.kv_a_norm,
                          static_cast<float>(limits_.inner_eps), config_.hidden, query_dim(),
                          config_.kv_lora_rank, config_.rope_dim, rows.own_latents});
  backend_.Gather(rows.step, {{rows.own_latents, rows.latents,
                               static_cast<size_t>(latents_dim()) * backend_.activation_bytes()}});
}

void Transformer::Attend(const Rows& rows, int layer) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  backend_.Attention(
      rows.step, {rows.latents, *w.q_b, *w.kv_b, *w.o, rotary_, layer, layout_.heads(), query_dim(),
                  config_.kv_lora_rank, config_.nope_dim, config_.rope_dim, config_.v_dim,
                  config_.hidden, scale_, rows.partial});
  backend_.Send(rows.step, rows.partial, config_.hidden);
}

void Transformer::EnterFfn(const Rows& rows, int layer) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  backend_.ExchangeAddNorm(
      rows.step, {rows.partial, rows.residual, /*first=*/false, w.post_attention_norm.get(),
                  static_cast<float>(config_.rms_norm_eps), config_.hidden, rows.own_normed});
  const GatherParams normed{rows.own_normed, rows.normed,
                            static_cast<size_t>(config_.hidden) * backend_.activation_bytes()};
  if (w.router == nullptr) return backend_.Gather(rows.step, {normed});
  const auto top_k = static_cast<size_t>(config_.top_k);
  RouteParams route{rows.own_normed,        *w.router,
                    *w.router_bias,         config_.hidden,
                    config_.num_experts,    config_.top_k,
                    config_.num_groups,     config_.top_groups,
                    config_.norm_topk_prob, static_cast<float>(config_.routed_scaling),
                    rows.own_experts,       rows.own_weights};
  route.shared_gate = w.dense.gate.get();
  route.shared_up = w.dense.up.get();
  backend_.Route(rows.step, route);
  backend_.Gather(rows.step, {normed,
                              {rows.own_experts, rows.experts, top_k * sizeof(int32_t)},
                              {rows.own_weights, rows.weights, top_k * sizeof(float)}});
}

RoutedFfnParams Transformer::RoutedParams(const Rows& rows, const LayerWeights& w) const {
  return {rows.normed, rows.experts, rows.weights, *w.experts, config_.top_k, rows.partial};
}

void Transformer::RoutedFfn(const Rows& rows, int layer, RoutedStage stage) {
  if (layer < 0) return;
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  if (w.router != nullptr) backend_.RoutedFfnStage(rows.step, RoutedParams(rows, w), stage);
}

void Transformer::EndLayer(const Rows& rows, int layer) {
  if (layer < 0) {
    const int first = layout_.vocab_per_rank() * backend_.communicator().rank(),
              count = std::clamp(config_.vocab - first, 0, layout_.vocab_per_rank());
    backend_.Embed(rows.step, {*weights_.embed, first, count, config_.hidden, rows.partial});
    return backend_.Send(rows.step, rows.partial, config_.hidden);
  }
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  RoutedFfn(rows, layer, RoutedStage::kDown);
  if (w.dense.gate == nullptr) {
    RoutedFfn(rows, layer, RoutedStage::kSum);
  } else {
    std::optional<RoutedFfnParams> routed;
    if (w.router != nullptr) routed.emplace(RoutedParams(rows, w));
    backend_.DenseFfn(rows.step,
                      {rows.normed, *w.dense.gate, *w.dense.up, *w.dense.down, config_.hidden,
                       routed ? layout_.shared_width() : layout_.dense_width(),
                       routed ? &*routed : nullptr, rows.partial});
  }
  backend_.Send(rows.step, rows.partial, config_.hidden);
}

void Transformer::SampleRows(const Rows& rows) {
  for (int first = 0; first < rows.step.num_logit_rows; first += limits_.max_logit_rows) {
    const int count = std::min(limits_.max_logit_rows, rows.step.num_logit_rows - first);
    backend_.Sample(rows.step,
                    {rows.residual, *weights_.norm, static_cast<float>(config_.rms_norm_eps),
                     *weights_.lm_head, config_.hidden, config_.vocab, layout_.vocab_per_rank(),
                     first, count, rows.chosen == nullptr ? nullptr : rows.chosen + first});
  }
}

}  // namespace statetap
