// States in 8 bits: e4m3 (sign 1, exponent 4, mantissa 3, bias 7) times a scale a row.
//
// The scale is the least power of two that brings the row's largest magnitude to 240 or below. So
// every decoded value is a bf16 value, exactly; encoding decoded values again gives the same values
// (copies of copies lose nothing); and 256 to 448, which e4m3fn has and IEEE's reading of the bits
// has not, never occur: HDF5, NumPy and PyTorch agree about the bytes. A value within 2^-13 of the
// row's largest magnitude keeps 4 significant bits (relative error at most 1/17 by value). After
// the shared exponents of "OCP Microscaling Formats (MX)", 2023, with the row as the block.
#pragma once

#include <cstdint>
#include <span>

namespace statetap {

inline constexpr float kFp8Max = 240;

// values: bf16 [hidden]; codes: e4m3 [hidden]; decoded: what decoding gives, bf16 [hidden],
// may alias values. The scale is 1 for a row of zeros. A row with a value that is not finite
// becomes NaN in every place, with squared_error 0.
struct Fp8Row {
  float scale;
  double squared_error;  // summed over (value - decoded)^2
};
Fp8Row EncodeFp8Row(std::span<const uint16_t> values, std::span<uint8_t> codes,
                    std::span<uint16_t> decoded);
void DecodeFp8Row(std::span<const uint8_t> codes, float scale, std::span<uint16_t> values);
float Fp8ToFloat(uint8_t code);  // e4m3fn, up to 448: of what others wrote, too

}  // namespace statetap
