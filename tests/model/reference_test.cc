// Our fp32 residual stream against Hugging Face transformers': tests/reference/make.sh made the
// data.
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <random>

#include "extractor/backend/cpu/cpu_backend.h"
#include "extractor/engine/rank_group.h"
#include "extractor/model/transformer.h"
#include "tests/support/reference_families.h"
#include "tests/support/safetensors_file.h"

namespace statetap {
namespace {

using testing::SafetensorsFile;

const std::filesystem::path kRoot = STATETAP_SOURCE_DIR;

// design.md §7: both sides are fp32 and add in other orders; relative to the norm of a row.
constexpr double kRowTolerance = 1e-4;
// Tokens that met a closer choice of experts than this may have gone another way: fp32 rounding of
// a sigmoid.
constexpr float kClearMargin = 1e-5f;
constexpr int kMaxTokens = 4096;

// Keeps the residual stream as it is, before it is rounded to bf16.
class RecordingBackend final : public cpu::CpuBackend {
 public:
  using CpuBackend::CpuBackend;
  bool overlaps = false;
  std::vector<std::vector<float>>* record =
      nullptr;                    // by boundary; [num_tokens, hidden], shared by the ranks
  std::array<size_t, 2> calls{};  // of each half
  int first_half = 0;             // tokens

  bool Overlaps() const override { return overlaps; }
  std::vector<Step> BeginSteps(std::span<const StepPlan> plans, bool sharded) override {
    calls = {};
    first_half = plans[0].num_tokens();
    return CpuBackend::BeginSteps(plans, sharded);
  }
  void Capture(const Step& step, const CaptureParams& p) override {
    const auto* residual = static_cast<const float*>(p.residual);
    const size_t first = static_cast<size_t>(step.own.begin + (step.half == 1 ? first_half : 0));
    std::copy_n(
        residual, static_cast<size_t>(step.own.count) * static_cast<size_t>(p.hidden),
        (*record)[calls[step.half == 1 ? 1 : 0]++].data() + first * static_cast<size_t>(p.hidden));
  }
};

struct Variant {
  int ranks = 1;
  ExpertLayout experts = ExpertLayout::kExpert;
  bool sharded = false;
  int chunk = kMaxTokens;
  size_t longest = kMaxTokens;
  bool halved = false;  // every step of two tokens and more
};

class Model {
 public:
  static absl::StatusOr<std::unique_ptr<Model>> Open(const std::filesystem::path& folder,
                                                     const Variant& variant) {
    auto model = std::make_unique<Model>();
    STATETAP_ASSIGN_OR_RETURN(const CheckpointIndex index, CheckpointIndex::Open(folder));
    model->config = index.config();
    STATETAP_ASSIGN_OR_RETURN(
        const ParallelLayout layout,
        ParallelLayout::Make(index.config(), variant.ranks, variant.experts, index.quantized()));
    const auto group = std::make_shared<cpu::SharedGroup>(variant.ranks);
    for (int rank = 0; rank < variant.ranks; ++rank) {
      model->backends_.push_back(
          std::make_unique<RecordingBackend>(rank, group, variant.ranks == 1 ? 2 : 1));
      static_cast<RecordingBackend&>(*model->backends_.back()).overlaps = variant.halved;
    }
    STATETAP_ASSIGN_OR_RETURN(auto weights, LoadWeights(index, layout, model->backends_, {}));
    ModelLimits limits{kMaxTokens, kMaxTokens, 16, index.config().rms_norm_eps};
    limits.halved_from = 2;
    for (size_t rank = 0; rank < weights.size(); ++rank) {
      model->ranks_.push_back(std::make_unique<Transformer>(
          index.config(), layout, *model->backends_[rank], std::move(weights[rank]), limits));
      model->ranks_.back()->NewKvCache(kMaxTokens / kPageTokens);
    }
    model->group_ = std::make_unique<RankGroup>(model->backends_);
    return model;
  }

  // The residual stream at every boundary: [boundaries][S · hidden].
  std::vector<std::vector<float>> Run(const std::vector<int32_t>& ids, const Variant& variant) {
    std::vector<std::vector<float>> all(static_cast<size_t>(config.num_layers) + 1);
    for (size_t first = 0; first < ids.size(); first += static_cast<size_t>(variant.chunk)) {
      const size_t count = std::min(ids.size() - first, static_cast<size_t>(variant.chunk));
      StepPlan plan;
      plan.num_seqs = 1;
      plan.pages_per_seq = kMaxTokens / kPageTokens;
      for (int page = 0; page < plan.pages_per_seq; ++page)
        plan.page_table.push_back(plan.pages_per_seq - 1 - page);
      for (size_t t = first; t < first + count; ++t) {
        plan.ids.push_back(ids[t]);
        plan.positions.push_back(static_cast<int32_t>(t));
        plan.sequence.push_back(0);
      }
      const auto record = Step(plan, variant.sharded).residual;
      for (size_t b = 0; b < all.size(); ++b)
        all[b].insert(all[b].end(), record[b].begin(), record[b].end());
    }
    return all;
  }

  // A step with every boundary: [boundaries][T · hidden], and what each logit row gave.
  struct Output {
    std::vector<std::vector<float>> residual;
    std::vector<ChosenToken> chosen;
  };
  Output Step(StepPlan plan, bool sharded) {
    for (int boundary = 0; boundary <= config.num_layers; ++boundary)
      plan.boundaries.push_back(boundary);
    const auto values = static_cast<size_t>(plan.num_tokens()) * static_cast<size_t>(config.hidden);
    Output made;
    made.residual.assign(plan.boundaries.size(), std::vector<float>(values, NAN));
    for (const auto& backend : backends_)
      static_cast<RecordingBackend&>(*backend).record = &made.residual;
    StepOutput output;
    output.states.resize(plan.boundaries.size());
    output.chosen.resize(plan.logit_rows.size());
    EXPECT_OK(group_->RunAll(
        [&](int rank) { ranks_[static_cast<size_t>(rank)]->Forward(plan, sharded, output); }));
    made.chosen = std::move(output.chosen);
    return made;
  }

  // Tokens of the last step, or of the first half of it.
  int FirstHalf() const { return static_cast<RecordingBackend&>(*backends_[0]).first_half; }

  ModelConfig config;

 private:
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<std::unique_ptr<Transformer>> ranks_;
  std::unique_ptr<RankGroup> group_;
};

double RelativeError(const float* ours, const float* reference, size_t n) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < n; ++i) {
    error += std::pow(double{ours[i]} - reference[i], 2);
    norm += std::pow(double{reference[i]}, 2);
  }
  return std::sqrt(error / norm);
}

void Check(const std::filesystem::path& folder, const std::filesystem::path& data,
           const Variant& variant) {
  ASSERT_OK_AND_ASSIGN(const auto model, Model::Open(folder, variant));
  const SafetensorsFile file(data);
  const auto hidden = static_cast<size_t>(model->config.hidden);
  double worst = 0;
  int64_t compared = 0, unclear = 0;
  for (int s = 0; file.Has(fmt::format("{}.ids", s)); ++s) {
    const auto ids = file.Get<int32_t>(fmt::format("{}.ids", s)),
               rows = file.Get<int32_t>(fmt::format("{}.rows", s));
    if (ids.size() > variant.longest) continue;
    const auto expected = file.Get<float>(fmt::format("{}.H", s)),
               clear = file.Get<float>(fmt::format("{}.clear", s));
    const auto ours = model->Run(ids, variant);
    for (size_t boundary = 0; boundary < ours.size(); ++boundary) {
      for (size_t r = 0; r < rows.size(); ++r) {
        const auto row = static_cast<size_t>(rows[r]);
        if (clear[boundary * ids.size() + row] < kClearMargin) {
          ++unclear;
          continue;
        }
        const double error =
            RelativeError(ours[boundary].data() + row * hidden,
                          expected.data() + (boundary * rows.size() + r) * hidden, hidden);
        EXPECT_LT(error, kRowTolerance)
            << ids.size() << " tokens, boundary " << boundary << ", row " << row;
        worst = std::max(worst, error);
        ++compared;
      }
    }
  }
  fmt::print(
      "{}: {} rows, worst relative error {:.1e}; {} rows with a near tie in the router left out\n",
      folder.filename().string(), compared, worst, unclear);
  EXPECT_GT(compared, 0);
  EXPECT_LT(unclear, compared / 50);
}

const auto kTiny = kRoot / "models/tiny-kimi";
const auto kTinyData = kRoot / "tests/data/reference/tiny-kimi.safetensors";

TEST(ReferenceTest, TinyKimiAtEveryLength) { Check(kTiny, kTinyData, {}); }

TEST(ReferenceTest, TinyKimiInChunksThatDivideNothing) {
  Variant variant;
  variant.chunk = 37;
  variant.longest = 1000;
  Check(kTiny, kTinyData, variant);
}

TEST(ReferenceTest, TinyKimiTokenByToken) {
  Variant variant;
  variant.chunk = 1;
  variant.longest = 200;
  Check(kTiny, kTinyData, variant);
}

class RanksTest : public ::testing::TestWithParam<std::tuple<int, ExpertLayout, bool>> {};

TEST_P(RanksTest, TinyKimi) {
  Variant variant;
  std::tie(variant.ranks, variant.experts, variant.sharded) = GetParam();
  variant.longest = 200;
  Check(kTiny, kTinyData, variant);
}

INSTANTIATE_TEST_SUITE_P(Every, RanksTest,
                         ::testing::Combine(::testing::Values(2, 4, 8),
                                            ::testing::Values(ExpertLayout::kExpert,
                                                              ExpertLayout::kTensor),
                                            ::testing::Bool()));

class HalvesTest : public ::testing::TestWithParam<std::tuple<int, ExpertLayout>> {
 protected:
  void SetUp() override {
    std::tie(whole.ranks, whole.experts) = GetParam();
    whole.sharded = true;
    halved = whole;
    halved.halved = true;
    ASSERT_OK_AND_ASSIGN(one, Model::Open(kTiny, whole));
    ASSERT_OK_AND_ASSIGN(two, Model::Open(kTiny, halved));
  }
  Variant whole, halved;
  std::unique_ptr<Model> one, two;  // of each
  std::mt19937 random{std::random_device{}()};
};

// The halves of a step take turns: the same bits as of the step in one, whatever the seam cuts.
TEST_P(HalvesTest, AreTheBitsOfTheWholeStep) {
  for (const int length : {1, 2, 3, 9, 64, 131}) {
    std::vector<int32_t> ids(static_cast<size_t>(length));
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % 2304);
    EXPECT_EQ(one->Run(ids, whole), two->Run(ids, halved)) << length << " tokens";
    EXPECT_EQ(one->FirstHalf(), length);
    EXPECT_EQ(two->FirstHalf(), length == 1 ? 1 : length / 2);
  }
}

// Sequences of all lengths, tokens drawn and given scored on both sides of the seam.
TEST_P(HalvesTest, DrawAndScoreAsTheWholeStep) {
  for (int round = 0; round < 4; ++round) {
    StepPlan plan;
    plan.num_seqs = 2 + static_cast<int>(random() % 9);
    plan.pages_per_seq = 1;
    for (int sequence = 0; sequence < plan.num_seqs; ++sequence) {
      plan.page_table.push_back(sequence);
      plan.decodes.push_back(0);
      const int length = 1 + static_cast<int>(random() % 30);
      for (int position = 0; position < length; ++position) {
        plan.ids.push_back(static_cast<int32_t>(random() % 2304));
        plan.positions.push_back(position);
        plan.sequence.push_back(sequence);
        const bool last = position + 1 == length;
        if (!last && random() % 3 != 0) continue;
        plan.logit_rows.push_back(plan.num_tokens() - 1);
        plan.draws.push_back({1, 0.95, 7, random(), position + 1,
                              last ? -1 : static_cast<int32_t>(random() % 2304)});
      }
    }
    const Model::Output a = one->Step(plan, true), b = two->Step(plan, true);
    EXPECT_EQ(a.residual, b.residual);
    EXPECT_LT(two->FirstHalf(), plan.num_tokens());
    ASSERT_EQ(a.chosen.size(), plan.logit_rows.size());
    for (size_t i = 0; i < a.chosen.size(); ++i) {
      EXPECT_EQ(a.chosen[i].id, b.chosen[i].id) << i;
      EXPECT_EQ(a.chosen[i].logprob, b.chosen[i].logprob) << i;
      EXPECT_EQ(a.chosen[i].entropy, b.chosen[i].entropy) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, HalvesTest,
                         ::testing::Combine(::testing::Values(2, 4, 8),
                                            ::testing::Values(ExpertLayout::kExpert,
                                                              ExpertLayout::kTensor)));

class FamilyTest : public ::testing::TestWithParam<const char*> {};

TEST_P(FamilyTest, AgreesOnOneAndTwoRanks) {
  const auto folder = kRoot / "tests/data/reference" / GetParam();
  for (const int ranks : {1, 2}) {
    Variant variant;
    variant.ranks = ranks;
    variant.sharded = ranks == 2;
    Check(folder, folder / "reference.safetensors", variant);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, FamilyTest, testing::ReferenceFamilies(), testing::FamilyName);

}  // namespace
}  // namespace statetap
