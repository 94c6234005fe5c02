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

  // Elements from `first` on. REQUIRES: for packed codes `first` and their number even.
  void Fill(int64_t first, std::span<std::byte> to) const;

 private:
  float Value(int64_t index) const;

  uint64_t key_;
  TensorKind kind_;
  DType dtype_;
  float mean_ = 0, deviation_ = 1;
};

}  // namespace statetap
