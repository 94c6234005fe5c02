// Element types of checkpoints, activations and shards, and bf16 conversion.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace statetap {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kI16,
  kI32,
  kI64,
  kF8E4M3,
  kF8E5M2,
  kF16,
  kBf16,
  kF32,
  kF64
};

constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
    case DType::kI8:
    case DType::kF8E4M3:
    case DType::kF8E5M2: return 1;
    case DType::kI16:
    case DType::kF16:
    case DType::kBf16: return 2;
    case DType::kI32:
    case DType::kF32: return 4;
    case DType::kI64:
    case DType::kF64: return 8;
  }
  return 0;
}

constexpr std::string_view NameOf(DType dtype) {
  switch (dtype) {
    case DType::kBool: return "bool";
    case DType::kU8: return "uint8";
    case DType::kI8: return "int8";
    case DType::kI16: return "int16";
    case DType::kI32: return "int32";
    case DType::kI64: return "int64";
    case DType::kF8E4M3: return "float8_e4m3";
    case DType::kF8E5M2: return "float8_e5m2";
    case DType::kF16: return "float16";
    case DType::kBf16: return "bfloat16";
    case DType::kF32: return "float32";
    case DType::kF64: return "float64";
  }
  return "?";
}

// bf16: the upper half of a float32. Rounds to nearest, ties to even; NaN stays NaN, overflow
// becomes infinity.
constexpr float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

constexpr uint16_t FloatToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

constexpr bool Bf16IsFinite(uint16_t bits) { return (bits & 0x7f80) != 0x7f80; }

// Of bf16 values the first that is not finite; values.size() where all are.
inline size_t FirstNonFinite(std::span<const uint16_t> values) {
  constexpr size_t kBlock = 1024;  // as a whole: a loop that may stop early is no vector loop
  size_t begin = 0;
  for (; begin + kBlock <= values.size(); begin += kBlock) {
    uint16_t bad = 0;
    for (size_t i = 0; i < kBlock; ++i) bad |= Bf16IsFinite(values[begin + i]) ? 0 : 1;
    if (bad != 0) break;
  }
  const auto rest = values.subspan(begin);
  return begin + static_cast<size_t>(std::find_if_not(rest.begin(), rest.end(), Bf16IsFinite) -
                                     rest.begin());
}

// IEEE half; subnormals and specials included.
constexpr float HalfToFloat(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = (half >> 10) & 31, mantissa = half & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

// Rounds to nearest, ties to even; NaN stays NaN, overflow becomes infinity.
constexpr uint16_t FloatToHalf(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;
  if (magnitude < 0x38800000u) {
    // Below the normal halves: adding 0.5 leaves the float a last place of 2^-24, theirs.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace statetap
