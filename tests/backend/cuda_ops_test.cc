// Each op of the CUDA backend against the CPU backend, from the same inputs (values of bf16),
// outputs poisoned.
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "extractor/backend/cpu/cpu_backend.h"
#include "tests/support/gpu.h"
#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using testing::DeviceArray;
using testing::FromBf16;
using testing::ToBf16;

// Relative to the norm of a row, or of an average row where that is more (narrow rows cancel). One
// rounding to bf16 is at most 2^-8 = 3.9e-3 of a value, 1.6e-3 in the norm of many. An op rounds
// its output and what lies between its products; where one product decides a whole row (width 1),
// the worst cases add up.
constexpr double kOneRounding = 4e-3;
constexpr double kSeveralRoundings = 1.2e-2;
// Query, absorbed query or key, softmax weights, weighted latent, heads, output.
constexpr double kAttentionRoundings = 1.6e-2;

// More than a grid's second and third dimension hold.
constexpr int kManyRows = 70'000;

std::mt19937 random_engine(std::random_device{}());  // NOLINT: fresh inputs each run

// Values of bf16.
std::vector<float> Random(int64_t n, float scale = 1) {
  std::vector<float> values(static_cast<size_t>(n));
  std::normal_distribution<float> normal(0, scale);
  for (float& value : values) value = Bf16ToFloat(FloatToBf16(normal(random_engine)));
  return values;
}

double Norm(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += double{value} * value;
  return std::sqrt(sum);
}

// Every row of `width` values.
void ExpectRows(const std::vector<float>& ours, const std::vector<float>& expected, int width,
                double tolerance, std::string_view what) {
  ASSERT_EQ(ours.size(), expected.size());
  if (ours.empty()) return;
  const auto size = static_cast<size_t>(width);
  const double average = Norm(expected) / std::sqrt(static_cast<double>(ours.size() / size));
  double worst = 0;
  for (size_t at = 0; at < ours.size() && !std::isnan(worst); at += size) {
    std::vector<float> error(ours.begin() + static_cast<int64_t>(at),
                             ours.begin() + static_cast<int64_t>(at + size));
    for (size_t i = 0; i < size; ++i) error[i] -= expected[at + i];
    const double norm = std::max(average, Norm(std::span(expected).subspan(at, size)));
    const double relative = norm == 0 ? Norm(error) : Norm(error) / norm;
    if (!(relative <= worst)) worst = relative;  // NaN too
  }
  EXPECT_LE(worst, tolerance) << what;
}

StepPlan PlanOf(int num_tokens) {
  StepPlan plan;
  plan.num_seqs = 1;
  plan.pages_per_seq = (num_tokens + kPageTokens - 1) / kPageTokens;
  for (int page = 0; page < plan.pages_per_seq; ++page)
    plan.page_table.push_back(plan.pages_per_seq - 1 - page);
  for (int t = 0; t < num_tokens; ++t) {
    plan.ids.push_back(t);
    plan.positions.push_back(t);
    plan.sequence.push_back(0);
  }
  return plan;
}

// A weight on both sides.
struct Twin {
  std::unique_ptr<Weight> cpu, gpu;
};

class CudaOpsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    gpu_ = std::move(MakeCudaBackends(1, {})[0]);
    cpu_ = std::move(MakeCpuBackends(1, 0)[0]);
  }

  Twin Matrix(const std::vector<float>& values, int64_t rows, int64_t cols,
              DType stored = DType::kBf16) {
    Twin twin{cpu_->NewMatrix(rows, cols, stored), gpu_->NewMatrix(rows, cols, stored)};
    const auto bits = ToBf16(values);
    const auto* from = stored == DType::kBf16 ? reinterpret_cast<const std::byte*>(bits.data())
                                              : reinterpret_cast<const std::byte*>(values.data());
    const auto stride = static_cast<int64_t>(static_cast<size_t>(cols) * SizeOf(stored));
    for (Weight* weight : {twin.cpu.get(), twin.gpu.get()}) weight->Fill(0, 0, rows, from, stride);
    gpu_->FinishWeights();
    return twin;
  }
  Twin RandomMatrix(int64_t rows, int64_t cols, float scale) {
    return Matrix(Random(rows * cols, scale), rows, cols);
  }
  void PlanScratch(const Backend::Limits& limits) {
    cpu_->PlanScratch(limits);
    gpu_->PlanScratch(limits);
  }
  std::vector<float> Get(const DeviceArray<uint16_t>& array) {
    gpu_->Finish();
    return FromBf16(array.Get());
  }

  std::unique_ptr<Backend> cpu_, gpu_;
};

TEST_F(CudaOpsTest, EmbedAndExchange) {
  for (const int hidden : {1, 7, 128, 7168}) {
    for (const int tokens : {0, 1, 5, 300, kManyRows}) {
      if (tokens == kManyRows && hidden > 10) continue;
      constexpr int kVocab = 50, kFirst = 20;  // of 320 ids; the others are other ranks'
      Backend::Limits limits;
      limits.max_tokens = std::max(1, tokens);
      limits.hidden = hidden;
      PlanScratch(limits);
      const Twin table = RandomMatrix(kVocab, hidden, 1),
                 norm = Matrix(Random(hidden), 1, hidden, DType::kF32);
      const auto size = static_cast<size_t>(tokens * hidden);
      const StepPlan plan = PlanOf(tokens);
      const Step on_cpu = cpu_->Begin(plan, false), on_gpu = gpu_->Begin(plan, false);
      std::vector<float> partial(size, NAN), residual(size, NAN), normed(size, NAN);
      DeviceArray<uint16_t> gpu_partial(size), gpu_residual(size), gpu_normed(size);
      cpu_->Embed(on_cpu, {*table.cpu, kFirst, kVocab, hidden, partial.data()});
      gpu_->Embed(on_gpu, {*table.gpu, kFirst, kVocab, hidden, gpu_partial.data()});
      EXPECT_EQ(Get(gpu_partial), partial);
      for (const bool first : {true, false, false}) {
        cpu_->ExchangeAddNorm(on_cpu, {partial.data(), residual.data(), first, norm.cpu.get(),
                                       1e-5f, hidden, normed.data()});
        gpu_->ExchangeAddNorm(on_gpu, {gpu_partial.data(), gpu_residual.data(), first,
                                       norm.gpu.get(), 1e-5f, hidden, gpu_normed.data()});
        ExpectRows(Get(gpu_residual), residual, hidden, first ? 0 : kOneRounding, "residual");
        ExpectRows(Get(gpu_normed), normed, hidden, kSeveralRoundings, "normed");
        // On both sides from the same values of bf16 again: sums may cancel.
        for (float& value : residual) value = Bf16ToFloat(FloatToBf16(value));
        gpu_residual.Set(ToBf16(residual));
        partial = Random(static_cast<int64_t>(size));
        gpu_partial.Set(ToBf16(partial));
      }
    }
  }
}

TEST_F(CudaOpsTest, LatentProject) {
  struct Shape {
    int hidden, query, lora, rope;
  };
  for (const Shape& s : {Shape{128, 96, 64, 16}, Shape{7168, 1536, 512, 64}, Shape{9, 5, 3, 2}}) {
    for (const bool with_query : {true, false}) {
      const int query = with_query ? s.query : s.hidden, row = query + s.lora + s.rope;
      const float scale = 1 / std::sqrt(static_cast<float>(s.hidden));
      const Twin q_a = RandomMatrix(query, s.hidden, scale),
                 kv_a = RandomMatrix(s.lora + s.rope, s.hidden, scale),
                 q_norm = Matrix(Random(query), 1, query),
                 kv_norm = Matrix(Random(s.lora), 1, s.lora);
      for (const int tokens : {1, 33, 300, kManyRows}) {
        if (tokens == kManyRows && s.hidden > 10) continue;
        const StepPlan plan = PlanOf(tokens);
        const auto x = Random(int64_t{tokens} * s.hidden);
        std::vector<float> latents(static_cast<size_t>(tokens * row), NAN);
        const DeviceArray<uint16_t> gpu_x(ToBf16(x));
        DeviceArray<uint16_t> gpu_latents(latents.size());
        cpu_->LatentProject(
            cpu_->Begin(plan, false),
            {x.data(), with_query ? q_a.cpu.get() : nullptr, q_norm.cpu.get(), *kv_a.cpu,
             *kv_norm.cpu, 1e-6f, s.hidden, query, s.lora, s.rope, latents.data()});
        gpu_->LatentProject(
            gpu_->Begin(plan, false),
            {gpu_x.data(), with_query ? q_a.gpu.get() : nullptr, q_norm.gpu.get(), *kv_a.gpu,
             *kv_norm.gpu, 1e-6f, s.hidden, query, s.lora, s.rope, gpu_latents.data()});
        ExpectRows(Get(gpu_latents), latents, row, kSeveralRoundings,
                   fmt::format("hidden {} tokens {}", s.hidden, tokens));
      }
    }
  }
}

using Kernels = CudaOptions::Kernels;

struct AttentionShape {
  int heads, query, lora, nope, rope, v, hidden;
  Kernels kernels = Kernels::kAuto;
};

class CudaAttentionTest : public CudaOpsTest, public ::testing::WithParamInterface<AttentionShape> {
 protected:
  struct Sequence {
    int done = 0;  // positions in the cache
    std::vector<float> latents;
  };

  void Open(int max_tokens) {
    const AttentionShape& s = GetParam();
    gpu_ = std::move(MakeCudaBackends(1, {s.kernels})[0]);
    row_ = s.query + s.lora + s.rope;
    const auto scale = [](int k) { return 1 / std::sqrt(static_cast<float>(k)); };
    q_b_ = RandomMatrix(s.heads * (s.nope + s.rope), s.query, scale(s.query));
    kv_b_ = RandomMatrix(s.heads * (s.nope + s.v), s.lora, scale(s.lora));
    o_ = RandomMatrix(s.hidden, s.heads * s.v, scale(s.heads * s.v));
    std::vector<float> frequencies;
    for (int i = 0; i < s.rope / 2; ++i)
      frequencies.push_back(std::pow(0.5f, static_cast<float>(i)));
    cpu_rotary_ = cpu_->NewRotary(frequencies, kContext);
    gpu_rotary_ = gpu_->NewRotary(frequencies, kContext);
    cpu_->NewKvCache(2, kPages, s.lora + s.rope);
    gpu_->NewKvCache(2, kPages, s.lora + s.rope);
    Backend::Limits limits;
    limits.max_tokens = max_tokens;
    limits.max_context = kContext;
    limits.hidden = s.hidden;
    limits.num_heads = s.heads;
    limits.query_dim = s.heads * (s.nope + s.rope);
    limits.heads_dim = s.heads * s.v;
    limits.latent_dim = s.lora + s.rope;
    limits.rope_dim = s.rope;
    PlanScratch(limits);
  }

  // The next counts[i] tokens of sequence i. Pages of sequence i: i, i + num_seqs, …
  StepPlan Next(std::vector<Sequence>& sequences, const std::vector<int>& counts,
                std::vector<float>& latents) const {
    StepPlan plan;
    const auto n = static_cast<int>(sequences.size());
    plan.num_seqs = n;
    plan.pages_per_seq = kPages / n;
    for (int i = 0; i < n; ++i) {
      Sequence& sequence = sequences[static_cast<size_t>(i)];
      // A single token behind others is one that was drawn.
      plan.decodes.push_back(sequence.done > 0 && counts[static_cast<size_t>(i)] == 1);
      for (int page = 0; page < plan.pages_per_seq; ++page) plan.page_table.push_back(page * n + i);
      for (int t = 0; t < counts[static_cast<size_t>(i)]; ++t) {
        plan.ids.push_back(0);
        plan.positions.push_back(sequence.done);
        plan.sequence.push_back(i);
        const auto from = sequence.latents.begin() + int64_t{sequence.done++} * row_;
        latents.insert(latents.end(), from, from + row_);
      }
    }
    return plan;
  }

  std::vector<float> OnCpu(const StepPlan& plan, const std::vector<float>& latents) {
    const AttentionShape& s = GetParam();
    std::vector<float> partial(static_cast<size_t>(plan.num_tokens() * s.hidden), NAN);
    cpu_->Attention(cpu_->Begin(plan, false),
                    {latents.data(), *q_b_.cpu, *kv_b_.cpu, *o_.cpu, cpu_rotary_, 1, s.heads,
                     s.query, s.lora, s.nope, s.rope, s.v, s.hidden, kScale, partial.data()});
    return partial;
  }
  std::vector<float> OnGpu(const StepPlan& plan, const std::vector<float>& latents) {
    const AttentionShape& s = GetParam();
    const DeviceArray<uint16_t> gpu_latents(ToBf16(latents));
    DeviceArray<uint16_t> partial(static_cast<size_t>(plan.num_tokens() * s.hidden));
    gpu_->Attention(gpu_->Begin(plan, false),
                    {gpu_latents.data(), *q_b_.gpu, *kv_b_.gpu, *o_.gpu, gpu_rotary_, 1, s.heads,
                     s.query, s.lora, s.nope, s.rope, s.v, s.hidden, kScale, partial.data()});
    return Get(partial);
  }
  Sequence NewSequence(int length) const { return {0, Random(int64_t{length} * row_)}; }

  static constexpr int kPages = 24, kContext = 8 * kPageTokens;
  static constexpr float kScale = 0.15f;
  int row_ = 0;
  Twin q_b_, kv_b_, o_;
  const void *cpu_rotary_ = nullptr, *gpu_rotary_ = nullptr;
};

TEST_P(CudaAttentionTest, ChunksAndDecodeOfSeveralSequences) {
  Open(500);
  std::vector<Sequence> sequences;
  for (const int length : {510, 70, 3}) sequences.push_back(NewSequence(length));
  for (const std::vector<int>& counts :
       {std::vector<int>{390, 64, 1}, {1, 1, 1}, {100, 1, 0}, {1, 0, 1}, {18, 4, 0}}) {
    std::vector<float> latents;
    const StepPlan plan = Next(sequences, counts, latents);
    ExpectRows(OnGpu(plan, latents), OnCpu(plan, latents), GetParam().hidden, kAttentionRoundings,
               fmt::format("{} tokens", plan.num_tokens()));
  }
}

// A sequence of 300 tokens, alone and beside another: as a prompt in chunks, then 30 drawn tokens.
// Prompt rows are the same bits in any chunks, drawn ones in any company.
TEST_P(CudaAttentionTest, ARowDoesNotDependOnTheStepItIsIn) {
  Open(400);
  const Sequence sequence = NewSequence(300), other = NewSequence(160);
  std::vector<std::vector<float>> results;
  for (const int chunk : {270, 1, 50, 133}) {
    for (const bool beside : {false, true}) {
      std::vector<Sequence> sequences = {sequence};
      if (beside) sequences.push_back(other);
      std::vector<float> all;
      while (sequences[0].done < 300) {
        const bool prompt = sequences[0].done < 270;
        std::vector<int> counts = {prompt ? std::min(chunk, 270 - sequences[0].done) : 1};
        if (beside) counts.push_back(std::min(35, 160 - sequences[1].done));
        std::vector<float> latents;
        StepPlan plan = Next(sequences, counts, latents);
        plan.decodes[0] = !prompt;
        const auto rows = OnGpu(plan, latents);
        all.insert(all.end(), rows.begin(), rows.begin() + int64_t{counts[0]} * GetParam().hidden);
      }
      results.push_back(std::move(all));
    }
  }
  for (const auto& result : results) EXPECT_TRUE(result == results[0]);
}

// A key that is not finite belongs to the rows that see it. Others' masked weights are 0, and
// 0 · NaN is NaN.
TEST_P(CudaAttentionTest, WhatIsNotFiniteStaysBehindItsToken) {
  Open(300);
  constexpr int kLength = 300, kBad = 77;
  for (const float bad : {NAN, INFINITY}) {
    Sequence clean = NewSequence(kLength), spoilt = clean;
    const AttentionShape& s = GetParam();
    for (int c = 0; c < s.lora; c += 3)
      spoilt.latents[static_cast<size_t>(kBad * row_ + s.query + c)] = bad;
    std::vector<std::vector<float>> results;
    for (const Sequence& sequence : {clean, spoilt}) {
      std::vector<Sequence> sequences = {sequence};
      std::vector<float> latents;
      StepPlan plan = Next(sequences, {kLength}, latents);
      results.push_back(OnGpu(plan, latents));
    }
    const auto hidden = static_cast<size_t>(s.hidden);
    EXPECT_TRUE(
        std::equal(results[0].begin(), results[0].begin() + kBad * s.hidden, results[1].begin()));
    for (size_t t = kBad; t < kLength; ++t) {
      bool finite = true;
      for (size_t c = 0; c < hidden; ++c)
        finite = finite && std::isfinite(results[1][t * hidden + c]);
      EXPECT_FALSE(finite) << "token " << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, CudaAttentionTest,
                         ::testing::Values(AttentionShape{8, 96, 64, 32, 16, 32, 128},  // tiny-kimi
                                           AttentionShape{1, 96, 64, 32, 16, 32, 128},
                                           AttentionShape{8, 1536, 512, 128, 64, 128, 256},  // real
                                           AttentionShape{8, 1536, 512, 128, 64, 128, 256,
                                                          Kernels::kPortable},
                                           AttentionShape{64, 64, 512, 128, 64, 128, 64},
                                           AttentionShape{70, 24, 40, 8, 8, 16, 32},
                                           AttentionShape{3, 5, 23, 7, 2, 6, 11}));

TEST_F(CudaOpsTest, Route) {
  struct Shape {
    int hidden, experts, top_k, groups, top_groups;
    bool normalise;
  };
  for (const Shape& s : {Shape{7168, 384, 8, 1, 1, true}, Shape{128, 16, 4, 1, 1, true},
                         Shape{64, 16, 3, 4, 2, true}, Shape{33, 7, 7, 1, 1, false},
                         Shape{64, 256, 8, 8, 4, false}, Shape{8, 1, 1, 1, 1, true}}) {
    const Twin gate =
        RandomMatrix(s.experts, s.hidden, 1 / std::sqrt(static_cast<float>(s.hidden)));
    const Twin bias = Matrix(Random(s.experts, 0.1f), 1, s.experts, DType::kF32);
    Backend::Limits limits;
    limits.max_tokens = kManyRows;
    limits.num_experts = s.experts;
    limits.top_k = s.top_k;
    limits.hidden = s.hidden;
    PlanScratch(limits);
    for (const int tokens : {1, 6, 500, kManyRows}) {
      if (tokens == kManyRows && s.hidden > 40) continue;
      auto x = Random(int64_t{tokens} * s.hidden);
      if (tokens == 6) x[static_cast<size_t>(3 * s.hidden)] = NAN;
      const auto pairs = static_cast<size_t>(tokens * s.top_k);
      std::vector<int32_t> experts(pairs);
      std::vector<float> weights(pairs);
      const DeviceArray<uint16_t> gpu_x(ToBf16(x));
      DeviceArray<int32_t> gpu_experts(pairs);
      DeviceArray<float> gpu_weights(pairs);
      const StepPlan plan = PlanOf(tokens);
      const RouteParams params{x.data(),    *gate.cpu, *bias.cpu,      s.hidden,
                               s.experts,   s.top_k,   s.groups,       s.top_groups,
                               s.normalise, 2.5f,      experts.data(), weights.data()};
      cpu_->Route(cpu_->Begin(plan, false), params);
      gpu_->Route(gpu_->Begin(plan, false),
                  {gpu_x.data(), *gate.gpu, *bias.gpu, s.hidden, s.experts, s.top_k, s.groups,
                   s.top_groups, s.normalise, 2.5f, gpu_experts.data(), gpu_weights.data()});
      gpu_->Finish();
      const auto our_experts = gpu_experts.Get();
      const auto our_weights = gpu_weights.Get();
      int other = 0;
      for (int t = 0; t < tokens; ++t) {
        const auto at = t * s.top_k, end = at + s.top_k;
        if (!std::equal(our_experts.begin() + at, our_experts.begin() + end,
                        experts.begin() + at)) {
          ++other;  // fp32 in another order met a near tie
          continue;
        }
        for (int i = at; i < end; ++i) {
          const auto k = static_cast<size_t>(i);
          if (std::isnan(weights[k])) {
            EXPECT_TRUE(std::isnan(our_weights[k]));
          } else {
            EXPECT_NEAR(our_weights[k], weights[k], 1e-5 + 1e-4 * std::abs(weights[k]));
          }
        }
      }
      EXPECT_LE(other, tokens / 100) << s.experts << " experts, " << tokens << " tokens";
    }
  }
}

TEST_F(CudaOpsTest, RouteBreaksTiesToTheLowerIndex) {
  const Twin gate = Matrix(std::vector<float>(12 * 4, 0), 12, 4);
  std::vector<float> biases(12, 0);
  biases[5] = biases[9] = 1;
  const Twin bias = Matrix(biases, 1, 12, DType::kF32);
  Backend::Limits limits;
  limits.max_tokens = 1;
  limits.num_experts = 12;
  limits.top_k = 4;
  PlanScratch(limits);
  const DeviceArray<uint16_t> x(std::vector<uint16_t>(4, 0));
  DeviceArray<int32_t> experts(4);
  DeviceArray<float> weights(4);
  const StepPlan plan = PlanOf(1);
  gpu_->Route(gpu_->Begin(plan, false), {x.data(), *gate.gpu, *bias.gpu, 4, 12, 4, 1, 1, false, 1,
                                         experts.data(), weights.data()});
  gpu_->Finish();
  EXPECT_EQ(experts.Get(), (std::vector<int32_t>{5, 9, 0, 1}));
  EXPECT_EQ(weights.Get(), std::vector<float>(4, 0.5f));
}

struct ExpertsCase {
  const char* name;
  int hidden, width, num_experts, slots, top_k;
  bool int4;
  enum class Spread { kUniform, kOne, kElsewhere } spread = Spread::kUniform;
};

class CudaRoutedFfnTest : public CudaOpsTest,
                          public ::testing::WithParamInterface<std::tuple<Kernels, ExpertsCase>> {
 protected:
  static const ExpertsCase& Case() { return std::get<1>(GetParam()); }
  // False where the GPU has not the family.
  bool Open(int max_tokens) {
    const ExpertsCase& c = Case();
    try {
      gpu_ = std::move(MakeCudaBackends(1, {std::get<0>(GetParam())})[0]);
    } catch (const std::exception& error) {
      fmt::print("not tested: {}\n", error.what());
      return false;
    }
    ExpertsShape shape{c.slots, c.hidden, c.width, c.int4, DType::kBf16, DType::kBf16, {}};
    // This rank's are every other expert, so that slot and expert differ.
    int next = 0;
    for (int e = 0; e < c.num_experts; ++e)
      shape.slot_of_expert.push_back(
          next < c.slots && (c.slots == c.num_experts || e % 2 == 1) ? next++ : -1);
    EXPECT_EQ(next, c.slots);
    experts_ = {cpu_->NewExperts(shape), gpu_->NewExperts(shape)};
    for (int slot = 0; slot < c.slots; ++slot) {
      for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
        const bool down = projection == Projection::kDown;
        const int out = down ? c.hidden : c.width, in = down ? c.width : c.hidden;
        // All 16 codes occur in any 64 nibbles or so.
        const float scale = 1 / std::sqrt(static_cast<float>(in)) / (c.int4 ? 4.6f : 1.0f);
        if (c.int4) {
          std::vector<uint32_t> words(static_cast<size_t>(out) * static_cast<size_t>(in / 8));
          for (uint32_t& word : words) word = static_cast<uint32_t>(random_engine());
          Fill(ExpertPart(slot, projection, false), out, words);
          std::vector<float> scales = Random(int64_t{out} * in / 32, 0.2f * scale);
          for (float& value : scales) value += scale;
          Fill(ExpertPart(slot, projection, true), out, ToBf16(scales));
        } else {
          Fill(ExpertPart(slot, projection, false), out, ToBf16(Random(int64_t{out} * in, scale)));
        }
      }
    }
    gpu_->FinishWeights();
    Backend::Limits limits;
    limits.max_tokens = max_tokens;
    limits.hidden = c.hidden;
    limits.max_width = std::max(c.width, 256);
    limits.num_experts = c.num_experts;
    limits.top_k = c.top_k;
    PlanScratch(limits);
    return true;
  }

  // In two pieces, the second first, as a loader may.
  template <typename T>
  void Fill(int part, int rows, const std::vector<T>& values) {
    const size_t row = values.size() / static_cast<size_t>(rows);
    const auto stride = static_cast<int64_t>(row * sizeof(T));
    const int half = rows / 2;
    for (Weight* weight : {experts_.cpu.get(), experts_.gpu.get()}) {
      const auto* from = reinterpret_cast<const std::byte*>(values.data());
      weight->Fill(part, half, rows - half, from + half * stride, stride);
      weight->Fill(part, 0, half, from, stride);
    }
  }

  std::pair<std::vector<int32_t>, std::vector<float>> Routes(int tokens) const {
    const ExpertsCase& c = Case();
    std::vector<int32_t> experts;
    std::vector<float> weights;
    for (int t = 0; t < tokens; ++t) {
      std::vector<int32_t> order(static_cast<size_t>(c.num_experts));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random_engine);
      const auto front = [&](int expert) {
        std::iter_swap(order.begin(), std::find(order.begin(), order.end(), expert));
      };
      if (c.spread == ExpertsCase::Spread::kOne) front(1);
      if (c.spread == ExpertsCase::Spread::kElsewhere)
        std::stable_partition(order.begin(), order.end(), [](int e) { return e % 2 == 0; });
      for (int k = 0; k < c.top_k; ++k) {
        experts.push_back(order[static_cast<size_t>(k)]);
        weights.push_back(std::uniform_real_distribution<float>(0.1f, 1)(random_engine));
      }
    }
    return {experts, weights};
  }

  std::vector<float> OnGpu(const std::vector<float>& x, const std::vector<int32_t>& experts,
                           const std::vector<float>& weights, int tokens) {
    const DeviceArray<uint16_t> gpu_x(ToBf16(x));
    const DeviceArray<int32_t> gpu_experts(experts);
    const DeviceArray<float> gpu_weights(weights);
    DeviceArray<uint16_t> partial(x.size());
    const StepPlan plan = PlanOf(tokens);
    gpu_->RoutedFfn(gpu_->Begin(plan, false), {gpu_x.data(), gpu_experts.data(), gpu_weights.data(),
                                               *experts_.gpu, Case().top_k, partial.data()});
    return Get(partial);
  }

  Twin experts_;
};

TEST_P(CudaRoutedFfnTest, EqualsTheCpuAtEverySize) {
  const ExpertsCase& c = Case();
  // 600 tokens among many experts: some rows for each, which Hopper has a form for.
  // 6,000 among few: more pairs than one block sorts.
  const std::vector<int> sizes = c.hidden < 1000            ? std::vector<int>{1, 3, 65, 700, 6000}
                                 : c.slots == c.num_experts ? std::vector<int>{1, 50}
                                                            : std::vector<int>{1, 50, 600};
  if (!Open(sizes.back())) GTEST_SKIP();
  for (const int tokens : sizes) {
    const auto x = Random(int64_t{tokens} * c.hidden);
    const auto [experts, weights] = Routes(tokens);
    std::vector<float> partial(x.size(), NAN);
    const StepPlan plan = PlanOf(tokens);
    cpu_->RoutedFfn(cpu_->Begin(plan, false), {x.data(), experts.data(), weights.data(),
                                               *experts_.cpu, c.top_k, partial.data()});
    ExpectRows(OnGpu(x, experts, weights, tokens), partial, c.hidden, kSeveralRoundings,
               fmt::format("{} tokens", tokens));
  }
}

// Tiles of every height: a token's bits alone and among many.
TEST_P(CudaRoutedFfnTest, ARowDoesNotDependOnTheStepItIsIn) {
  const ExpertsCase& c = Case();
  const int tokens = c.hidden > 1000 ? 600 : 9000;
  if (!Open(tokens)) GTEST_SKIP();
  const auto x = Random(int64_t{tokens} * c.hidden);
  const auto [experts, weights] = Routes(tokens);
  const auto together = OnGpu(x, experts, weights, tokens);
  for (const int count : {1, 20, 130}) {
    const auto part = [&](const auto& values, int width) {
      return std::vector(values.end() - int64_t{count} * width, values.end());
    };
    const auto alone =
        OnGpu(part(x, c.hidden), part(experts, c.top_k), part(weights, c.top_k), count);
    EXPECT_TRUE(alone == part(together, c.hidden)) << count << " tokens";
  }
}

// The shared experts behind the routed ones: widths that Hopper takes in one pass with their sum
// (64, 128, 192 and 256), and one that it does not; rows that decode in front of prompts.
TEST_P(CudaRoutedFfnTest, SharedExpertsComeOnTop) {
  const ExpertsCase& c = Case();
  const int most = c.hidden < 1000 ? 700 : 300;
  if (!Open(most)) GTEST_SKIP();
  for (const int width : {256, 192, 128, 64, 40}) {
    if (c.hidden > 1000 && width != 256 && width != 40) continue;
    const Twin gate = RandomMatrix(width, c.hidden, 1 / std::sqrt(static_cast<float>(c.hidden))),
               up = RandomMatrix(width, c.hidden, 1 / std::sqrt(static_cast<float>(c.hidden))),
               down = RandomMatrix(c.hidden, width, 1 / std::sqrt(static_cast<float>(width)));
    const auto on_gpu = [&](const StepPlan& plan, const std::vector<float>& x,
                            const std::vector<int32_t>& experts,
                            const std::vector<float>& weights) {
      const DeviceArray<uint16_t> gpu_x(ToBf16(x));
      const DeviceArray<int32_t> gpu_experts(experts);
      const DeviceArray<float> gpu_weights(weights);
      DeviceArray<uint16_t> partial(x.size());
      const Step step = gpu_->Begin(plan, false);
      const RoutedFfnParams routed{
          gpu_x.data(), gpu_experts.data(), gpu_weights.data(), *experts_.gpu,
          c.top_k,      partial.data()};
      gpu_->RoutedFfnStage(step, routed, RoutedStage::kGateUpFirst);
      gpu_->RoutedFfnStage(step, routed, RoutedStage::kDown);
      gpu_->DenseFfn(step, {gpu_x.data(), *gate.gpu, *up.gpu, *down.gpu, c.hidden, width, &routed,
                            partial.data()});
      return Get(partial);
    };
    for (const int tokens : {1, 37, 257, most}) {
      for (const int decoding : {0, 5}) {
        if (decoding >= tokens) continue;
        StepPlan plan = PlanOf(tokens);
        plan.num_seqs = decoding + 1;
        plan.decodes.assign(static_cast<size_t>(decoding), 1);
        plan.decodes.push_back(0);
        for (int t = 0; t < tokens; ++t)
          plan.sequence[static_cast<size_t>(t)] = std::min(t, decoding);
        plan.page_table.resize(static_cast<size_t>(plan.num_seqs * plan.pages_per_seq));
        const auto x = Random(int64_t{tokens} * c.hidden);
        const auto [experts, weights] = Routes(tokens);
        std::vector<float> partial(x.size(), NAN);
        const Step step = cpu_->Begin(plan, false);
        const RoutedFfnParams routed{x.data(),      experts.data(), weights.data(),
                                     *experts_.cpu, c.top_k,        partial.data()};
        cpu_->RoutedFfnStage(step, routed, RoutedStage::kDown);
        cpu_->DenseFfn(step, {x.data(), *gate.cpu, *up.cpu, *down.cpu, c.hidden, width, &routed,
                              partial.data()});
        const auto together = on_gpu(plan, x, experts, weights);
        ExpectRows(together, partial, c.hidden, kSeveralRoundings,
                   fmt::format("{} tokens, {} decode, width {}", tokens, decoding, width));
        const int alone = std::min(20, tokens - decoding);
        const auto last = [&](const auto& values, int columns) {
          return std::vector(values.end() - int64_t{alone} * columns, values.end());
        };
        EXPECT_TRUE(on_gpu(PlanOf(alone), last(x, c.hidden), last(experts, c.top_k),
                           last(weights, c.top_k)) == last(together, c.hidden))
            << tokens << " tokens, " << decoding << " decode, width " << width;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Every, CudaRoutedFfnTest,
    ::testing::Combine(
        ::testing::Values(Kernels::kPortable, Kernels::kHopper),
        ::testing::Values(
            ExpertsCase{"tiny", 128, 256, 16, 16, 4, true},
            ExpertsCase{"tiny_slice", 128, 32, 16, 16, 4, true},
            ExpertsCase{"three_blocks_of_k", 192, 192, 16, 16, 4, true},
            ExpertsCase{"half_the_experts", 128, 256, 16, 8, 4, true},
            ExpertsCase{"one_hot_expert", 128, 96, 16, 8, 2, true, ExpertsCase::Spread::kOne},
            ExpertsCase{"none_here", 64, 64, 16, 8, 3, true, ExpertsCase::Spread::kElsewhere},
            ExpertsCase{"bf16", 64, 48, 8, 4, 2, false},
            ExpertsCase{"bf16_odd", 24, 13, 6, 3, 2, false},
            ExpertsCase{"real_expert_layout", 7168, 2048, 384, 5, 8, true},
            ExpertsCase{"real_tensor_layout", 7168, 256, 24, 24, 8, true})),
    [](const auto& info) {
      const bool hopper = std::get<0>(info.param) == Kernels::kHopper;
      return fmt::format("{}_{}", std::get<1>(info.param).name, hopper ? "hopper" : "portable");
    });

// More than 2^31 values between the products: 320,000 rows, 7,168 wide.
class CudaLargeRoutedFfnTest : public CudaRoutedFfnTest {};

TEST_P(CudaLargeRoutedFfnTest, LastRowsAreAsAlone) {
  constexpr int kTokens = 40'000, kAlone = 16, kDistinct = 64;
  const ExpertsCase& c = Case();
  if (!Open(kTokens)) GTEST_SKIP();
  const auto few = Random(int64_t{kDistinct} * c.hidden);
  std::vector<uint16_t> x;
  std::vector<int32_t> experts;
  std::vector<float> weights;
  const auto bits = ToBf16(few);
  for (int t = 0; t < kTokens; ++t) {
    const auto row = bits.begin() + int64_t{t % kDistinct} * c.hidden;
    x.insert(x.end(), row, row + c.hidden);
    for (int k = 0; k < c.top_k; ++k) {
      experts.push_back((t + k) % c.num_experts);
      weights.push_back(0.1f + static_cast<float>((t * 7 + k) % 10) / 10);
    }
  }
  const DeviceArray<uint16_t> gpu_x(x);
  const DeviceArray<int32_t> gpu_experts(experts);
  const DeviceArray<float> gpu_weights(weights);
  DeviceArray<uint16_t> partial(x.size());
  const StepPlan plan = PlanOf(kTokens);
  gpu_->RoutedFfn(gpu_->Begin(plan, false), {gpu_x.data(), gpu_experts.data(), gpu_weights.data(),
                                             *experts_.gpu, c.top_k, partial.data()});
  const auto together = Get(partial);
  const auto last = [&](const auto& values, int width) {
    return std::vector(values.end() - int64_t{kAlone} * width, values.end());
  };
  const auto own_x = FromBf16(last(x, c.hidden));
  const auto own_experts = last(experts, c.top_k);
  const auto own_weights = last(weights, c.top_k);
  EXPECT_TRUE(OnGpu(own_x, own_experts, own_weights, kAlone) == last(together, c.hidden));
  std::vector<float> expected(own_x.size(), NAN);
  const StepPlan alone = PlanOf(kAlone);
  cpu_->RoutedFfn(cpu_->Begin(alone, false), {own_x.data(), own_experts.data(), own_weights.data(),
                                              *experts_.cpu, c.top_k, expected.data()});
  ExpectRows(last(together, c.hidden), expected, c.hidden, kSeveralRoundings, "the last rows");
  // Every token with the same row and experts has the same bits.
  const int period = std::lcm(std::lcm(kDistinct, c.num_experts), 10);
  const auto row = [&](int t) { return together.begin() + int64_t{t} * c.hidden; };
  for (int t = 0; t < kTokens; t += 997)
    EXPECT_TRUE(std::equal(row(t), row(t + 1), row(t % period))) << t;
}

INSTANTIATE_TEST_SUITE_P(Every, CudaLargeRoutedFfnTest,
                         ::testing::Combine(::testing::Values(Kernels::kPortable, Kernels::kHopper),
                                            ::testing::Values(ExpertsCase{"large", 7168, 32, 8, 8,
                                                                          8, true})),
                         [](const auto& info) {
                           return std::get<0>(info.param) == Kernels::kHopper ? "hopper"
                                                                              : "portable";
                         });

TEST_F(CudaOpsTest, DenseFfn) {
  struct Shape {
    int hidden, width;
  };
  for (const Shape& s : {Shape{128, 512}, Shape{7168, 256}, Shape{11, 5}, Shape{64, 1}}) {
    const Twin gate = RandomMatrix(s.width, s.hidden, 1 / std::sqrt(static_cast<float>(s.hidden))),
               up = RandomMatrix(s.width, s.hidden, 1 / std::sqrt(static_cast<float>(s.hidden))),
               down = RandomMatrix(s.hidden, s.width, 1 / std::sqrt(static_cast<float>(s.width)));
    Backend::Limits limits;
    limits.max_tokens = kManyRows;
    limits.hidden = s.hidden;
    limits.max_width = s.width;
    PlanScratch(limits);
    for (const int tokens : {1, 37, 300, kManyRows}) {
      if (tokens == kManyRows && s.hidden > 20) continue;
      const auto x = Random(int64_t{tokens} * s.hidden);
      std::vector<float> partial(x.size(), NAN);
      const DeviceArray<uint16_t> gpu_x(ToBf16(x));
      DeviceArray<uint16_t> gpu_partial(x.size());
      const StepPlan plan = PlanOf(tokens);
      cpu_->DenseFfn(cpu_->Begin(plan, false), {x.data(), *gate.cpu, *up.cpu, *down.cpu, s.hidden,
                                                s.width, nullptr, partial.data()});
      gpu_->DenseFfn(gpu_->Begin(plan, false), {gpu_x.data(), *gate.gpu, *up.gpu, *down.gpu,
                                                s.hidden, s.width, nullptr, gpu_partial.data()});
      // The worst of so many narrow rows lies further out.
      const double tolerance = tokens == kManyRows ? 2 * kSeveralRoundings : kSeveralRoundings;
      ExpectRows(Get(gpu_partial), partial, s.hidden, tolerance,
                 fmt::format("hidden {} tokens {}", s.hidden, tokens));
    }
  }
}

TEST_F(CudaOpsTest, CaptureIsTheResidualOfThatMoment) {
  constexpr int kHidden = 7168, kTokens = 100;
  Backend::Limits limits;
  limits.max_tokens = kTokens;
  limits.hidden = kHidden;
  PlanScratch(limits);
  StepPlan plan = PlanOf(kTokens);
  plan.boundaries = {0, 1, 2};
  const Step step = gpu_->Begin(plan, false);
  DeviceArray<uint16_t> partial(ToBf16(Random(kTokens * kHidden))), residual(kTokens * kHidden);
  std::vector<std::vector<uint16_t>> states(3, std::vector<uint16_t>(kTokens * kHidden, 0xffff)),
      expected;
  for (size_t boundary = 0; boundary < 3; ++boundary) {
    gpu_->ExchangeAddNorm(
        step, {partial.data(), residual.data(), boundary == 0, nullptr, 0, kHidden, nullptr});
    gpu_->Capture(step, {residual.data(), kHidden, states[boundary].data()});
  }
  gpu_->Finish();
  EXPECT_EQ(states[2], residual.Get());
  EXPECT_EQ(states[0], partial.Get());
  EXPECT_NE(states[1], states[0]);
  EXPECT_NE(states[1], states[2]);
}

class CudaSampleTest : public CudaOpsTest {
 protected:
  using Tokens = std::vector<ChosenToken>;
  // hidden = 1 and a norm of one: the logits of a row are residual · head, exactly.
  std::pair<Tokens, Tokens> Draw(const std::vector<float>& logits,
                                 const std::vector<StepPlan::Draw>& draws) {
    const auto count = static_cast<int>(draws.size()), vocab = static_cast<int>(logits.size());
    const Twin head = Matrix(logits, vocab, 1), norm = Matrix({1}, 1, 1, DType::kF32);
    Backend::Limits limits;
    limits.max_tokens = limits.max_logit_rows = count;
    limits.hidden = 1;
    limits.padded_vocab = vocab;
    PlanScratch(limits);
    StepPlan plan = PlanOf(count);
    plan.logit_rows.resize(draws.size());
    std::iota(plan.logit_rows.begin(), plan.logit_rows.end(), 0);
    plan.draws = draws;
    const std::vector<float> residual(draws.size(), 1);
    const DeviceArray<uint16_t> gpu_residual(ToBf16(residual));
    Tokens on_cpu(draws.size(), {-7, -7, -7, -7, -7}), on_gpu = on_cpu;
    const auto params = [&](const void* rows, const Twin&, Tokens& to, const Weight& n,
                            const Weight& h) {
      return SampleParams{rows, n, 0, h, 1, vocab, vocab, 0, count, to.data()};
    };
    cpu_->Sample(cpu_->Begin(plan, false),
                 params(residual.data(), norm, on_cpu, *norm.cpu, *head.cpu));
    gpu_->Sample(gpu_->Begin(plan, false),
                 params(gpu_residual.data(), norm, on_gpu, *norm.gpu, *head.gpu));
    gpu_->Finish();
    return {on_cpu, on_gpu};
  }
};

TEST_F(CudaSampleTest, DrawsWhatTheCpuDraws) {
  std::vector<StepPlan::Draw> draws;
  for (uint64_t key = 0; key < 40; ++key) {
    for (const double temperature : {0.0, 0.3, 1.0, 2.0}) {
      for (const double top_p : {1.0, 0.95, 0.5, 1e-9})
        draws.push_back({temperature, top_p, 17, key, static_cast<int64_t>(draws.size()), -1});
    }
  }
  draws.push_back({1, 1, 0, 0, 0, 3});  // given
  for (const int vocab : {5, 511, 512, 2304, 20000}) {
    for (const float spread : {0.0f, 1.0f, 6.0f}) {  // 0: every token ties
      const auto [cpu, gpu] = Draw(Random(vocab, spread), draws);
      for (size_t i = 0; i < draws.size(); ++i) {
        // Thousands of equal tokens: n · p and p + p + … differ in the last bit, at the border of
        // one token.
        EXPECT_LE(std::abs(gpu[i].id - cpu[i].id), spread == 0 ? 1 : 0)
            << vocab << " tokens, spread " << spread;
        EXPECT_EQ(gpu[i].best, cpu[i].best);
        const auto expect_near = [](float a, float b) {
          EXPECT_NEAR(a, b, 1e-5 * (1 + std::abs(b)));
        };
        expect_near(gpu[i].logprob, cpu[i].logprob);
        expect_near(gpu[i].entropy, cpu[i].entropy);
        expect_near(gpu[i].best_logprob, cpu[i].best_logprob);
      }
    }
  }
}

TEST_F(CudaSampleTest, WhatIsNotFiniteIsSaid) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    auto logits = Random(1000);
    logits[777] = bad;
    const auto [cpu, gpu] = Draw(logits, {{0, 1, 0, 0, 0, -1}, {1, 0.9, 0, 0, 0, -1}});
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(std::isnan(gpu[i].logprob));
      EXPECT_TRUE(std::isnan(gpu[i].entropy));
      EXPECT_TRUE(std::isnan(gpu[i].best_logprob));
      EXPECT_EQ(gpu[i].id, 0);
      EXPECT_EQ(gpu[i].best, 0);
    }
  }
}

}  // namespace
}  // namespace statetap
