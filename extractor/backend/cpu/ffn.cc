// Router, routed experts, dense and shared FFN.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "extractor/backend/cpu/cpu_backend.h"
#include "extractor/backend/cpu/cpu_weights.h"
#include "extractor/backend/cpu/matmul.h"

namespace statetap::cpu {
namespace {

float Silu(float x) { return x / (1.0f + std::exp(-x)); }

// Keeps the groups worth most: a group's worth is the sum of its two best biased scores
// (DeepSeek-V3 report, §2.1.2). Others are out, whatever their bias: −∞, not 0.
void MaskGroups(std::span<float> biased, int num_groups, int top_groups) {
  const size_t size = biased.size() / static_cast<size_t>(num_groups);
  std::vector<float> worth(static_cast<size_t>(num_groups));
  for (size_t g = 0; g < worth.size(); ++g) {
    std::vector<float> group(biased.begin() + static_cast<int64_t>(g * size),
                             biased.begin() + static_cast<int64_t>((g + 1) * size));
    std::partial_sort(group.begin(),
                      group.begin() + std::min<int64_t>(2, static_cast<int64_t>(size)), group.end(),
                      std::greater<>());
    worth[g] = group[0] + (size > 1 ? group[1] : 0);
  }
  std::vector<size_t> order(worth.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return worth[a] > worth[b]; });
  for (size_t i = static_cast<size_t>(top_groups); i < order.size(); ++i) {
    std::fill_n(biased.begin() + static_cast<int64_t>(order[i] * size), size, -INFINITY);
  }
}

void RouteRow(const RouteParams& p, std::span<const float> bias, std::span<float> scores,
              int32_t* experts, float* weights) {
  for (float& score : scores) score = 1.0f / (1.0f + std::exp(-score));
  std::vector<float> biased(scores.begin(), scores.end());
  for (size_t e = 0; e < biased.size(); ++e) biased[e] += bias[e];
  if (p.num_groups > 1) MaskGroups(biased, p.num_groups, p.top_groups);
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  // NaN last, so that the order stays a strict weak one whatever the row holds.
  const auto key = [&](int32_t e) {
    const float value = biased[static_cast<size_t>(e)];
    return std::isnan(value) ? -INFINITY : value;
  };
  std::partial_sort(order.begin(), order.begin() + p.top_k, order.end(), [&](int32_t a, int32_t b) {
    const float x = key(a), y = key(b);
    return x != y ? x > y : a < b;
  });
  float sum = 0;
  for (int k = 0; k < p.top_k; ++k) {
    experts[k] = order[static_cast<size_t>(k)];
    weights[k] = scores[static_cast<size_t>(experts[k])];
    sum += weights[k];
  }
  for (int k = 0; k < p.top_k; ++k)
    weights[k] = (p.normalise ? weights[k] / (sum + 1e-20f) : weights[k]) * p.scaling;
}

}  // namespace

void CpuBackend::Route(const Step& step, const RouteParams& p) {
  const auto experts = static_cast<size_t>(p.num_experts);
  const std::vector<float> bias = AsMatrix(p.bias).ReadAll();
  std::vector<float> scores(static_cast<size_t>(step.own.count) * experts);
  const Matrix& gate = AsMatrix(p.gate);
  MatMul({static_cast<const float*>(p.x), p.hidden, step.own.count, gate.reader(), gate.rows(),
          gate.cols(), scores.data(), p.num_experts},
         pool_);
  for (int64_t t = 0; t < step.own.count; ++t) {
    RouteRow(p, bias, std::span(scores).subspan(static_cast<size_t>(t) * experts, experts),
             p.experts + t * p.top_k, p.weights + t * p.top_k);
  }
}

void CpuBackend::RoutedFfnStage(const Step& step, const RoutedFfnParams& p, RoutedStage stage) {
  if (stage != RoutedStage::kDown) return;
  const Experts& slots = AsExperts(p.slots);
  const int hidden = slots.shape().hidden, width = slots.shape().width;
  const std::vector<int32_t>& slot_of_expert = slots.shape().slot_of_expert;
  const auto* x = static_cast<const float*>(p.x);
  auto* partial = static_cast<float*>(p.partial);

  // Rows of this rank, sorted by expert: (expert, token, weight).
  struct Use {
    int32_t expert;
    int64_t token;
    float weight;
  };
  std::vector<Use> uses;
  for (int64_t i = 0; i < int64_t{step.num_tokens} * p.top_k; ++i) {
    if (slot_of_expert[static_cast<size_t>(p.experts[i])] >= 0)
      uses.push_back({p.experts[i], i / p.top_k, p.weights[i]});
  }
  std::stable_sort(uses.begin(), uses.end(),
                   [](const Use& a, const Use& b) { return a.expert < b.expert; });
  const auto count = static_cast<int64_t>(uses.size());
  std::vector<float> rows(static_cast<size_t>(count * hidden)),
      gate(static_cast<size_t>(count * width)), up(gate.size());
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(x + uses[static_cast<size_t>(i)].token * hidden, hidden, rows.data() + i * hidden);

  std::vector<MatMulParams> in, down;
  for (int64_t first = 0, end; first < count; first = end) {
    const int32_t expert = uses[static_cast<size_t>(first)].expert;
    for (end = first; end < count && uses[static_cast<size_t>(end)].expert == expert;) ++end;
    const int slot = slot_of_expert[static_cast<size_t>(expert)];
    const float* from = rows.data() + first * hidden;
    in.push_back({from, hidden, end - first, slots.reader(slot, Projection::kGate), width, hidden,
                  gate.data() + first * width, width});
    in.push_back({from, hidden, end - first, slots.reader(slot, Projection::kUp), width, hidden,
                  up.data() + first * width, width});
    down.push_back({gate.data() + first * width, width, end - first,
                    slots.reader(slot, Projection::kDown), hidden, width,
                    rows.data() + first * hidden, hidden});
  }
  MatMuls(in, pool_);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = Silu(gate[i]) * up[i];
  MatMuls(down, pool_);

  std::fill_n(partial, int64_t{step.num_tokens} * hidden, 0.0f);
  for (int64_t i = 0; i < count; ++i) {  // a token's experts in ascending order
    Axpy(uses[static_cast<size_t>(i)].weight, rows.data() + i * hidden,
         partial + uses[static_cast<size_t>(i)].token * hidden, hidden);
  }
}

void CpuBackend::DenseFfn(const Step& step, const DenseFfnParams& p) {
  const auto* x = static_cast<const float*>(p.x);
  auto* partial = static_cast<float*>(p.partial);
  const int64_t tokens = step.num_tokens;
  MatMul({x, p.hidden, tokens, AsMatrix(p.gate).reader(), p.width, p.hidden, gate_.data(), p.width},
         pool_);
  MatMul({x, p.hidden, tokens, AsMatrix(p.up).reader(), p.width, p.hidden, up_.data(), p.width},
         pool_);
  for (int64_t i = 0; i < tokens * p.width; ++i) {
    gate_[static_cast<size_t>(i)] =
        Silu(gate_[static_cast<size_t>(i)]) * up_[static_cast<size_t>(i)];
  }
  float* to = p.routed != nullptr ? expert_out_.data() : partial;
  MatMul(
      {gate_.data(), p.width, tokens, AsMatrix(p.down).reader(), p.hidden, p.width, to, p.hidden},
      pool_);
  if (p.routed != nullptr) {
    for (int64_t i = 0; i < tokens * p.hidden; ++i) partial[i] += to[i];
  }
}

}  // namespace statetap::cpu
