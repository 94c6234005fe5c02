#include "extractor/backend/cpu/cpu_weights.h"

#include <cassert>
#include <cstring>

#include "extractor/base/vector_clones.h"

namespace statetap::cpu {
namespace {

constexpr int kGroup = 32;       // weights that share a scale
constexpr int kWordColumns = 8;  // of a packed int32

// `groups` groups of a row. Lowest nibble first, stored as value + 8. Rounded to bf16: the weights
// that every bf16 reference multiplies with.
STATETAP_VECTOR_CLONES void UnpackRow(const uint32_t* words, const float* scales, int64_t groups,
                                      float* to) {
  for (int64_t group = 0; group < groups; ++group) {
    for (int i = 0; i < kGroup; ++i) {
      const auto nibble = static_cast<int>(
          (words[group * (kGroup / kWordColumns) + i / kWordColumns] >> (4 * (i % kWordColumns))) &
          15u);
      to[group * kGroup + i] =
          Bf16ToFloat(FloatToBf16(static_cast<float>(nibble - 8) * scales[group]));
    }
  }
}

}  // namespace

Matrix::Matrix(int64_t rows, int64_t cols, DType dtype)
    : rows_(rows),
      cols_(cols),
      dtype_(dtype),
      bytes_(std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(rows * cols) *
                                                         SizeOf(dtype))) {}

void Matrix::Fill(int, int64_t first_row, int64_t rows, const std::byte* from,
                  int64_t stride_bytes) {
  assert(first_row + rows <= rows_);
  const auto row_bytes = static_cast<int64_t>(static_cast<size_t>(cols_) * SizeOf(dtype_));
  if (stride_bytes == row_bytes) {
    std::memcpy(bytes_.get() + first_row * row_bytes, from, static_cast<size_t>(rows * row_bytes));
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(bytes_.get() + (first_row + row) * row_bytes, from + row * stride_bytes,
                static_cast<size_t>(row_bytes));
  }
}

const std::byte* Matrix::RowBytes(int64_t row) const {
  return bytes_.get() + static_cast<size_t>(row * cols_) * SizeOf(dtype_);
}

float Matrix::At(int64_t row, int64_t col) const {
  const std::byte* from = RowBytes(row) + static_cast<size_t>(col) * SizeOf(dtype_);
  if (dtype_ == DType::kF32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return dtype_ == DType::kBf16 ? Bf16ToFloat(bits) : HalfToFloat(bits);
}

void Matrix::ReadRow(int64_t row, float* to) const {
  if (dtype_ == DType::kBf16) {  // nearly every weight: a loop that vectorises
    const auto* bits = reinterpret_cast<const uint16_t*>(RowBytes(row));
    for (int64_t i = 0; i < cols_; ++i) to[i] = Bf16ToFloat(bits[i]);
    return;
  }
  for (int64_t i = 0; i < cols_; ++i) to[i] = At(row, i);
}

std::vector<float> Matrix::ReadAll() const {
  std::vector<float> all(static_cast<size_t>(rows_ * cols_));
  for (int64_t row = 0; row < rows_; ++row) ReadRow(row, all.data() + row * cols_);
  return all;
}

Experts::Experts(const ExpertsShape& shape) : shape_(shape) {
  for (int slot = 0; slot < shape.num_slots; ++slot) {
    for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
      const bool down = projection == Projection::kDown;
      const int64_t out = down ? shape.hidden : shape.width, in = down ? shape.width : shape.hidden;
      parts_.emplace_back(out, shape.int4 ? in / 8 : in, shape.int4 ? DType::kI32 : shape.dtype);
      parts_.emplace_back(shape.int4 ? out : 0, in / kGroup, shape.scale_dtype);
    }
  }
}

void Experts::Fill(int part, int64_t first_row, int64_t rows, const std::byte* from,
                   int64_t stride_bytes) {
  parts_[static_cast<size_t>(part)].Fill(0, first_row, rows, from, stride_bytes);
}

void Experts::ReadRow(int slot, Projection projection, int64_t row, float* to) const {
  const Matrix& weights = parts_[static_cast<size_t>(ExpertPart(slot, projection, false))];
  if (!shape_.int4) return weights.ReadRow(row, to);
  const Matrix& scales = parts_[static_cast<size_t>(ExpertPart(slot, projection, true))];
  std::vector<float> row_scales(static_cast<size_t>(scales.cols()));
  scales.ReadRow(row, row_scales.data());
  UnpackRow(reinterpret_cast<const uint32_t*>(weights.RowBytes(row)), row_scales.data(),
            scales.cols(), to);
}

}  // namespace statetap::cpu
