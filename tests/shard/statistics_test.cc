#include "extractor/shard/statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "extractor/base/dtype.h"

namespace statetap {
namespace {

using Rows = std::vector<uint16_t>;  // [rows, hidden]

Rows MakeRows(int64_t rows, int hidden, const std::function<double(int64_t, int)>& value) {
  Rows bits(static_cast<size_t>(rows * hidden));
  for (int64_t row = 0; row < rows; ++row)
    for (int c = 0; c < hidden; ++c)
      bits[static_cast<size_t>(row * hidden + c)] = FloatToBf16(static_cast<float>(value(row, c)));
  return bits;
}

Rows RandomRows(int64_t rows, int hidden, uint32_t seed, double mean, double scale) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(mean, scale);
  return MakeRows(rows, hidden, [&](int64_t, int) { return normal(random); });
}

BoundaryStatistics StatisticsOf(const Rows& rows, int hidden) {
  BoundaryStatistics statistics(hidden);
  statistics.Add(rows);
  return statistics;
}

// Two passes in fp80, by channel: the reference. Compares to 1e-9 of the channel's rms.
void ExpectEqualsTwoPass(const BoundaryStatistics& found, const Rows& bits, int hidden) {
  const auto rows = static_cast<int64_t>(bits.size()) / hidden;
  ASSERT_EQ(found.count, rows);
  const auto value = [&](int64_t row, int c) -> long double {
    return Bf16ToFloat(bits[static_cast<size_t>(row * hidden + c)]);
  };
  for (int c = 0; c < hidden; ++c) {
    long double sum = 0, squares = 0, deviations = 0;
    double low = value(0, c), high = low;
    for (int64_t row = 0; row < rows; ++row) {
      sum += value(row, c);
      squares += value(row, c) * value(row, c);
      low = std::min(low, static_cast<double>(value(row, c)));
      high = std::max(high, static_cast<double>(value(row, c)));
    }
    const long double mean = sum / rows, rms = std::sqrt(squares / rows);
    for (int64_t row = 0; row < rows; ++row) {
      const long double deviation = value(row, c) - mean;
      deviations += deviation * deviation;
    }
    const auto tolerance = static_cast<double>(1e-9L * rms);
    const auto at = static_cast<size_t>(c);
    EXPECT_NEAR(found.mean[at], static_cast<double>(mean), tolerance) << "channel " << c;
    EXPECT_NEAR(std::sqrt(found.m2[at] / static_cast<double>(rows)),
                static_cast<double>(std::sqrt(deviations / rows)), tolerance)
        << "channel " << c;
    EXPECT_EQ(found.min[at], low);
    EXPECT_EQ(found.max[at], high);
    EXPECT_EQ(found.abs_max[at], std::max(std::abs(low), std::abs(high)));
  }
}

// Widths and numbers of rows around those of the vectors and the groups of rows.
class StatisticsShapeTest : public ::testing::TestWithParam<std::tuple<int, int>> {};
TEST_P(StatisticsShapeTest, EqualsTwoPasses) {
  const auto [hidden, rows] = GetParam();
  const Rows bits = RandomRows(rows, hidden, 1, 0.3, 2.0);
  ExpectEqualsTwoPass(StatisticsOf(bits, hidden), bits, hidden);
}
INSTANTIATE_TEST_SUITE_P(Shapes, StatisticsShapeTest,
                         ::testing::Combine(::testing::Values(1, 7, 15, 16, 17, 128, 1000),
                                            ::testing::Values(1, 2, 4, 15, 16, 17, 31, 100)));

TEST(StatisticsTest, ASmallMeanWithOneOutlierAmongAMillion) {
  constexpr int64_t kRows = 1000000;
  for (const int64_t place : {int64_t{0}, kRows / 2, kRows - 1}) {
    const Rows bits =
        MakeRows(kRows, 2, [&](int64_t row, int c) { return c == 0 && row == place ? 1e3 : 1e-3; });
    ExpectEqualsTwoPass(StatisticsOf(bits, 2), bits, 2);
  }
}

TEST(StatisticsTest, ALargeMeanWithTinyDeviations) {
  // Neighbouring bf16 values: the deviation is 1/256 of the mean, the naive sum of squares fails.
  const Rows bits = MakeRows(
      100000, 3, [](int64_t row, int c) { return 1e4 * (c + 1) * (1 + (row % 2) / 128.0); });
  ExpectEqualsTwoPass(StatisticsOf(bits, 3), bits, 3);
}

TEST(StatisticsTest, ValuesWhoseSquaresOverflowFloat) {
  const Rows bits = RandomRows(100, 8, 3, 0, 1e30);
  const BoundaryStatistics found = StatisticsOf(bits, 8);
  ExpectEqualsTwoPass(found, bits, 8);
  EXPECT_EQ(found.row_rms_histogram[kRmsBins - 1], 100);
  EXPECT_NEAR(found.Summary().rms, 1e30, 2e29);
}

TEST(StatisticsTest, TwoConstantSamplesOfDifferentValue) {
  const int hidden = 5;
  const Rows first = MakeRows(100, hidden, [](int64_t, int) { return 0.1; });
  const Rows second = MakeRows(300, hidden, [](int64_t, int) { return -7.3; });
  Rows both = first;
  both.insert(both.end(), second.begin(), second.end());
  BoundaryStatistics added(hidden);
  added.Add(first);
  EXPECT_EQ(added.m2, std::vector<double>(hidden, 0.0));
  added.Add(second);
  ExpectEqualsTwoPass(added, both, hidden);
  BoundaryStatistics merged = StatisticsOf(second, hidden);
  merged.Merge(StatisticsOf(first, hidden));
  ExpectEqualsTwoPass(merged, both, hidden);
}

TEST(StatisticsTest, AnyOrderAndTreeOfMergesEqualsTheWhole) {
  const int hidden = 9;
  std::vector<Rows> parts;
  Rows whole;
  std::mt19937 random(5);
  for (uint32_t i = 0; i < 40; ++i) {
    parts.push_back(RandomRows(1 + random() % 60, hidden, i, i % 3 == 0 ? 100 : -0.01, 1 + i));
    whole.insert(whole.end(), parts.back().begin(), parts.back().end());
  }
  for (int round = 0; round < 20; ++round) {
    std::vector<BoundaryStatistics> forest;
    for (const Rows& part : parts) forest.push_back(StatisticsOf(part, hidden));
    while (forest.size() > 1) {
      std::shuffle(forest.begin(), forest.end(), random);
      const BoundaryStatistics last = forest.back();
      forest.pop_back();
      forest[random() % forest.size()].Merge(last);
    }
    ExpectEqualsTwoPass(forest.front(), whole, hidden);
  }
}

TEST(StatisticsTest, MergingWithNothingChangesNothing) {
  const Rows bits = RandomRows(10, 4, 1, 1, 1);
  const BoundaryStatistics some = StatisticsOf(bits, 4);
  BoundaryStatistics left(4), right = some;
  left.Merge(some);
  right.Merge(BoundaryStatistics(4));
  for (const BoundaryStatistics& merged : {left, right}) {
    EXPECT_EQ(merged.count, 10);
    EXPECT_EQ(merged.mean, some.mean);
    EXPECT_EQ(merged.m2, some.m2);
    EXPECT_EQ(merged.min, some.min);
    EXPECT_EQ(merged.max, some.max);
    EXPECT_EQ(merged.row_rms_histogram, some.row_rms_histogram);
  }
}

TEST(StatisticsTest, NonFiniteRowsAreCountedAndLeftOut) {
  const int hidden = 20;
  Rows bits = RandomRows(50, hidden, 1, 0, 1);
  Rows finite;
  const uint16_t bad[] = {0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffff};  // ±infinity, NaNs
  for (int64_t row = 0; row < 50; ++row) {
    const auto begin = bits.begin() + row * hidden;
    if (row % 10 == 3) {
      begin[row % hidden] = bad[row / 10];
    } else {
      finite.insert(finite.end(), begin, begin + hidden);
    }
  }
  const BoundaryStatistics found = StatisticsOf(bits, hidden);
  EXPECT_EQ(found.nonfinite, 5);
  ExpectEqualsTwoPass(found, finite, hidden);
}

TEST(StatisticsTest, TheLargestFiniteValueIsFinite) {
  const Rows bits(8, 0x7f7f);
  const BoundaryStatistics found = StatisticsOf(bits, 4);
  EXPECT_EQ(found.nonfinite, 0);
  EXPECT_EQ(found.max[0], Bf16ToFloat(0x7f7f));
  EXPECT_EQ(found.m2[0], 0);
}

TEST(StatisticsTest, ZeroRowsAreCountedWhateverTheirSigns) {
  Rows bits = RandomRows(6, 32, 1, 0, 1);
  std::fill_n(bits.begin(), 32, uint16_t{0});
  std::fill_n(bits.begin() + 64, 32, uint16_t{0x8000});
  const BoundaryStatistics found = StatisticsOf(bits, 32);
  EXPECT_EQ(found.zero_rows, 2);
  EXPECT_EQ(found.count, 6);
  EXPECT_EQ(found.row_rms_histogram[0], 2);
}

TEST(StatisticsTest, RowRmsFallsIntoItsBin) {
  const auto bin_of = [](double rms) {
    const BoundaryStatistics found =
        StatisticsOf(Rows(64, FloatToBf16(static_cast<float>(rms))), 64);
    return std::ranges::find(found.row_rms_histogram, 1) - found.row_rms_histogram.begin();
  };
  EXPECT_EQ(bin_of(1), 128);  // 2^(128/8 - 16)
  EXPECT_EQ(bin_of(0.99609375), 127);
  EXPECT_EQ(bin_of(2), 136);
  EXPECT_EQ(bin_of(0x1p-16), 0);
  EXPECT_EQ(bin_of(0x1p-20), 0);
  EXPECT_EQ(bin_of(0x1p15), 248);
  EXPECT_EQ(bin_of(0x1p20), 255);
}

struct ClassedRows {
  Rows rows, before;
  std::vector<TokenClass> classes;
};

// Rows that turn away from those before them; some zero, some not finite, on either side.
ClassedRows RandomClassedRows(int64_t rows, int hidden, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  ClassedRows made;
  made.before = RandomRows(rows, hidden, seed + 1000, 0.2, 3);
  for (const uint16_t bits : made.before)
    made.rows.push_back(FloatToBf16(Bf16ToFloat(bits) + static_cast<float>(normal(random))));
  for (int64_t row = 0; row < rows; ++row) {
    made.classes.push_back(static_cast<TokenClass>(random() % kTokenClasses));
    Rows& side = random() % 2 == 0 ? made.rows : made.before;
    const auto begin = side.begin() + row * hidden;
    if (row % 11 == 5) std::fill_n(begin, hidden, uint16_t{0});
    if (row % 13 == 6) begin[hidden / 2] = 0x7fc0;
  }
  return made;
}

// By class in fp80: rows, and mean and standard deviation of the cosines.
void ExpectClassesEqual(const BoundaryStatistics& found, const std::vector<ClassedRows>& parts,
                        int hidden) {
  for (int wanted = 0; wanted < kTokenClasses; ++wanted) {
    int64_t count = 0;
    std::vector<long double> cosines;
    for (const ClassedRows& part : parts) {
      for (size_t row = 0; row < part.classes.size(); ++row) {
        if (part.classes[row] != static_cast<TokenClass>(wanted)) continue;
        long double dot = 0, own = 0, other = 0;
        for (size_t c = 0; c < static_cast<size_t>(hidden); ++c) {
          const size_t at = row * static_cast<size_t>(hidden) + c;
          const long double x = Bf16ToFloat(part.rows[at]), y = Bf16ToFloat(part.before[at]);
          dot += x * y;
          own += x * x;
          other += y * y;
        }
        if (std::isfinite(own)) ++count;
        if (std::isfinite(dot) && own > 0 && other > 0)
          cosines.push_back(dot / std::sqrt(own * other));
      }
    }
    const ClassStatistics& of_class = found.by_class[static_cast<size_t>(wanted)];
    EXPECT_EQ(of_class.count, count);
    ASSERT_EQ(of_class.compared, static_cast<int64_t>(cosines.size()));
    long double mean = 0, deviations = 0;
    for (const long double cosine : cosines) mean += cosine / static_cast<double>(cosines.size());
    for (const long double cosine : cosines) deviations += (cosine - mean) * (cosine - mean);
    if (cosines.empty()) continue;
    EXPECT_NEAR(of_class.MeanCosine(), static_cast<double>(mean), 1e-12);
    // A difference of squares near 1: half of fp64's digits are left.
    EXPECT_NEAR(of_class.CosineStd(),
                static_cast<double>(std::sqrt(deviations / static_cast<double>(cosines.size()))),
                1e-7);
    int64_t binned = 0;
    for (const int64_t rows : of_class.row_rms_histogram) binned += rows;
    EXPECT_EQ(binned, count);
  }
}

TEST(StatisticsTest, ClassesAndCosinesEqualFp80InAnyOrderOfMerges) {
  std::mt19937 random(9);
  for (const int hidden : {1, 7, 16, 33, 128}) {
    std::vector<ClassedRows> parts;
    for (uint32_t i = 0; i < 12; ++i)
      parts.push_back(RandomClassedRows(1 + random() % 60, hidden, 100 * i + 1));
    BoundaryStatistics added(hidden);
    std::vector<BoundaryStatistics> forest;
    for (const ClassedRows& part : parts) {
      added.Add(part.rows, part.classes, part.before);
      forest.emplace_back(hidden).Add(part.rows, part.classes, part.before);
    }
    ExpectClassesEqual(added, parts, hidden);
    EXPECT_EQ(added.AllClasses().count, added.count);
    EXPECT_EQ(added.AllClasses().row_rms_histogram, added.row_rms_histogram);
    while (forest.size() > 1) {
      std::shuffle(forest.begin(), forest.end(), random);
      const BoundaryStatistics last = forest.back();
      forest.pop_back();
      forest[random() % forest.size()].Merge(last);
    }
    ExpectClassesEqual(forest.front(), parts, hidden);
  }
}

TEST(StatisticsTest, CosinesOfTheSameAndOfOppositeRows) {
  const int hidden = 100;
  const Rows rows = RandomRows(20, hidden, 3, 0, 1e18);  // whose squares overflow float
  Rows opposite = rows;
  for (uint16_t& bits : opposite) bits ^= 0x8000;
  const std::vector<TokenClass> classes(20, TokenClass::kPrompt);
  BoundaryStatistics same(hidden), against(hidden), unknown(hidden);
  same.Add(rows, classes, rows);
  against.Add(rows, classes, opposite);
  unknown.Add(rows, {}, rows);
  EXPECT_NEAR(same.AllClasses().MeanCosine(), 1, 1e-14);
  EXPECT_NEAR(against.AllClasses().MeanCosine(), -1, 1e-14);
  EXPECT_EQ(unknown.AllClasses().count, 0);
  EXPECT_TRUE(std::isnan(unknown.AllClasses().MeanCosine()));
  // Shards that know no classes beside one that does: the rest is told apart by the counts.
  unknown.Merge(same);
  EXPECT_EQ(unknown.count, 40);
  EXPECT_EQ(unknown.AllClasses().count, 20);
}

TEST(TokenClassesTest, ATokenIsTheFirstThatItIs) {
  using enum TokenClass;
  const std::vector<int32_t> ids = {900, 5, 901, 6, 7, 902};
  const std::vector<uint8_t> mask = {1, 0, 0, 1, 0, 1};
  EXPECT_THAT(TokenClassesOf(ids, mask, 900),
              ::testing::ElementsAre(kFirst, kPrompt, kSpecial, kSupervised, kPrompt, kSpecial));
  EXPECT_THAT(TokenClassesOf(ids, mask, -1), ::testing::IsEmpty());
}

TEST(StatisticsTest, QuantilesAreWithinHalfABin) {
  BoundaryStatistics found(16);
  std::vector<double> rms;
  std::mt19937 random(2);
  std::lognormal_distribution<double> values(1, 1.5);
  for (int row = 0; row < 5000; ++row) {
    const uint16_t bits = FloatToBf16(static_cast<float>(values(random)));
    found.Add(Rows(16, bits));
    rms.push_back(Bf16ToFloat(bits));
  }
  std::sort(rms.begin(), rms.end());
  for (const double q : {0.0, 0.01, 0.5, 0.99, 1.0}) {
    const auto rank = std::clamp<int64_t>(static_cast<int64_t>(std::ceil(q * 5000)), 1, 5000);
    const double exact = rms[static_cast<size_t>(rank - 1)];
    EXPECT_LE(std::abs(std::log2(found.RmsQuantile(q) / exact)), 1.0 / 16 + 1e-9) << q;
  }
  EXPECT_TRUE(std::isnan(BoundaryStatistics(4).RmsQuantile(0.5)));
}

TEST(StatisticsTest, TheSummaryIsThatOfAllValues) {
  const int hidden = 33;
  const Rows bits = RandomRows(70, hidden, 4, 0.5, 3);
  double sum = 0, squares = 0, low = 1e9, high = -1e9;
  for (const uint16_t value : bits) {
    const double x = Bf16ToFloat(value);
    sum += x;
    squares += x * x;
    low = std::min(low, x);
    high = std::max(high, x);
  }
  const double n = static_cast<double>(bits.size()), mean = sum / n;
  const BoundaryStatistics::Overall overall = StatisticsOf(bits, hidden).Summary();
  EXPECT_NEAR(overall.mean, mean, 1e-12);
  EXPECT_NEAR(overall.rms, std::sqrt(squares / n), 1e-12);
  EXPECT_NEAR(overall.std, std::sqrt(squares / n - mean * mean), 1e-12);
  EXPECT_EQ(overall.min, low);
  EXPECT_EQ(overall.max, high);
  EXPECT_EQ(overall.abs_max, std::max(-low, high));
  EXPECT_TRUE(std::isnan(BoundaryStatistics(4).Summary().mean));
}

}  // namespace
}  // namespace statetap
