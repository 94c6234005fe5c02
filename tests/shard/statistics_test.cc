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
