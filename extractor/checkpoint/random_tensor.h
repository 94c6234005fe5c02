// Random contents of tensors from a counter-based generator: any part of a tensor can be made by
// itself, by any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "extractor/base/dtype.h"
#include "extractor/checkpoint/tensor_inventory.h"

namespace statetap {

// What a tensor is filled with. Scaled by the number of inputs, so that activations keep their size
// from layer to layer.
class RandomTensor {
 public:
  // The tensor's name and `seed` key the generator. REQUIRES: Accepts(tensor.kind, dtype), not
  // kShape.
  RandomTensor(const ExpectedTensor& tensor, DType dtype, uint64_t seed);

  // Elements from `first` on. REQUIRES: `first` even; for packed codes their number, too.
  void Fill(int64_t first, std::span<std::byte> to) const;

 private:
  template <typename Number>
  void FillNumbers(int64_t first, std::span<std::byte> to, Number number) const;
  template <typename T, typename Number, typename Convert>
  void FillPairs(int64_t first, std::span<std::byte> to, Number number, Convert convert) const;

  uint64_t key_;
  TensorKind kind_;
  DType dtype_;
  float offset_ = 0, step_ = 0;
};

}  // namespace statetap
