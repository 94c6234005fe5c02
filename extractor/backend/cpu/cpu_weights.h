// Weights on the CPU: kept as the checkpoint stores them, read a row at a time as fp32.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "extractor/backend/backend.h"
#include "extractor/backend/cpu/matmul.h"

namespace statetap::cpu {

class Matrix final : public Weight {
 public:
  Matrix(int64_t rows, int64_t cols, DType dtype);
  void Fill(int part, int64_t first_row, int64_t rows, const std::byte* from,
            int64_t stride_bytes) override;
  const std::byte* RowBytes(int64_t row) const;
  float At(int64_t row, int64_t col) const;  // bf16, f16 and f32
  void ReadRow(int64_t row, float* to) const;
  RowReader reader() const {
    return [this](int64_t row, float* to) { ReadRow(row, to); };
  }
  std::vector<float> ReadAll() const;
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t size_bytes() const { return rows_ * cols_ * static_cast<int64_t>(SizeOf(dtype_)); }

 private:
  int64_t rows_, cols_;
  DType dtype_;
  std::unique_ptr<std::byte[]> bytes_;  // not touched before it is filled
};

// One layer's routed experts of a rank.
class Experts final : public Weight {
 public:
  explicit Experts(const ExpertsShape& shape);
  void Fill(int part, int64_t first_row, int64_t rows, const std::byte* from,
            int64_t stride_bytes) override;
  // A row of a projection as fp32: [width, hidden] for gate and up, [hidden, width] for down.
  void ReadRow(int slot, Projection projection, int64_t row, float* to) const;
  RowReader reader(int slot, Projection projection) const {
    return [this, slot, projection](int64_t row, float* to) { ReadRow(slot, projection, row, to); };
  }
  const ExpertsShape& shape() const { return shape_; }
  int64_t size_bytes() const {
    int64_t bytes = 0;
    for (const Matrix& part : parts_) bytes += part.size_bytes();
    return bytes;
  }

 private:
  ExpertsShape shape_;
  std::vector<Matrix> parts_;  // by ExpertPart
};

inline const Matrix& AsMatrix(const Weight& weight) { return static_cast<const Matrix&>(weight); }
inline const Experts& AsExperts(const Weight& weight) {
  return static_cast<const Experts&>(weight);
}

}  // namespace statetap::cpu
