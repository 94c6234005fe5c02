// INT4 weights as compressed-tensors packs them: a row of codes -8..7, each stored as code + 8 in
// four bits, eight columns a 32-bit word, the lowest column in the lowest bits; a scale for each 32
// columns. Weight = code * scale. Words and scales are little endian, as the files are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "extractor/base/dtype.h"

namespace statetap {

inline constexpr int kInt4PerWord = 8;
inline constexpr int kInt4Group = 32;

// words: [cols / 8] from codes: [cols], each -8..7. REQUIRES: cols a multiple of 8.
void PackInt4Row(const int8_t* codes, int64_t cols, uint32_t* words);
// codes: [cols] from words: [cols / 8].
void UnpackInt4Row(const uint32_t* words, int64_t cols, int8_t* codes);

// out: [cols] in fp32, exact: a code has 4 bits, a bf16 or fp16 scale at most 11.
// words: [cols / 8], scales: [cols / 32]. REQUIRES: cols a multiple of 32.
void DequantizeInt4Row(const uint32_t* words, const float* scales, int64_t cols, float* out);
// The same with scales as bf16 bits.
void DequantizeInt4Row(const uint32_t* words, const uint16_t* bf16_scales, int64_t cols,
                       float* out);

// Codes and scales of a row of weights: scale = largest magnitude of the group / 7 rounded to bf16,
// code = weight / scale rounded to nearest. A group of zeros gets scale 1 and codes 0.
void QuantizeInt4Row(const float* weights, int64_t cols, uint32_t* words, uint16_t* bf16_scales);

// Scales as stored (bf16, fp16 or f32, at any alignment) to fp32. REQUIRES: one of these types.
void ScalesToFloat(DType dtype, const std::byte* from, std::span<float> to);

}  // namespace statetap
