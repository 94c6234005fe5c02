#include "client/lib/sample_choice.h"

#include <algorithm>

#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

// 1,000 samples: 700 of a, 299 of b, 1 of c.
SampleChoice Thousand(uint64_t seed, bool ids = true) {
  SampleChoice choice(seed);
  for (int i = 0; i < 1000; ++i) {
    v1::SampleInput sample;
    if (ids) sample.set_id(std::to_string(i));
    sample.set_prompt(std::to_string(i));
    sample.set_source(i == 500 ? "c" : i % 10 < 7 ? "a" : "b");
    sample.set_source_line(i + 1);
    choice.Add(sample);
  }
  return choice;
}

TEST(SampleChoiceTest, SmallerChoicesLieInLargerOnes) {
  const SampleChoice choice = Thousand(3);
  std::vector<bool> smaller(1000, false);
  for (const int64_t count : {0, 1, 10, 100, 999, 1000, 5000}) {
    const std::vector<bool> chosen = choice.Choose(count);
    ASSERT_EQ(chosen.size(), 1000u);
    EXPECT_EQ(std::count(chosen.begin(), chosen.end(), true), std::min<int64_t>(count, 1000));
    for (size_t i = 0; i < chosen.size(); ++i) EXPECT_LE(smaller[i], chosen[i]) << i;
    smaller = chosen;
  }
}

TEST(SampleChoiceTest, SourcesKeepTheirShares) {
  const SampleChoice choice = Thousand(3);
  for (const int64_t count : {10, 100, 500}) {
    const std::vector<bool> chosen = choice.Choose(count);
    int64_t of_a = 0;
    for (size_t i = 0; i < chosen.size(); ++i) of_a += chosen[i] && i % 10 < 7 && i != 500;
    EXPECT_NEAR(static_cast<double>(of_a), 0.7 * static_cast<double>(count), 1.0) << count;
  }
}

TEST(SampleChoiceTest, TheSeedDecidesAndTheOrderOfLinesDoesNot) {
  EXPECT_EQ(Thousand(3).Choose(100), Thousand(3).Choose(100));
  EXPECT_NE(Thousand(3).Choose(100), Thousand(4).Choose(100));
  EXPECT_NE(Thousand(3, /*ids=*/false).Choose(100), Thousand(3).Choose(100));
  SampleChoice forward(1), backward(1);
  for (int i = 0; i < 50; ++i) {
    v1::SampleInput sample;
    sample.set_id(std::to_string(i));
    forward.Add(sample);
    sample.set_id(std::to_string(49 - i));
    backward.Add(sample);
  }
  std::vector<bool> mirrored = backward.Choose(7);
  std::reverse(mirrored.begin(), mirrored.end());
  EXPECT_EQ(mirrored, forward.Choose(7));
}

TEST(SampleChoiceTest, ARepeatedLineIsTheSameSampleAndTakesNoPlace) {
  SampleChoice choice(0);
  for (int i = 0; i < 40; ++i) {
    v1::SampleInput sample;
    sample.set_id(std::to_string(i / 2));
    choice.Add(sample);
  }
  const std::vector<bool> chosen = choice.Choose(10);
  EXPECT_EQ(std::count(chosen.begin(), chosen.end(), true), 10);
  for (size_t i = 1; i < chosen.size(); i += 2) EXPECT_FALSE(chosen[i]) << i;
}

}  // namespace
}  // namespace statetap
