#include "extractor/shard/fp8.h"

#include <cmath>
#include <random>
#include <vector>

#include "extractor/base/dtype.h"
#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

// Every finite e4m3 magnitude up to 240, by the definition.
std::vector<double> Magnitudes() {
  std::vector<double> magnitudes;
  for (int mantissa = 0; mantissa < 8; ++mantissa) magnitudes.push_back(std::ldexp(mantissa, -9));
  for (int exponent = 1; exponent < 15; ++exponent)
    for (int mantissa = 0; mantissa < 8; ++mantissa)
      magnitudes.push_back(std::ldexp(8 + mantissa, exponent - 10));
  return magnitudes;
}

// The nearest magnitude, the even code where two are as near.
size_t Nearest(const std::vector<double>& magnitudes, double value) {
  size_t best = 0;
  for (size_t code = 1; code < magnitudes.size(); ++code) {
    const double now = std::abs(magnitudes[code] - value),
                 then = std::abs(magnitudes[best] - value);
    if (now < then || (now == then && code % 2 == 0)) best = code;
  }
  return best;
}

struct Encoded {
  float scale;
  double squared_error;
  std::vector<uint8_t> codes;
  std::vector<uint16_t> decoded;
};
Encoded EncodeRow(const std::vector<uint16_t>& values) {
  Encoded row{0, 0, std::vector<uint8_t>(values.size(), 0xAA),
              std::vector<uint16_t>(values.size())};
  const Fp8Row facts = EncodeFp8Row(values, row.codes, row.decoded);
  row.scale = facts.scale;
  row.squared_error = facts.squared_error;
  return row;
}

TEST(Fp8Test, EveryBf16ValueBelow240BecomesTheNearestCode) {
  const std::vector<double> magnitudes = Magnitudes();
  std::vector<uint16_t> values = {FloatToBf16(240)};  // fixes the scale to 1
  for (uint32_t bits = 0; bits <= FloatToBf16(240); ++bits) {
    values.push_back(static_cast<uint16_t>(bits));
    values.push_back(static_cast<uint16_t>(bits | 0x8000));
  }
  const Encoded row = EncodeRow(values);
  ASSERT_EQ(row.scale, 1);
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = double{Bf16ToFloat(values[i])};
    const size_t nearest = Nearest(magnitudes, std::abs(value));
    ASSERT_EQ(row.codes[i] & 0x7f, nearest) << value;
    ASSERT_EQ(row.codes[i] >> 7, values[i] >> 15) << value;
    ASSERT_EQ(std::abs(double{Bf16ToFloat(row.decoded[i])}), magnitudes[nearest]) << value;
  }
}

TEST(Fp8Test, TheScaleIsTheLeastPowerOfTwoThatFits) {
  for (const float largest : {1e-30f, 0.3f, 1.0f, 239.0f, 240.0f, 241.0f, 448.0f, 4384.0f, 3e38f}) {
    const uint16_t value = FloatToBf16(-largest);
    const Encoded row = EncodeRow({0, value, 0});
    const float magnitude = Bf16ToFloat(static_cast<uint16_t>(value & 0x7fff));
    EXPECT_LE(magnitude / row.scale, 240) << largest;
    EXPECT_GT(magnitude / row.scale, 120) << largest;
    EXPECT_EQ(std::exp2(std::round(std::log2(row.scale))), row.scale);
  }
  EXPECT_EQ(EncodeRow({0, 0x8000, 0}).scale, 1);
  EXPECT_EQ(EncodeRow({}).scale, 1);
}

TEST(Fp8Test, DecodedRowsAreBf16AndEncodeToThemselves) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint16_t> values(65);
    for (uint16_t& value : values) {
      value = static_cast<uint16_t>(random());
      if ((value & 0x7f80) == 0x7f80) value = 0;                                     // not finite
      if (round % 2 == 0) value = static_cast<uint16_t>((value & 0x83ff) | 0x3c00);  // around 1
    }
    const Encoded row = EncodeRow(values);
    std::vector<uint16_t> decoded(values.size(), 0xAAAA);
    DecodeFp8Row(row.codes, row.scale, decoded);
    ASSERT_EQ(decoded, row.decoded);
    double squared_error = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const double value = double{Bf16ToFloat(values[i])}, now = double{Bf16ToFloat(decoded[i])};
      squared_error += (value - now) * (value - now);
      // Half a step: 1/16 of the power of two below, or of the least normal.
      const double step = std::max(std::exp2(std::floor(std::log2(std::abs(value)))),
                                   std::ldexp(double{row.scale}, -6));
      ASSERT_TRUE(std::isfinite(now));
      if (std::abs(value) > 3.2e38) continue;  // rounds down there
      ASSERT_TRUE(value == 0 || std::abs(value - now) <= step / 16) << value;
    }
    ASSERT_NEAR(row.squared_error, squared_error, 1e-12 * squared_error);
    ASSERT_EQ(EncodeRow(decoded).decoded, decoded);
    ASSERT_EQ(EncodeRow(decoded).squared_error, 0);
  }
}

TEST(Fp8Test, EveryCodeOfE4m3fnIsDecoded) {
  std::vector<double> magnitudes = Magnitudes();
  for (const double more : {256, 288, 320, 352, 384, 416, 448}) magnitudes.push_back(more);
  for (int code = 0; code < 127; ++code) {
    const double value = magnitudes[static_cast<size_t>(code)];
    EXPECT_EQ(Fp8ToFloat(static_cast<uint8_t>(code)), value);
    EXPECT_EQ(Fp8ToFloat(static_cast<uint8_t>(code | 0x80)), -value);
  }
  EXPECT_TRUE(std::isnan(Fp8ToFloat(0x7f)) && std::isnan(Fp8ToFloat(0xff)));
}

TEST(Fp8Test, ARowThatIsNotFiniteBecomesNan) {
  for (const uint16_t bad : {0x7f80, 0xff80, 0x7fc1}) {
    const Encoded row = EncodeRow({FloatToBf16(1), bad, FloatToBf16(-3)});
    for (const uint16_t value : row.decoded) EXPECT_TRUE(std::isnan(Bf16ToFloat(value)));
    std::vector<uint16_t> decoded(3);
    DecodeFp8Row(row.codes, row.scale, decoded);
    EXPECT_EQ(decoded, row.decoded);
    EXPECT_EQ(row.squared_error, 0);
  }
}

}  // namespace
}  // namespace statetap
