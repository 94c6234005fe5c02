// Faults that statistics show, each with its name and its place, and sound ones that raise none.
#include "extractor/shard/alarms.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <random>

#include "extractor/base/dtype.h"
#include "extractor/base/status.h"

namespace statetap {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kHidden = 64;
using Rows = std::vector<uint16_t>;

// Rows of random values; row t is scaled by scale(t).
Rows RandomRows(int rows, uint32_t seed, const std::function<double(int)>& scale) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Rows values;
  for (int t = 0; t < rows; ++t) {
    for (int c = 0; c < kHidden; ++c) {
      values.push_back(FloatToBf16(static_cast<float>(normal(random) * scale(t))));
    }
  }
  return values;
}
double Level(int) { return 1; }

BoundaryStatistics StatisticsOf(const Rows& rows) {
  BoundaryStatistics statistics(kHidden);
  statistics.Add(rows);
  return statistics;
}

// Every row divided by its rms.
Rows Normed(Rows rows) {
  for (size_t row = 0; row < rows.size(); row += kHidden) {
    double squares = 0;
    for (int c = 0; c < kHidden; ++c) squares += std::pow(Bf16ToFloat(rows[row + c]), 2);
    const double rms = std::sqrt(squares / kHidden);
    for (int c = 0; c < kHidden; ++c) {
      rows[row + c] = FloatToBf16(static_cast<float>(Bf16ToFloat(rows[row + c]) / rms));
    }
  }
  return rows;
}

std::vector<std::string> NamesOf(const std::vector<StatisticsAlarm>& alarms) {
  std::vector<std::string> names;
  for (const StatisticsAlarm& alarm : alarms) {
    names.push_back(fmt::format("{} {}", alarm.kind, alarm.boundary));
  }
  return names;
}

TEST(FindAlarmsTest, SoundBoundariesRaiseNone) {
  const std::vector<BoundaryStatistics> statistics = {StatisticsOf(RandomRows(20, 1, Level)),
                                                      StatisticsOf(RandomRows(20, 2, Level))};
  EXPECT_THAT(FindAlarms(std::vector<int>{2, 8}, statistics), IsEmpty());
}

TEST(FindAlarmsTest, EachFaultIsNamedWithItsBoundary) {
  const Rows sound = RandomRows(20, 1, Level);
  Rows nonfinite = RandomRows(20, 2, Level);
  nonfinite[3] = 0x7fc0;
  Rows constant;
  for (int t = 0; t < 20; ++t) {
    for (int c = 0; c < kHidden; ++c) constant.push_back(FloatToBf16(static_cast<float>(c)));
  }
  const std::vector<BoundaryStatistics> statistics = {
      StatisticsOf(sound),     StatisticsOf(Rows(20 * kHidden, 0)),
      StatisticsOf(constant),  StatisticsOf(sound),
      StatisticsOf(nonfinite), BoundaryStatistics(kHidden)};
  const auto alarms = FindAlarms(std::vector<int>{2, 5, 6, 7, 8, 9}, statistics);
  EXPECT_THAT(NamesOf(alarms), ElementsAre("zero_boundary 5", "constant_boundary 6",
                                           "equal_boundaries 7", "nonfinite 8"));
  for (const StatisticsAlarm& alarm : alarms) {
    EXPECT_THAT(alarm.message, HasSubstr(std::to_string(alarm.boundary)));
  }
}

TEST(FindAlarmsTest, OneRowIsNotConstant) {
  const std::vector<BoundaryStatistics> one = {StatisticsOf(RandomRows(1, 1, Level))};
  EXPECT_THAT(FindAlarms(std::vector<int>{2}, one), IsEmpty());
}

TEST(FindAlarmsTest, ANormedFinalIsFound) {
  const auto growing = [](int t) { return 20.0 + t; };
  const Rows final_states = RandomRows(100, 3, growing);
  const auto find = [&](const Rows& last) {
    return NamesOf(
        FindAlarms(std::vector<int>{5, 8},
                   std::vector{StatisticsOf(RandomRows(100, 4, growing)), StatisticsOf(last)}));
  };
  EXPECT_THAT(find(final_states), IsEmpty());
  EXPECT_THAT(find(Normed(final_states)), ElementsAre("normed_boundary 8"));
}

// Channels of small weight hold most of some rows: those end lower, none ends higher.
TEST(FindAlarmsTest, ANormWithWeightsIsFoundBehindADeadTapToo) {
  const auto growing = [](int t) { return t % 20 == 0 ? 400.0 : 20.0 + t % 30; };
  Rows normed = Normed(RandomRows(200, 3, growing));
  for (size_t row = 0; row < normed.size(); row += kHidden)
    for (int c = 0; c < kHidden; ++c)
      normed[row + c] = FloatToBf16(Bf16ToFloat(normed[row + c]) * (row % 20 == 0 ? 0.8f : 1.7f));
  const std::vector<BoundaryStatistics> statistics = {StatisticsOf(RandomRows(200, 4, growing)),
                                                      StatisticsOf(Rows(200 * kHidden, 0)),
                                                      StatisticsOf(normed)};
  EXPECT_THAT(NamesOf(FindAlarms(std::vector<int>{2, 5, 8}, statistics)),
              ElementsAre("zero_boundary 5", "normed_boundary 8"));
}

TEST(FindDriftTest, AShardAwayFromTheOthersIsNamed) {
  std::vector<ShardLevel> shards;
  for (int i = 0; i < 4; ++i) {
    shards.push_back(
        {.shard = fmt::format("{}.h5", i), .rows = 1000, .median_rms = {1.0, 30.0 + i}});
  }
  const std::vector<int> boundaries = {2, 8};
  EXPECT_THAT(FindDrift(boundaries, shards), IsEmpty());
  shards[2].median_rms[0] = 1.5;
  const auto alarms = FindDrift(boundaries, shards);
  EXPECT_THAT(NamesOf(alarms), ElementsAre("shard_drift 2"));
  EXPECT_THAT(alarms.front().message, HasSubstr("2.h5"));
  shards[2].rows = 100;  // too few to say
  EXPECT_THAT(FindDrift(boundaries, shards), IsEmpty());
  shards[2].rows = 1000;
  EXPECT_THAT(FindDrift(boundaries, std::span(shards).first(2)), IsEmpty());
}

// A sample whose tokens have this −log p and entropy.
SampleRecord Scored(std::string source, int tokens, double surprise, double entropy) {
  SampleRecord sample{.source = std::move(source)};
  sample.input_ids.assign(static_cast<size_t>(tokens), 7);
  sample.loss_mask.assign(sample.input_ids.size(), 1);
  sample.logprobs.assign(sample.input_ids.size(), static_cast<float>(-surprise));
  sample.entropies.assign(sample.input_ids.size(), static_cast<float>(entropy));
  sample.finish_reason = "prefill";
  return sample;
}

TEST(FindPolicyGapsTest, TextOfAnotherModelIsFoundBySource) {
  TokenReport tokens;
  tokens.Add(Scored("own", 100, 1.2, 1.1), {});
  tokens.Add(Scored("people", 100, 3.0, 1.4), {});
  tokens.Add(Scored("cold", 100, 0.2, 1.1), {});
  const auto alarms = FindPolicyGaps(tokens);
  EXPECT_THAT(NamesOf(alarms), ElementsAre("policy_gap -1"));
  EXPECT_THAT(alarms.front().message, HasSubstr("source people"));
}

TEST(FindPolicyGapsTest, FewTokensAreNoAlarm) {
  TokenReport tokens;
  tokens.Add(Scored("one token", 1, 9, 1), {});  // without a standard error
  tokens.Add(Scored("none", 0, 0, 0), {});
  SampleRecord odd = Scored("two that differ", 2, 9, 1);
  odd.logprobs[1] = 0;
  tokens.Add(odd, {});
  EXPECT_THAT(FindPolicyGaps(tokens), IsEmpty());
}

}  // namespace
}  // namespace statetap
