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
// (DeepSeek-V3 report, §2.1.2). Others get 0, as in the reference.
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
    std::fill_n(biased.begin() + static_cast<int64_t>(order[i] * size), size, 0.0f);
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

void CpuBackend::RoutedFfn(const Step& step, const RoutedFfnParams& p) {
  const Experts& slots = AsExperts(p.slots);
  const int hidden = slots.shape().hidden, width = slots.shape().width;
  const auto* x = static_cast<const float*>(p.x);
  auto* partial = static_cast<float*>(p.partial);
  std::fill_n(partial, int64_t{step.num_tokens} * hidden, 0.0f);
  struct Use {
    int64_t token;
    float weight;
  };
  std::vector<std::vector<Use>> uses(p.slot_of_expert.size());
  for (int64_t i = 0; i < int64_t{step.num_tokens} * p.top_k; ++i) {
    uses[static_cast<size_t>(p.experts[i])].push_back({i / p.top_k, p.weights[i]});
  }
  for (size_t expert = 0; expert < uses.size(); ++expert) {
    const int slot = p.slot_of_expert[expert];
    const auto count = static_cast<int64_t>(uses[expert].size());
    if (slot < 0 || count == 0) continue;
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(x + uses[expert][static_cast<size_t>(i)].token * hidden, hidden,
                  gathered_.data() + i * hidden);
    }
    MatMul({gathered_.data(), hidden, count, slots.reader(slot, Projection::kGate), width, hidden,
            gate_.data(), width},
           pool_);
    MatMul({gathered_.data(), hidden, count, slots.reader(slot, Projection::kUp), width, hidden,
            up_.data(), width},
           pool_);
    for (int64_t i = 0; i < count * width; ++i) {
      gate_[static_cast<size_t>(i)] =
          Silu(gate_[static_cast<size_t>(i)]) * up_[static_cast<size_t>(i)];
    }
    MatMul({gate_.data(), width, count, slots.reader(slot, Projection::kDown), hidden, width,
            expert_out_.data(), hidden},
           pool_);
    for (int64_t i = 0; i < count; ++i) {
      const Use& use = uses[expert][static_cast<size_t>(i)];
      Axpy(use.weight, expert_out_.data() + i * hidden, partial + use.token * hidden, hidden);
    }
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
  float* to = p.accumulate ? expert_out_.data() : partial;
  MatMul(
      {gate_.data(), p.width, tokens, AsMatrix(p.down).reader(), p.hidden, p.width, to, p.hidden},
      pool_);
  if (p.accumulate) {
    for (int64_t i = 0; i < tokens * p.hidden; ++i) partial[i] += to[i];
  }
}

}  // namespace statetap::cpu
