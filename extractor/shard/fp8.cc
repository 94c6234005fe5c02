#include "extractor/shard/fp8.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "extractor/base/dtype.h"

namespace statetap {
namespace {

constexpr uint32_t kMantissaBits = 23 - 3;  // of a float that e4m3 drops
constexpr uint32_t kExponentShift = 127 - 7;
constexpr uint8_t kNanCode = 0x7f;
constexpr uint16_t kInfinity = 0x7f80;
constexpr float kLeastNormal = 0x1p-6f;
constexpr int kLeastExponent = -124;  // then the least code is the least bf16 value, 2^-133

// The nearest e4m3 magnitude to `magnitude` <= 240, ties to even, at most `most`.
float Rounded(float magnitude, float most) {
  const auto bits = std::bit_cast<uint32_t>(magnitude);
  const uint32_t half = (1u << (kMantissaBits - 1)) - 1 + ((bits >> kMantissaBits) & 1);
  const auto normal = std::bit_cast<float>((bits + half) & ~((1u << kMantissaBits) - 1));
  // Below 2^-6 codes are 2^-9 apart, as floats from 2^14 on are.
  const float subnormal = (magnitude + 0x1p14f) - 0x1p14f;
  const float rounded = magnitude >= kLeastNormal ? normal : subnormal;
  return rounded > most ? most : rounded;
}

// Of a magnitude that Rounded gave.
uint32_t CodeOf(float magnitude) {
  const uint32_t normal =
      (std::bit_cast<uint32_t>(magnitude) >> kMantissaBits) - (kExponentShift << 3);
  const auto subnormal = static_cast<uint32_t>(static_cast<int32_t>(magnitude * 0x1p9f));
  return magnitude >= kLeastNormal ? normal : subnormal;
}

float Decode(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

std::array<float, 256> MakeTable() {
  std::array<float, 256> table;
  for (int code = 0; code < 256; ++code)
    table[static_cast<size_t>(code)] = Decode(static_cast<uint8_t>(code));
  return table;
}
const std::array<float, 256> kDecoded = MakeTable();

// Of a float whose lower half is zero.
uint16_t UpperHalf(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

// Magnitudes of bf16 are in the order of their bits.
uint16_t LargestMagnitude(std::span<const uint16_t> values) {
  uint16_t largest = 0;
  for (const uint16_t value : values)
    largest = std::max(largest, static_cast<uint16_t>(value & 0x7fff));
  return largest;
}

float ScaleOf(uint16_t largest) {
  if (largest == 0) return 1;
  int exponent;  // largest = m · 2^exponent, m in [0.5, 1); 240 = 0.9375 · 2^8
  const float mantissa = std::frexp(Bf16ToFloat(largest), &exponent);
  exponent += mantissa > kFp8Max / 256 ? -7 : -8;
  return std::ldexp(1.0f, std::max(exponent, kLeastExponent));
}

}  // namespace

Fp8Row EncodeFp8Row(std::span<const uint16_t> values, std::span<uint8_t> codes,
                    std::span<uint16_t> decoded) {
  const uint16_t largest = LargestMagnitude(values);
  if (largest >= kInfinity) {
    std::fill(codes.begin(), codes.end(), kNanCode);
    std::fill(decoded.begin(), decoded.end(), UpperHalf(kDecoded[kNanCode]));
    return {1, 0};
  }
  const float scale = ScaleOf(largest);
  const float inverse = 1 / scale;  // exact: a power of two
  // At the end of bf16's range 128 would decode to infinity.
  const float most = scale > 0x1p120f ? 120 : kFp8Max;
  std::array<double, 8> errors{};  // apart, so that one addition need not wait for the last
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t sign = values[i] & 0x8000u;
    const float magnitude = Bf16ToFloat(values[i] & 0x7fff);
    const float rounded = Rounded(magnitude * inverse, most);
    const float now = rounded * scale;
    codes[i] = static_cast<uint8_t>(sign >> 8 | CodeOf(rounded));
    decoded[i] = static_cast<uint16_t>(sign | UpperHalf(now));
    const double error = double{magnitude} - double{now};
    errors[i % errors.size()] += error * error;
  }
  return {scale, std::accumulate(errors.begin(), errors.end(), 0.0)};
}

void DecodeFp8Row(std::span<const uint8_t> codes, float scale, std::span<uint16_t> values) {
  for (size_t i = 0; i < codes.size(); ++i) values[i] = UpperHalf(kDecoded[codes[i]] * scale);
}

}  // namespace statetap
