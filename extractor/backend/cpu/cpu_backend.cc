#include "extractor/backend/cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "extractor/backend/cpu/cpu_weights.h"
#include "extractor/backend/cpu/matmul.h"

namespace statetap {

std::vector<std::unique_ptr<Backend>> MakeCpuBackends(int world, int threads) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const auto group = std::make_shared<cpu::SharedGroup>(world);
  std::vector<std::unique_ptr<Backend>> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.push_back(std::make_unique<cpu::CpuBackend>(rank, group, std::max(1, threads / world)));
  }
  return ranks;
}

namespace cpu {

void RmsNorm(const float* x, const float* weight, int n, float eps, float* y) {
  // fp64, as the widest rows' sum of squares can leave fp32.
  double squares = 0;
  for (int i = 0; i < n; ++i) squares += double{x[i]} * x[i];
  const auto scale = static_cast<float>(1.0 / std::sqrt(squares / n + double{eps}));
  for (int i = 0; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

void* CpuBackend::Allocate(size_t bytes) {
  used_.workspace += static_cast<int64_t>(bytes);
  memory_.push_back(std::make_unique<std::byte[]>(bytes));
  return memory_.back().get();
}

void* CpuBackend::AllocateHost(size_t bytes) {
  used_.host += static_cast<int64_t>(bytes);
  memory_.push_back(std::make_unique<std::byte[]>(bytes));
  return memory_.back().get();
}

std::unique_ptr<Weight> CpuBackend::NewMatrix(int64_t rows, int64_t cols, DType stored) {
  used_.weights += rows * cols * static_cast<int64_t>(SizeOf(stored));
  return std::make_unique<Matrix>(rows, cols, stored);
}

std::unique_ptr<Weight> CpuBackend::NewExperts(const ExpertsShape& shape) {
  auto experts = std::make_unique<Experts>(shape);
  used_.weights += experts->size_bytes();
  return experts;
}

const void* CpuBackend::NewRotary(std::span<const float> inverse_frequencies, int num_positions) {
  auto rotary = std::make_unique<Rotary>();
  rotary->pairs = static_cast<int>(inverse_frequencies.size());
  for (int position = 0; position < num_positions; ++position) {
    for (const float frequency : inverse_frequencies) {
      const double angle = static_cast<float>(position) * frequency;
      rotary->cos.push_back(static_cast<float>(std::cos(angle)));
      rotary->sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  rotaries_.push_back(std::move(rotary));
  return rotaries_.back().get();
}

void CpuBackend::NewKvCache(int num_layers, int num_pages, int width) {
  num_pages_ = num_pages;
  cache_width_ = width;
  const size_t rows =
      static_cast<size_t>(num_layers) * static_cast<size_t>(num_pages) * kPageTokens;
  cache_.reset(static_cast<float*>(std::calloc(rows * static_cast<size_t>(width), sizeof(float))));
  if (cache_ == nullptr) throw std::bad_alloc();
  used_.kv_cache = static_cast<int64_t>(rows * static_cast<size_t>(width) * sizeof(float));
}

void CpuBackend::PlanScratch(const Limits& limits) {
  limits_ = limits;
  const auto tokens = static_cast<size_t>(limits.max_tokens);
  const auto rows = [&](int width) { return tokens * static_cast<size_t>(width); };
  sums_.resize(rows(limits.hidden));
  queries_.resize(rows(limits.query_dim));
  heads_.resize(rows(limits.heads_dim));
  attention_.resize(static_cast<size_t>(pool_.num_threads()) *
                    static_cast<size_t>(limits.max_context + 2 * limits.latent_dim));
  gate_.resize(rows(limits.max_width));
  up_.resize(rows(limits.max_width));
  gathered_.resize(rows(limits.hidden));
  expert_out_.resize(rows(limits.hidden));
  logits_.resize(2 * static_cast<size_t>(limits.max_logit_rows) *
                 static_cast<size_t>(limits.padded_vocab));
  for (const auto* buffer :
       {&sums_, &queries_, &heads_, &attention_, &gate_, &up_, &gathered_, &expert_out_, &logits_})
    used_.workspace += static_cast<int64_t>(buffer->size() * sizeof(float));
}

std::vector<Step> CpuBackend::BeginSteps(std::span<const StepPlan> plans, bool sharded) {
  std::vector<Step> steps = ShapesOf(plans, sharded, communicator_.rank(), communicator_.world());
  for (size_t i = 0; i < plans.size(); ++i) {
    steps[i].ids = plans[i].ids.data();
    steps[i].positions = plans[i].positions.data();
    steps[i].sequence = plans[i].sequence.data();
    steps[i].page_table = plans[i].page_table.data();
    steps[i].logit_rows = plans[i].logit_rows.data();
    steps[i].draws = plans[i].draws.data();
  }
  return steps;
}

void CpuBackend::Embed(const Step& step, const EmbedParams& p) {
  auto* partial = static_cast<float*>(p.partial);
  for (int t = 0; t < step.num_tokens; ++t) {
    float* row = partial + int64_t{t} * p.hidden;
    const int local = step.ids[t] - p.vocab_begin;
    if (local >= 0 && local < p.vocab_count) {
      AsMatrix(p.table).ReadRow(local, row);
    } else {
      std::fill_n(row, p.hidden, 0.0f);
    }
  }
}

void CpuBackend::ExchangeAddNorm(const Step& step, const ExchangeAddNormParams& p) {
  auto* residual = static_cast<float*>(p.residual);
  float* sums = p.first ? residual : sums_.data();
  communicator_.SumRows(static_cast<const float*>(p.partial), step.own, p.hidden, sums);
  std::vector<float> weight;
  if (p.weight != nullptr) weight = AsMatrix(*p.weight).ReadAll();
  pool_.ParallelFor(step.own.count, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = residual + t * p.hidden;
      if (!p.first) {
        for (int i = 0; i < p.hidden; ++i) row[i] += sums[t * p.hidden + i];
      }
      if (p.weight != nullptr)
        RmsNorm(row, weight.data(), p.hidden, p.eps, static_cast<float*>(p.normed) + t * p.hidden);
    }
  });
}

void CpuBackend::LatentProject(const Step& step, const LatentProjectParams& p) {
  const auto* x = static_cast<const float*>(p.x);
  auto* latents = static_cast<float*>(p.latents);
  const int row = p.query_dim + p.kv_lora + p.rope_dim;
  const auto project = [&](const Weight& weight, float* to) {
    const Matrix& matrix = AsMatrix(weight);
    MatMul({x, p.hidden, step.own.count, matrix.reader(), matrix.rows(), matrix.cols(), to, row},
           pool_);
  };
  if (p.q_a != nullptr) project(*p.q_a, latents);
  project(p.kv_a, latents + p.query_dim);
  std::vector<float> q_norm;
  if (p.q_a != nullptr) q_norm = AsMatrix(*p.q_a_norm).ReadAll();
  const std::vector<float> kv_norm = AsMatrix(p.kv_a_norm).ReadAll();
  for (int64_t t = 0; t < step.own.count; ++t) {
    float* query = latents + t * row;
    float* c = query + p.query_dim;
    if (p.q_a != nullptr) {
      RmsNorm(query, q_norm.data(), p.query_dim, p.eps, query);
    } else {
      std::copy_n(x + t * p.hidden, p.hidden, query);
    }
    RmsNorm(c, kv_norm.data(), p.kv_lora, p.eps, c);
  }
}

void CpuBackend::Gather(const Step& step, std::initializer_list<GatherParams> arrays) {
  if (!step.sharded) return;
  for (const GatherParams& p : arrays)
    communicator_.GatherRows(p.own, step.num_tokens, p.row_bytes, p.all);
}

void CpuBackend::Capture(const Step& step, const CaptureParams& p) {
  const auto* residual = static_cast<const float*>(p.residual);
  // Replicated: every rank holds every row, and one of them hands them out.
  if (!step.sharded && communicator_.rank() != 0) return;
  const int64_t count = int64_t{step.own.count} * p.hidden;
  uint16_t* to = p.to + int64_t{step.own.begin} * p.hidden;
  for (int64_t i = 0; i < count; ++i) to[i] = FloatToBf16(residual[i]);
}

}  // namespace cpu
}  // namespace statetap
