#include "extractor/checkpoint/int4.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace statetap {
namespace {

TEST(Int4Test, EveryCodeAtEveryPlaceOfAWord) {
  for (int place = 0; place < 8; ++place) {
    for (int code = -8; code <= 7; ++code) {
      int8_t codes[8] = {};
      codes[place] = static_cast<int8_t>(code);
      uint32_t word = 0;
      PackInt4Row(codes, 8, &word);
      // Zero is nibble 8; the lowest column lies in the lowest bits.
      EXPECT_EQ(word, (0x88888888u & ~(15u << 4 * place)) | static_cast<uint32_t>(code + 8)
                                                                << 4 * place);
      int8_t back[8];
      UnpackInt4Row(&word, 8, back);
      for (int i = 0; i < 8; ++i) EXPECT_EQ(back[i], codes[i]);
    }
  }
}

TEST(Int4Test, DequantizesWithTheScaleOfTheGroup) {
  std::vector<int8_t> codes(96);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<int8_t>(i % 16 - 8);
  std::vector<uint32_t> words(12);
  PackInt4Row(codes.data(), 96, words.data());
  const float scales[] = {0.5f, 0x1p-20f, 3};
  const uint16_t bf16[] = {FloatToBf16(0.5f), FloatToBf16(0x1p-20f), FloatToBf16(3)};
  std::vector<float> out(96), out_bf16(96);
  DequantizeInt4Row(words.data(), scales, 96, out.data());
  DequantizeInt4Row(words.data(), bf16, 96, out_bf16.data());
  for (size_t i = 0; i < 96; ++i) EXPECT_EQ(out[i], codes[i] * scales[i / 32]);
  EXPECT_EQ(out, out_bf16);
}

TEST(Int4Test, ReadsScalesOfEachTypeAtAnyAlignment) {
  const float values[] = {0.25f, 1.5f, 0x1p-10f};
  std::vector<std::byte> bytes(1 + sizeof(values));
  float out[3];
  const auto check = [&](DType dtype, const void* stored, size_t size) {
    std::memcpy(bytes.data() + 1, stored, size);
    ScalesToFloat(dtype, bytes.data() + 1, out);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(out[i], values[i]) << NameOf(dtype);
  };
  uint16_t bf16[3], half[3];
  for (int i = 0; i < 3; ++i) {
    bf16[i] = FloatToBf16(values[i]);
    half[i] = FloatToHalf(values[i]);
  }
  check(DType::kBf16, bf16, sizeof(bf16));
  check(DType::kF16, half, sizeof(half));
  check(DType::kF32, values, sizeof(values));
}

TEST(Int4Test, QuantizesWithinHalfAScale) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> weights(64);
  for (float& weight : weights) weight = normal(random);
  std::vector<uint32_t> words(8);
  std::vector<uint16_t> scales(2);
  std::vector<float> back(64);
  QuantizeInt4Row(weights.data(), 64, words.data(), scales.data());
  DequantizeInt4Row(words.data(), scales.data(), 64, back.data());
  for (size_t i = 0; i < 64; ++i) {
    // The scale was rounded to bf16, so the largest weight may lie 2^-9 beyond code 7.
    EXPECT_LE(std::fabs(weights[i] - back[i]), Bf16ToFloat(scales[i / 32]) * 0.52f);
  }
}

TEST(Int4Test, QuantizesZerosToZeros) {
  const std::vector<float> zeros(32);
  std::vector<uint32_t> words(4);
  uint16_t scale = 0;
  QuantizeInt4Row(zeros.data(), 32, words.data(), &scale);
  for (const uint32_t word : words) EXPECT_EQ(word, 0x88888888u);
  EXPECT_EQ(Bf16ToFloat(scale), 1);
}

TEST(HalfTest, EveryHalfComesBack) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float value = HalfToFloat(static_cast<uint16_t>(half));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(value))));
    } else {
      EXPECT_EQ(FloatToHalf(value), half);
    }
  }
}

TEST(HalfTest, RoundsToNearestTiesToEven) {
  EXPECT_EQ(FloatToHalf(1 + 0x1p-11f), 0x3c00);             // half way down to even
  EXPECT_EQ(FloatToHalf(1 + 3 * 0x1p-11f), 0x3c02);         // half way up to even
  EXPECT_EQ(FloatToHalf(1 + 0x1p-11f + 0x1p-20f), 0x3c01);  // beyond half way
  EXPECT_EQ(FloatToHalf(65519), 0x7bff);
  EXPECT_EQ(FloatToHalf(-65520), 0xfc00);
  EXPECT_EQ(FloatToHalf(0x1p-25f), 0);  // half of the least
  EXPECT_EQ(FloatToHalf(0x1.8p-25f), 1);
}

}  // namespace
}  // namespace statetap
