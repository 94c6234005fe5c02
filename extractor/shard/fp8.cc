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
constexpr uint8_t kCodeOf120 = 0x6f, kCodeOf240 = 0x77, kNanCode = 0x7f;
constexpr uint16_t kInfinity = 0x7f80;
constexpr float kLeastNormal = 0x1p-6f;
constexpr int kLeastExponent = -124;  // then the least code is the least bf16 value, 2^-133

// Round to nearest, ties to even. |value| <= 240.
uint8_t Encode(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal =
      ((magnitude + (1u << (kMantissaBits - 1)) - 1 + ((magnitude >> kMantissaBits) & 1)) >>
       kMantissaBits) -
      (kExponentShift << 3);
  // Below 2^-6 codes count steps of 2^-9: adding 2^14 leaves just these bits of the sum.
  const uint32_t steps = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) & 0xffu;
  const bool is_normal = magnitude >= std::bit_cast<uint32_t>(kLeastNormal);
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (is_normal ? normal : steps));
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
  const uint8_t most = scale > 0x1p120f ? kCodeOf120 : kCodeOf240;
  std::array<double, 8> errors{};  // apart, so that one addition need not wait for the last
  for (size_t i = 0; i < values.size(); ++i) {
    const uint8_t rounded = Encode(Bf16ToFloat(values[i]) * inverse);
    const uint8_t code =
        static_cast<uint8_t>((rounded & 0x80) | std::min<int>(rounded & 0x7f, most));
    codes[i] = code;
    const float now = kDecoded[code] * scale;
    const double error = double{Bf16ToFloat(values[i])} - double{now};
    errors[i % errors.size()] += error * error;
    decoded[i] = UpperHalf(now);
  }
  return {scale, std::accumulate(errors.begin(), errors.end(), 0.0)};
}

void DecodeFp8Row(std::span<const uint8_t> codes, float scale, std::span<uint16_t> values) {
  for (size_t i = 0; i < codes.size(); ++i) values[i] = UpperHalf(kDecoded[codes[i]] * scale);
}

}  // namespace statetap
