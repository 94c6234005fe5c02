// The head and the draw.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "extractor/backend/cpu/cpu_backend.h"
#include "extractor/backend/cpu/cpu_weights.h"
#include "extractor/backend/cpu/matmul.h"
#include "extractor/backend/philox.h"

namespace statetap::cpu {
namespace {

// The smallest set of most likely tokens with mass ≥ top_p, most likely first.
std::vector<int32_t> Nucleus(const std::vector<double>& probability, double top_p) {
  // All tokens below this share have less mass together than what the cut leaves out, so none of
  // them is in the set.
  const double least = (1 - top_p) / static_cast<double>(probability.size());
  std::vector<int32_t> ids;
  for (size_t id = 0; id < probability.size(); ++id) {
    if (probability[id] >= least) ids.push_back(static_cast<int32_t>(id));
  }
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return probability[static_cast<size_t>(a)] > probability[static_cast<size_t>(b)];
  });
  double mass = 0;
  size_t kept = 0;
  while (kept < ids.size() && mass < top_p) mass += probability[static_cast<size_t>(ids[kept++])];
  ids.resize(std::max<size_t>(kept, 1));
  return ids;
}

int32_t DrawFrom(std::span<const float> logits, float largest, const StepPlan::Draw& draw) {
  std::vector<double> probability(logits.size());
  double sum = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    sum += probability[i] = std::exp((double{logits[i]} - largest) / draw.temperature);
  }
  for (double& p : probability) p /= sum;
  std::vector<int32_t> ids;
  if (draw.top_p < 1) {
    ids = Nucleus(probability, draw.top_p);
  } else {
    ids.resize(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
  }
  double mass = 0;
  for (const int32_t id : ids) mass += probability[static_cast<size_t>(id)];
  double left = mass * UniformDraw(draw.seed, draw.key, static_cast<uint64_t>(draw.position));
  for (const int32_t id : ids) {
    left -= probability[static_cast<size_t>(id)];
    if (left < 0) return id;
  }
  return ids.back();  // rounding left a rest
}

ChosenToken Choose(std::span<const float> logits, const StepPlan::Draw& draw) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const float logit : logits) {
    if (!std::isfinite(logit)) return {0, kNaN, kNaN, 0, kNaN};
  }
  const auto best = std::max_element(logits.begin(), logits.end());  // the first of equals
  const double largest = *best;
  double sum = 0, weighted = 0;
  for (const float logit : logits) {
    const double weight = std::exp(logit - largest);
    sum += weight;
    weighted += weight * (logit - largest);
  }
  const auto best_id = static_cast<int32_t>(best - logits.begin());
  int32_t id = draw.given;
  if (id < 0) id = draw.temperature > 0 ? DrawFrom(logits, *best, draw) : best_id;
  const double log_sum = std::log(sum);
  return {id, static_cast<float>(logits[static_cast<size_t>(id)] - largest - log_sum),
          static_cast<float>(log_sum - weighted / sum), best_id, static_cast<float>(-log_sum)};
}

}  // namespace

void CpuBackend::Sample(const Step& step, const SampleParams& p) {
  const int world = communicator_.world();
  // Each logit row is normed by the rank that keeps it; the others add zeros.
  std::fill_n(gathered_.data(), int64_t{p.count} * p.hidden, 0.0f);
  const std::vector<float> weight = AsMatrix(p.norm).ReadAll();
  for (int i = 0; i < p.count; ++i) {
    const int row = step.logit_rows[p.first + i] - step.own.begin;
    const bool hands_out = step.sharded || communicator_.rank() == 0;
    if (!hands_out || row < 0 || row >= step.own.count) continue;
    RmsNorm(static_cast<const float*>(p.residual) + int64_t{row} * p.hidden, weight.data(),
            p.hidden, p.eps, gathered_.data() + int64_t{i} * p.hidden);
  }
  communicator_.SumRows(gathered_.data(), {0, p.count}, p.hidden, expert_out_.data());

  const Matrix& head = AsMatrix(p.lm_head);
  const int64_t padded = int64_t{p.vocab_per_rank} * world;
  float* own = logits_.data();                                 // [count, vocab_per_rank]
  float* by_rank = own + int64_t{p.count} * p.vocab_per_rank;  // [world, count, vocab_per_rank]
  MatMul({expert_out_.data(), p.hidden, p.count, head.reader(), head.rows(), head.cols(), own,
          p.vocab_per_rank},
         pool_);
  communicator_.GatherBlocks(
      own, static_cast<size_t>(p.count) * static_cast<size_t>(p.vocab_per_rank) * sizeof(float),
      by_rank);
  if (p.chosen == nullptr) return;
  pool_.ParallelFor(p.count, [&](int64_t begin, int64_t end, int) {
    std::vector<float> logits(static_cast<size_t>(padded));
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t rank = 0; rank < world; ++rank) {
        std::copy_n(by_rank + (rank * p.count + i) * p.vocab_per_rank, p.vocab_per_rank,
                    logits.data() + rank * p.vocab_per_rank);
      }
      p.chosen[i] =
          Choose(std::span(logits).first(static_cast<size_t>(p.vocab)), step.draws[p.first + i]);
    }
  });
}

}  // namespace statetap::cpu
