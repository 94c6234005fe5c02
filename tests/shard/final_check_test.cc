#include "extractor/shard/final_check.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "extractor/shard/alarms.h"
#include "tests/shard/sample_maker.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MakeSample;
using testing::MakeShardConfig;
using testing::StatusIs;
using testing::TempDir;
using testing::TestSample;

constexpr int kHidden = 128;

// The log-probability that a row's first value stands for: states and scores that belong together
// without a model.
absl::StatusOr<std::vector<double>> ScoreOfFirstValue(std::span<const uint16_t> states,
                                                      std::span<const int32_t> tokens) {
  std::vector<double> scores;
  for (size_t i = 0; i < tokens.size(); ++i) scores.push_back(-Bf16ToFloat(states[i * kHidden]));
  return scores;
}

TestSample Consistent(const ShardConfig& config, uint32_t seed) {
  TestSample sample = MakeSample(config, 30, seed);
  auto& final_states = sample.states.back();
  for (size_t t = 1; t < 30; ++t) {
    const uint16_t bits = FloatToBf16(0.01f * static_cast<float>((t * 7 + seed) % 100));
    final_states[(t - 1) * kHidden] = bits;
    sample.record.logprobs[t] = -Bf16ToFloat(bits);
  }
  return sample;
}

class FinalCheckTest : public ::testing::Test {
 protected:
  // Writes a shard, takes and scores it: its error, or none.
  absl::StatusOr<std::optional<double>> ErrorOf(const ShardConfig& config,
                                                std::span<const TestSample> samples) {
    const auto path = folder_ / fmt::format("{}.h5", ++written_);
    STATETAP_RETURN_IF_ERROR(testing::WriteShard(path, config, samples).status());
    STATETAP_ASSIGN_OR_RETURN(const auto reader, ShardReader::Open(path));
    FinalCheck check;
    STATETAP_RETURN_IF_ERROR(check.Take(*reader, *reader->ReadRecords()));
    STATETAP_RETURN_IF_ERROR(check.Score(ScoreOfFirstValue));
    if (check.shards().empty()) return std::nullopt;
    return check.shards().front().error;
  }

  const TempDir folder_;
  int written_ = 0;
};

TEST_F(FinalCheckTest, StatesThatBelongToTheirTokensAgreeAndOthersDoNot) {
  const ShardConfig config = MakeShardConfig(kHidden, {2, 8});
  std::vector<TestSample> samples;
  for (uint32_t i = 0; i < 40; ++i) samples.push_back(Consistent(config, i));
  ASSERT_OK_AND_ASSIGN(const auto sound, ErrorOf(config, samples));
  ASSERT_TRUE(sound.has_value());
  EXPECT_LT(*sound, 1e-6);
  for (TestSample& sample : samples)  // moved by a row
    std::rotate(sample.states.back().begin(), sample.states.back().begin() + kHidden,
                sample.states.back().end());
  ASSERT_OK_AND_ASSIGN(const auto moved, ErrorOf(config, samples));
  EXPECT_GT(moved, 0.1);
  for (TestSample& sample : samples)
    std::fill(sample.states.back().begin(), sample.states.back().end(), uint16_t{0x7fc0});
  ASSERT_OK_AND_ASSIGN(const auto nan, ErrorOf(config, samples));
  EXPECT_EQ(nan, std::numeric_limits<double>::infinity());
}

TEST_F(FinalCheckTest, NothingIsSaidWithoutFinalStatesOrLogProbabilities) {
  const ShardConfig config = MakeShardConfig(kHidden, {2, 8});
  TestSample sample = Consistent(config, 1);
  sample.record.logprobs.clear();
  sample.record.entropies.clear();
  ASSERT_OK_AND_ASSIGN(const auto unscored, ErrorOf(config, std::span(&sample, 1)));
  EXPECT_EQ(unscored, std::nullopt);
  const ShardConfig taps = MakeShardConfig(kHidden, {2, 5});
  const TestSample without = MakeSample(taps, 30, 1);
  ASSERT_OK_AND_ASSIGN(const auto no_final, ErrorOf(taps, std::span(&without, 1)));
  EXPECT_EQ(no_final, std::nullopt);
}

TEST_F(FinalCheckTest, ShardsAreScoredOnceAndAFailureIsTheCallers) {
  const ShardConfig config = MakeShardConfig(kHidden, {8});
  const std::vector<TestSample> samples = {Consistent(config, 1)};
  FinalCheck check;
  int scored = 0;
  const auto count = [&](std::span<const uint16_t> states, std::span<const int32_t> tokens) {
    scored += static_cast<int>(tokens.size());
    return ScoreOfFirstValue(states, tokens);
  };
  for (const std::string name : {"a.h5", "b.h5"}) {
    ASSERT_OK(testing::WriteShard(folder_ / name, config, samples));
    ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder_ / name));
    ASSERT_OK(check.Take(*reader, *reader->ReadRecords()));
    EXPECT_THAT(check.Score([](auto, auto) -> absl::StatusOr<std::vector<double>> {
      return absl::NotFoundError("no head");
    }),
                StatusIs(absl::StatusCode::kNotFound, "no head"));
    ASSERT_OK(check.Score(count));
  }
  EXPECT_EQ(scored, 32);
}

// Rounded to four bits, a score of up to 1 is 0.03 away at most, log-odds a little more.
TEST_F(FinalCheckTest, Fp8StatesMayBeFurtherAway) {
  ShardConfig config = MakeShardConfig(kHidden, {2, 8});
  config.dtype = StatesDtype::kFp8;
  for (const float off : {0.0f, 1.0f}) {
    std::vector<TestSample> samples;
    for (uint32_t i = 0; i < 20; ++i) {
      samples.push_back(Consistent(config, i));
      for (float& logprob : samples.back().record.logprobs) logprob -= off;
    }
    const auto path = folder_ / fmt::format("off-{}.h5", off);
    ASSERT_OK(testing::WriteShard(path, config, samples));
    ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(path));
    FinalCheck check;
    ASSERT_OK(check.Take(*reader, *reader->ReadRecords()));
    ASSERT_OK(check.Score(ScoreOfFirstValue));
    EXPECT_EQ(FindFinalMismatch(8, check).size(), off == 0 ? 0u : 1u)
        << *check.shards().front().error;
  }
}

TEST_F(FinalCheckTest, AMismatchIsAnAlarmThatNamesTheShard) {
  const ShardConfig config = MakeShardConfig(kHidden, {2, 8});
  FinalCheck check;
  for (const bool sound : {true, false}) {
    std::vector<TestSample> samples;
    for (uint32_t i = 0; i < 20; ++i) {
      samples.push_back(Consistent(config, i));
      if (!sound)
        for (float& logprob : samples.back().record.logprobs) logprob -= 1;
    }
    const auto path = folder_ / (sound ? "sound.h5" : "wrong.h5");
    ASSERT_OK(testing::WriteShard(path, config, samples));
    ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(path));
    ASSERT_OK(check.Take(*reader, *reader->ReadRecords()));
  }
  EXPECT_THAT(FindFinalMismatch(8, check), IsEmpty()) << "not scored, so nothing is known";
  ASSERT_OK(check.Score(ScoreOfFirstValue));
  const auto alarms = FindFinalMismatch(8, check);
  ASSERT_EQ(alarms.size(), 1u);
  EXPECT_EQ(alarms[0].kind, "final_mismatch");
  EXPECT_EQ(alarms[0].boundary, 8);
  EXPECT_THAT(alarms[0].message, HasSubstr("wrong.h5"));
  EXPECT_THAT(alarms[0].message, HasSubstr("1 of 2 shards"));
}

}  // namespace
}  // namespace statetap
