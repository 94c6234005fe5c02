#include "extractor/shard/fp8.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "extractor/base/dtype.h"

// One function for each width of vectors, chosen when the program starts; the bits are the same.
// (clang and the thread sanitizer get along badly with it, and are no place for speed.)
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define STATETAP_VECTOR_CLONES [[gnu::target_clones("arch=x86-64-v4", "avx2", "default")]]
#else
#define STATETAP_VECTOR_CLONES
#endif

namespace statetap {
namespace {

constexpr uint32_t kMantissaBits = 23 - 3;  // of a float that e4m3 drops
constexpr uint32_t kExponentShift = 127 - 7;
constexpr uint8_t kNanCode = 0x7f;
constexpr uint16_t kInfinity = 0x7f80;
constexpr int kLeastExponent = -124;  // then the least code is the least bf16 value, 2^-133

// Magnitudes as bits are in the order of their values: what follows compares and chooses with
// integers alone, so that the loop over a block becomes vector instructions.
constexpr uint32_t kLeastNormal = (127 - 6) << 23;  // 2^-6

[[gnu::always_inline]] inline uint32_t Choose(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = -static_cast<uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

// Bits of the nearest e4m3 magnitude to the one of `bits` <= 240, ties to even, at most `most`.
[[gnu::always_inline]] inline uint32_t Rounded(uint32_t bits, uint32_t most) {
  const uint32_t half = (1u << (kMantissaBits - 1)) - 1 + ((bits >> kMantissaBits) & 1);
  const uint32_t normal = (bits + half) & ~((1u << kMantissaBits) - 1);
  // Below 2^-6 codes are 2^-9 apart, as floats from 2^14 on are.
  const float subnormal = (std::bit_cast<float>(bits) + 0x1p14f) - 0x1p14f;
  const uint32_t rounded = Choose(bits >= kLeastNormal, normal, std::bit_cast<uint32_t>(subnormal));
  return std::min(rounded, most);
}

// Of a magnitude that Rounded gave.
[[gnu::always_inline]] inline uint32_t CodeOf(uint32_t bits) {
  const uint32_t normal = (bits >> kMantissaBits) - (kExponentShift << 3);
  const auto subnormal =
      static_cast<uint32_t>(static_cast<int32_t>(std::bit_cast<float>(bits) * 0x1p9f));
  return Choose(bits >= kLeastNormal, normal, subnormal);
}

float Decode(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == kNanCode) return std::numeric_limits<float>::quiet_NaN();
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
STATETAP_VECTOR_CLONES uint16_t LargestMagnitude(std::span<const uint16_t> values) {
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

// So many values at a time: the compiler sees the count.
constexpr size_t kBlock = 64;

struct RowScale {
  float scale, inverse;
  uint32_t most;  // bits of the largest magnitude
};

// `codes` and `decoded` apart from each other; returns the sum of squared errors.
STATETAP_VECTOR_CLONES double EncodeBlock(const uint16_t* values, const RowScale& block,
                                          uint8_t* codes, uint16_t* decoded) {
  std::array<float, kBlock> differences;
  std::array<uint8_t, kBlock> code;  // apart from `values`, whatever aliases
  std::array<uint16_t, kBlock> now16;
  for (size_t i = 0; i < kBlock; ++i) {
    const uint32_t value = values[i], sign = value & 0x8000u;
    const float magnitude = std::bit_cast<float>((value & 0x7fffu) << 16);
    const uint32_t rounded =
        Rounded(std::bit_cast<uint32_t>(magnitude * block.inverse), block.most);
    const float now = std::bit_cast<float>(rounded) * block.scale;
    code[i] = static_cast<uint8_t>(sign >> 8 | CodeOf(rounded));
    now16[i] = static_cast<uint16_t>(sign | std::bit_cast<uint32_t>(now) >> 16);
    differences[i] = magnitude - now;
  }
  std::copy(code.begin(), code.end(), codes);
  std::copy(now16.begin(), now16.end(), decoded);
  std::array<double, 8> errors{};
  for (size_t i = 0; i < kBlock; i += 8)
    for (size_t k = 0; k < 8; ++k)
      errors[k] += double{differences[i + k]} * double{differences[i + k]};
  return std::accumulate(errors.begin(), errors.end(), 0.0);
}

}  // namespace

float Fp8ToFloat(uint8_t code) { return kDecoded[code]; }

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
  const RowScale block = {scale, inverse, std::bit_cast<uint32_t>(most)};
  double error = 0;
  size_t at = 0;
  for (; at + kBlock <= values.size(); at += kBlock)
    error += EncodeBlock(values.data() + at, block, codes.data() + at, decoded.data() + at);
  if (at < values.size()) {
    std::array<uint16_t, kBlock> in{}, out;
    std::array<uint8_t, kBlock> rest;
    std::copy(values.begin() + static_cast<ptrdiff_t>(at), values.end(), in.begin());
    error += EncodeBlock(in.data(), block, rest.data(), out.data());
    const size_t count = values.size() - at;
    std::copy_n(rest.begin(), count, codes.begin() + static_cast<ptrdiff_t>(at));
    std::copy_n(out.begin(), count, decoded.begin() + static_cast<ptrdiff_t>(at));
  }
  return {scale, error};
}

void DecodeFp8Row(std::span<const uint8_t> codes, float scale, std::span<uint16_t> values) {
  for (size_t i = 0; i < codes.size(); ++i) values[i] = UpperHalf(kDecoded[codes[i]] * scale);
}

}  // namespace statetap
