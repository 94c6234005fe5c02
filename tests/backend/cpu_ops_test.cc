// Each op against a few plain lines in fp64, on random inputs, poisoned outputs, odd sizes.
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>

#include "extractor/backend/cpu/cpu_backend.h"
#include "extractor/backend/cpu/cpu_weights.h"
#include "extractor/backend/philox.h"
#include "tests/support/status_matchers.h"

namespace statetap::cpu {
namespace {

// fp32 sums of n products in 16 lanes: far below this, relative to the sum of magnitudes.
constexpr double kSumTolerance = 2e-6;

std::mt19937 random_engine(20260101);  // NOLINT: one seed a run keeps failures repeatable

std::vector<float> Random(size_t n, float scale = 1) {
  std::vector<float> values(n);
  for (float& value : values) value = std::normal_distribution<float>(0, scale)(random_engine);
  return values;
}

Matrix FloatMatrix(const std::vector<float>& values, int64_t rows, int64_t cols) {
  Matrix matrix(rows, cols, DType::kF32);
  matrix.Fill(0, 0, rows, reinterpret_cast<const std::byte*>(values.data()), cols * 4);
  return matrix;
}

double Product(const float* a, const float* b, int n, double* magnitude = nullptr) {
  double sum = 0, all = 0;
  for (int i = 0; i < n; ++i) {
    sum += double{a[i]} * b[i];
    all += std::abs(double{a[i]} * b[i]);
  }
  if (magnitude != nullptr) *magnitude = all;
  return sum;
}

TEST(MatMulTest, EqualsFp64AtEverySizeAndForAnyBatchAndPool) {
  for (const int cols : {1, 15, 16, 17, 80, 128, 333}) {
    for (const int64_t out : {1, 2, 7, 64}) {
      constexpr int64_t kRows = 131;
      const auto x = Random(kRows * static_cast<size_t>(cols)),
                 w = Random(static_cast<size_t>(out * cols));
      const Matrix matrix = FloatMatrix(w, out, cols);
      std::vector<float> together(kRows * static_cast<size_t>(out), NAN),
          alone(static_cast<size_t>(out), NAN);
      WorkerPool one(1), three(3);
      MatMul({x.data(), cols, kRows, matrix.reader(), out, cols, together.data(), out}, three);
      for (int64_t t = 0; t < kRows; ++t) {
        MatMul({x.data() + t * cols, cols, 1, matrix.reader(), out, cols, alone.data(), out}, one);
        for (int64_t o = 0; o < out; ++o) {
          const float ours = together[static_cast<size_t>(t * out + o)];
          EXPECT_EQ(ours, alone[static_cast<size_t>(o)]);
          EXPECT_EQ(ours, Dot(x.data() + t * cols, w.data() + o * cols, cols));
          double magnitude;
          const double expected =
              Product(x.data() + t * cols, w.data() + o * cols, cols, &magnitude);
          EXPECT_NEAR(ours, expected, magnitude * kSumTolerance);
        }
      }
    }
  }
}

TEST(MatMulTest, NoRowsAndSeveralProductsAtOnce) {
  WorkerPool pool(2);
  const auto x = Random(64 * 600), w = Random(300 * 64);
  const Matrix matrix = FloatMatrix(w, 300, 64);
  std::vector<float> a(600 * 300, NAN), b(a), none(4, NAN);
  MatMul({x.data(), 64, 0, matrix.reader(), 300, 64, none.data(), 300}, pool);
  EXPECT_TRUE(std::isnan(none[0]));
  MatMul({x.data(), 64, 600, matrix.reader(), 300, 64, a.data(), 300}, pool);
  const MatMulParams parts[] = {
      {x.data(), 64, 100, matrix.reader(), 300, 64, b.data(), 300},
      {x.data(), 64, 0, matrix.reader(), 300, 64, b.data(), 300},
      {x.data() + 100 * 64, 64, 500, matrix.reader(), 300, 64, b.data() + 100 * 300, 300}};
  MatMuls(parts, pool);
  EXPECT_EQ(a, b);
}

TEST(RmsNormTest, EqualsFp64AndDoesNotOverflow) {
  for (const int n : {1, 3, 128, 7168}) {
    for (const float scale : {1e-6f, 1.0f, 1e30f}) {
      const auto x = Random(static_cast<size_t>(n), scale), weight = Random(static_cast<size_t>(n));
      std::vector<float> y(static_cast<size_t>(n), NAN);
      RmsNorm(x.data(), weight.data(), n, 1e-5f, y.data());
      const double rms = std::sqrt(Product(x.data(), x.data(), n) / n + double{1e-5f});
      for (size_t i = 0; i < y.size(); ++i)
        EXPECT_NEAR(y[i], x[i] / rms * weight[i], std::abs(x[i] / rms * weight[i]) * 1e-6);
    }
  }
}

// All sixteen codes, every scale type: nibble order, offset 8, one bf16 rounding.
TEST(ExpertsTest, UnpacksEveryCode) {
  for (const DType scale_dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    const ExpertsShape shape{
        .num_slots = 2, .hidden = 64, .width = 32, .int4 = true, .scale_dtype = scale_dtype};
    Experts experts(shape);
    const float scales[2] = {0.34375f, -1.5f};  // exact in all three
    std::vector<std::byte> stored(2 * SizeOf(scale_dtype));
    for (int i = 0; i < 2; ++i) {
      const uint16_t bf16 = FloatToBf16(scales[i]), half = i == 0 ? 0x3580 : 0xbe00;
      if (scale_dtype == DType::kBf16) std::memcpy(stored.data() + i * 2, &bf16, 2);
      if (scale_dtype == DType::kF16) std::memcpy(stored.data() + i * 2, &half, 2);
      if (scale_dtype == DType::kF32) std::memcpy(stored.data() + i * 4, &scales[i], 4);
    }
    const uint32_t words[8] = {0x76543210, 0xfedcba98, 0x01234567, 0x89abcdef,
                               0x88888888, 0xffffffff, 0x00000000, 0x7f7f7f7f};
    experts.Fill(ExpertPart(1, Projection::kUp, false), 5, 1,
                 reinterpret_cast<const std::byte*>(words), 32);
    experts.Fill(ExpertPart(1, Projection::kUp, true), 5, 1, stored.data(),
                 static_cast<int64_t>(stored.size()));
    std::vector<float> row(64, NAN);
    experts.ReadRow(1, Projection::kUp, 5, row.data());
    for (int i = 0; i < 64; ++i) {
      const int code = static_cast<int>((words[i / 8] >> (4 * (i % 8))) & 15u) - 8;
      EXPECT_EQ(row[static_cast<size_t>(i)],
                Bf16ToFloat(FloatToBf16(static_cast<float>(code) * scales[i / 32])))
          << i;
    }
  }
}

struct Rank {
  std::shared_ptr<SharedGroup> group = std::make_shared<SharedGroup>(1);
  CpuBackend backend{0, group, 2};
};

StepPlan PlanOf(int tokens) {
  StepPlan plan;
  for (int t = 0; t < tokens; ++t) {
    plan.ids.push_back(0);
    plan.positions.push_back(t);
    plan.sequence.push_back(0);
  }
  plan.num_seqs = 1;
  plan.pages_per_seq = (tokens + kPageTokens - 1) / kPageTokens;
  for (int page = 0; page < plan.pages_per_seq; ++page)
    plan.page_table.push_back(plan.pages_per_seq - 1 - page);
  return plan;
}

TEST(RouteTest, EqualsBruteForceWithGroupsAndTies) {
  for (const int groups : {1, 4}) {
    Rank rank;
    constexpr int kTokens = 50, kHidden = 33, kExperts = 16, kTop = 4;
    const auto x = Random(kTokens * kHidden), gate = Random(kExperts * kHidden, 0.3f);
    auto bias = Random(kExperts, 0.5f);
    bias[3] = bias[7] =
        -0.9f;  // biased scores below zero: a kept expert must still beat a masked group
    const Matrix gate_weight = FloatMatrix(gate, kExperts, kHidden),
                 bias_weight = FloatMatrix(bias, 1, kExperts);
    std::vector<int32_t> experts(kTokens * kTop, -7);
    std::vector<float> weights(experts.size(), NAN);
    const StepPlan plan = PlanOf(kTokens);
    const Step step = rank.backend.Begin(plan, false);
    rank.backend.Route(step, {x.data(), gate_weight, bias_weight, kHidden, kExperts, kTop, groups,
                              2, true, 2.5f, experts.data(), weights.data()});
    for (int t = 0; t < kTokens; ++t) {
      std::vector<double> score(kExperts), biased(kExperts);
      for (int e = 0; e < kExperts; ++e) {
        score[static_cast<size_t>(e)] =
            1 /
            (1 + std::exp(-Product(x.data() + t * kHidden, gate.data() + e * kHidden, kHidden)));
        biased[static_cast<size_t>(e)] =
            score[static_cast<size_t>(e)] + bias[static_cast<size_t>(e)];
      }
      if (groups > 1) {
        std::multimap<double, int> worth;
        for (int g = 0; g < groups; ++g) {
          std::vector<double> part(biased.begin() + g * 4, biased.begin() + g * 4 + 4);
          std::sort(part.rbegin(), part.rend());
          worth.emplace(-(part[0] + part[1]), g);
        }
        for (auto it = std::next(worth.begin(), 2); it != worth.end(); ++it) {
          for (int i = 0; i < 4; ++i) biased[static_cast<size_t>(it->second * 4 + i)] = -INFINITY;
        }
      }
      std::vector<int> order(kExperts);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        return biased[static_cast<size_t>(a)] > biased[static_cast<size_t>(b)];
      });
      double sum = 0;
      for (int k = 0; k < kTop; ++k)
        sum += score[static_cast<size_t>(order[static_cast<size_t>(k)])];
      for (int k = 0; k < kTop; ++k) {
        const auto at = static_cast<size_t>(t * kTop + k);
        EXPECT_EQ(experts[at], order[static_cast<size_t>(k)]);
        EXPECT_NEAR(weights[at], score[static_cast<size_t>(experts[at])] / sum * 2.5, 1e-5);
      }
    }
  }
}

TEST(RouteTest, ANonFiniteRowStaysInBounds) {
  Rank rank;
  const std::vector<float> x = {NAN, 1, INFINITY, -INFINITY}, gate = {1, 2, 3, -1};
  const Matrix gate_weight = FloatMatrix(gate, 4, 1), bias = FloatMatrix({0, 0, 0, 0}, 1, 4);
  std::vector<int32_t> experts(8, -7);
  std::vector<float> weights(8);
  const StepPlan plan = PlanOf(4);
  const Step step = rank.backend.Begin(plan, false);
  rank.backend.Route(
      step, {x.data(), gate_weight, bias, 1, 4, 2, 1, 1, true, 1, experts.data(), weights.data()});
  for (const int32_t expert : experts) EXPECT_TRUE(expert >= 0 && expert < 4);
  EXPECT_TRUE(std::isnan(weights[0])) << "a bad row stays bad";
  EXPECT_FALSE(std::isnan(weights[2])) << "and does not touch its neighbour";
}

// The absorbed form against the expanded one: keys and values of every head made from the latent,
// softmax in fp64.
TEST(AttentionTest, AbsorbedEqualsExpanded) {
  constexpr int kHeads = 3, kQuery = 20, kLora = 24, kNope = 8, kRope = 4, kV = 6, kHidden = 10,
                kTokens = 150;
  constexpr float kScale = 0.21f;
  Rank rank;
  const int row = kQuery + kLora + kRope;
  const auto latents = Random(static_cast<size_t>(kTokens * row)),
             q_b = Random(kHeads * (kNope + kRope) * kQuery, 0.3f);
  const auto kv_b = Random(kHeads * (kNope + kV) * kLora, 0.3f), o = Random(kHidden * kHeads * kV);
  const Matrix q_weight = FloatMatrix(q_b, kHeads * (kNope + kRope), kQuery),
               kv_weight = FloatMatrix(kv_b, kHeads * (kNope + kV), kLora);
  const Matrix o_weight = FloatMatrix(o, kHidden, kHeads * kV);
  const float frequencies[kRope / 2] = {1.0f, 0.1f};
  const void* rotary = rank.backend.NewRotary(frequencies, kTokens);
  rank.backend.NewKvCache(1, 3, kLora + kRope);
  Backend::Limits limits;
  limits.max_tokens = limits.max_context = kTokens;
  limits.hidden = kHidden;
  limits.query_dim = kHeads * (kNope + kRope);
  limits.heads_dim = kHeads * kV;
  limits.latent_dim = kLora + kRope;
  rank.backend.PlanScratch(limits);
  std::vector<float> ours(kTokens * kHidden, NAN);
  const StepPlan plan = PlanOf(kTokens);
  rank.backend.Attention(rank.backend.Begin(plan, false),
                         {latents.data(), q_weight, kv_weight, o_weight, rotary, 0, kHeads, kQuery,
                          kLora, kNope, kRope, kV, kHidden, kScale, ours.data()});

  const auto rotate = [&](std::vector<double> x, int position) {
    for (int i = 0; i < kRope / 2; ++i) {
      const double angle = position * double{frequencies[i]}, a = x[static_cast<size_t>(2 * i)],
                   b = x[static_cast<size_t>(2 * i + 1)];
      x[static_cast<size_t>(2 * i)] = a * std::cos(angle) - b * std::sin(angle);
      x[static_cast<size_t>(2 * i + 1)] = a * std::sin(angle) + b * std::cos(angle);
    }
    return x;
  };
  const auto times = [](const float* w, int out, int in, const float* x) {
    std::vector<double> y;
    for (int i = 0; i < out; ++i) y.push_back(Product(w + i * in, x, in));
    return y;
  };
  for (const int t : {0, 1, 63, 64, 149}) {
    std::vector<double> heads;
    for (int h = 0; h < kHeads; ++h) {
      const auto query = times(q_b.data() + h * (kNope + kRope) * kQuery, kNope + kRope, kQuery,
                               latents.data() + t * row);
      const auto q_pe = rotate({query.begin() + kNope, query.end()}, t);
      std::vector<double> weight, value(kV);
      for (int j = 0; j <= t; ++j) {
        const float* c = latents.data() + j * row + kQuery;
        const auto key = times(kv_b.data() + h * (kNope + kV) * kLora, kNope, kLora, c);
        const auto k_pe = rotate({c + kLora, c + kLora + kRope}, j);
        double score = 0;
        for (size_t i = 0; i < kNope; ++i) score += query[i] * key[i];
        for (size_t i = 0; i < kRope; ++i) score += q_pe[i] * k_pe[i];
        weight.push_back(std::exp(score * kScale));
      }
      const double sum = std::accumulate(weight.begin(), weight.end(), 0.0);
      for (int j = 0; j <= t; ++j) {
        const auto v = times(kv_b.data() + (h * (kNope + kV) + kNope) * kLora, kV, kLora,
                             latents.data() + j * row + kQuery);
        for (size_t i = 0; i < kV; ++i) value[i] += weight[static_cast<size_t>(j)] / sum * v[i];
      }
      heads.insert(heads.end(), value.begin(), value.end());
    }
    for (int i = 0; i < kHidden; ++i) {
      double expected = 0, magnitude = 0;
      for (size_t k = 0; k < heads.size(); ++k) {
        expected += o[static_cast<size_t>(i) * heads.size() + k] * heads[k];
        magnitude += std::abs(o[static_cast<size_t>(i) * heads.size() + k] * heads[k]);
      }
      EXPECT_NEAR(ours[static_cast<size_t>(t * kHidden + i)], expected, magnitude * 1e-5)
          << "token " << t;
    }
  }
}

TEST(PhiloxTest, KnownVectors) {  // of the authors' Random123 distribution
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

class SampleTest : public ::testing::Test {
 protected:
  // Of logit rows that are `logits`: hidden = 1, norm and head chosen so.
  std::vector<ChosenToken> Choose(const std::vector<float>& logits,
                                  std::vector<StepPlan::Draw> draws) {
    Rank rank;
    const auto count = static_cast<int>(draws.size()), vocab = static_cast<int>(logits.size());
    const Matrix head = FloatMatrix(logits, vocab, 1), norm = FloatMatrix({1}, 1, 1);
    Backend::Limits limits;
    limits.max_tokens = limits.max_logit_rows = count;
    limits.hidden = 1;
    limits.padded_vocab = vocab;
    rank.backend.PlanScratch(limits);
    StepPlan plan = PlanOf(count);
    plan.logit_rows.resize(draws.size());
    std::iota(plan.logit_rows.begin(), plan.logit_rows.end(), 0);
    plan.draws = std::move(draws);
    const std::vector<float> residual(static_cast<size_t>(count), 1);
    std::vector<ChosenToken> chosen(static_cast<size_t>(count));
    const Step step = rank.backend.Begin(plan, false);
    rank.backend.Sample(step,
                        {residual.data(), norm, 0, head, 1, vocab, vocab, 0, count, chosen.data()});
    return chosen;
  }
  std::vector<int32_t> Draw(const std::vector<float>& logits, std::vector<StepPlan::Draw> draws) {
    std::vector<int32_t> ids;
    for (const ChosenToken& one : Choose(logits, std::move(draws))) ids.push_back(one.id);
    return ids;
  }
};

TEST_F(SampleTest, GreedyTakesTheFirstOfEquals) {
  EXPECT_EQ(Draw({1, 3, 3, 2}, {{0, 1, 0, 0, 0, -1}}), std::vector<int32_t>{1});
}

TEST_F(SampleTest, ScoresAreOfTheModelsOwnDistribution) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f)};  // 1/8, 2/8, 5/8
  const auto chosen = Choose(logits, {{0.1, 0.5, 0, 0, 0, 1}, {0, 1, 0, 0, 0, -1}});
  EXPECT_EQ(chosen[0].id, 1);
  EXPECT_NEAR(chosen[0].logprob, std::log(0.25), 1e-6);
  EXPECT_NEAR(chosen[0].entropy,
              -(0.125 * std::log(0.125) + 0.25 * std::log(0.25) + 0.625 * std::log(0.625)), 1e-6);
  for (const ChosenToken& one : chosen) {
    EXPECT_EQ(one.best, 2);
    EXPECT_NEAR(one.best_logprob, std::log(0.625), 1e-6);
  }
  EXPECT_EQ(chosen[1].logprob, chosen[1].best_logprob);  // every bit: lm-eval compares them
  const ChosenToken bad = Choose({0, NAN, 1}, {{0, 1, 0, 0, 0, -1}})[0];
  EXPECT_TRUE(std::isnan(bad.logprob) && std::isnan(bad.best_logprob));
}

// 60,000 draws: frequencies within five standard deviations of temperature and nucleus.
TEST_F(SampleTest, FrequenciesFollowTemperatureAndTopP) {
  const std::vector<float> logits = {std::log(4.0f), std::log(1.0f), std::log(3.0f),
                                     std::log(2.0f)};
  struct Case {
    double temperature, top_p;
    std::vector<double> share;
  };
  for (const Case& c :
       {Case{1, 1, {0.4, 0.1, 0.3, 0.2}}, Case{0.5, 1, {16 / 30.0, 1 / 30.0, 9 / 30.0, 4 / 30.0}},
        Case{1, 0.65, {4 / 7.0, 0, 3 / 7.0, 0}}, Case{1, 0.05, {1, 0, 0, 0}}}) {
    constexpr int kDraws = 60000;
    std::vector<StepPlan::Draw> draws;
    for (int i = 0; i < kDraws; ++i)
      draws.push_back({c.temperature, c.top_p, 5, static_cast<uint64_t>(i / 100), i % 100, -1});
    std::vector<int> count(4);
    for (const int32_t id : Draw(logits, draws)) ++count[static_cast<size_t>(id)];
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(count[i], kDraws * c.share[i],
                  5 * std::sqrt(kDraws * c.share[i] * (1 - c.share[i])) + 1e-9)
          << "top_p " << c.top_p << " id " << i;
    }
  }
}

TEST_F(SampleTest, ADrawDependsOnSeedKeyAndPositionAlone) {
  std::vector<float> logits = Random(500);
  std::vector<StepPlan::Draw> draws;
  for (int i = 0; i < 64; ++i) draws.push_back({1, 0.9, 3, 17, i, -1});
  const auto together = Draw(logits, draws);
  for (size_t i = 0; i < draws.size(); ++i) EXPECT_EQ(Draw(logits, {draws[i]})[0], together[i]);
  for (auto& draw : draws) draw.seed = 4;
  EXPECT_NE(Draw(logits, draws), together);
}

}  // namespace
}  // namespace statetap::cpu
