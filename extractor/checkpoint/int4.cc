#include "extractor/checkpoint/int4.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

namespace statetap {
namespace {

// out: eight weights of one word.
inline void DequantizeWord(uint32_t word, float scale, float* out) {
  for (int i = 0; i < kInt4PerWord; ++i) {
    out[i] = static_cast<float>(static_cast<int>(word >> (4 * i) & 15) - 8) * scale;
  }
}

template <typename T, typename Convert>
void ConvertAll(const std::byte* from, std::span<float> to, Convert convert) {
  for (size_t i = 0; i < to.size(); ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    to[i] = convert(value);
  }
}

}  // namespace

void PackInt4Row(const int8_t* codes, int64_t cols, uint32_t* words) {
  for (int64_t w = 0; w < cols / kInt4PerWord; ++w) {
    uint32_t word = 0;
    for (int i = 0; i < kInt4PerWord; ++i) {
      word |= static_cast<uint32_t>(codes[w * kInt4PerWord + i] + 8) << (4 * i);
    }
    words[w] = word;
  }
}

void UnpackInt4Row(const uint32_t* words, int64_t cols, int8_t* codes) {
  for (int64_t i = 0; i < cols; ++i) {
    codes[i] = static_cast<int8_t>(
        static_cast<int>(words[i / kInt4PerWord] >> (4 * (i % kInt4PerWord)) & 15) - 8);
  }
}

void DequantizeInt4Row(const uint32_t* words, const float* scales, int64_t cols, float* out) {
  for (int64_t w = 0; w < cols / kInt4PerWord; ++w) {
    DequantizeWord(words[w], scales[w / 4], out + w * kInt4PerWord);
  }
}

void DequantizeInt4Row(const uint32_t* words, const uint16_t* bf16_scales, int64_t cols,
                       float* out) {
  for (int64_t w = 0; w < cols / kInt4PerWord; ++w) {
    DequantizeWord(words[w], Bf16ToFloat(bf16_scales[w / 4]), out + w * kInt4PerWord);
  }
}

void QuantizeInt4Row(const float* weights, int64_t cols, uint32_t* words, uint16_t* bf16_scales) {
  for (int64_t group = 0; group < cols / kInt4Group; ++group) {
    const float* from = weights + group * kInt4Group;
    float largest = 0;
    for (int i = 0; i < kInt4Group; ++i) largest = std::max(largest, std::fabs(from[i]));
    bf16_scales[group] = largest > 0 ? FloatToBf16(largest / 7) : FloatToBf16(1);
    const float scale = Bf16ToFloat(bf16_scales[group]);
    int8_t codes[kInt4Group];
    for (int i = 0; i < kInt4Group; ++i) {
      // A scale that rounded to zero leaves nothing to divide by.
      const float code = scale > 0 ? std::nearbyint(from[i] / scale) : 0;
      codes[i] = static_cast<int8_t>(std::clamp(code, -8.0f, 7.0f));
    }
    PackInt4Row(codes, kInt4Group, words + group * (kInt4Group / kInt4PerWord));
  }
}

void ScalesToFloat(DType dtype, const std::byte* from, std::span<float> to) {
  switch (dtype) {
    case DType::kBf16: return ConvertAll<uint16_t>(from, to, Bf16ToFloat);
    case DType::kF16: return ConvertAll<uint16_t>(from, to, HalfToFloat);
    case DType::kF32: return ConvertAll<float>(from, to, [](float value) { return value; });
    default: assert(false && "scales are bf16, fp16 or f32");
  }
}

}  // namespace statetap
