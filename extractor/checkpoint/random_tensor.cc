#include "extractor/checkpoint/random_tensor.h"

#include <cassert>
#include <cmath>
#include <cstring>

#include "extractor/base/digest.h"
#include "extractor/checkpoint/int4.h"

namespace statetap {
namespace {

// Standard deviation of the codes that CodeWords makes: the difference of two uniform 0..7.
constexpr double kCodeDeviation = 3.2404;
// Scales lie within this of their mean.
constexpr float kScaleSpread = 0.25f;

// The finaliser of splitmix64 over a counter: every bit of the result depends on every bit of both.
inline uint64_t Hash(uint64_t key, uint64_t counter) {
  uint64_t x = key + counter * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// Sixteen codes in offset binary, -8..7, mean 0: the difference of two numbers 0..7 for each, and
// half of the -7 become -8 so that all sixteen occur.
inline uint64_t CodeWords(uint64_t key, uint64_t counter) {
  const uint64_t first = Hash(key, 2 * counter), second = Hash(key, 2 * counter + 1);
  const uint64_t a = first & 0x7777777777777777u, b = second & 0x7777777777777777u;
  const uint64_t least = (b & b >> 1 & b >> 2) & ~(a | a >> 1 | a >> 2);
  return 0x8888888888888888u + a - b - (least & first >> 3 & 0x1111111111111111u);
}

float MeanOf(const ExpectedTensor& tensor) { return tensor.name.ends_with("norm.weight") ? 1 : 0; }

double DeviationOf(const ExpectedTensor& tensor) {
  const std::string& name = tensor.name;
  if (tensor.kind == TensorKind::kRouterBias) return 0.05;
  if (tensor.shape.size() < 2) return 0.1;
  if (name == "model.embed_tokens.weight") return 1;
  double gain = 1;
  if (name == "lm_head.weight") gain = 3;
  // Sharper than at random: attention and routing that prefer something.
  for (const char* end : {".q_b_proj.weight", ".q_proj.weight", ".mlp.gate.weight"}) {
    if (name.ends_with(end)) gain = 2;
  }
  return gain / std::sqrt(static_cast<double>(tensor.shape.back()));
}

// The mean scale that gives the dequantised weights the deviation of plain ones.
double ScaleOf(const ExpectedTensor& tensor) {
  const double inputs = static_cast<double>(tensor.shape.back()) * kInt4Group;
  return 1 / (std::sqrt(inputs) * kCodeDeviation);
}

template <typename T, typename Value>
void FillWith(std::span<std::byte> to, Value value) {
  const auto count = static_cast<int64_t>(to.size() / sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    const T element = value(i);
    std::memcpy(to.data() + i * sizeof(T), &element, sizeof(T));
  }
}

}  // namespace

RandomTensor::RandomTensor(const ExpectedTensor& tensor, DType dtype, uint64_t seed)
    : key_(Hash(seed, Xxh3Of(std::as_bytes(std::span(tensor.name))))),
      kind_(tensor.kind),
      dtype_(dtype) {
  assert(Accepts(kind_, dtype) && kind_ != TensorKind::kShape);
  if (kind_ == TensorKind::kScale) {
    mean_ = static_cast<float>(ScaleOf(tensor));
  } else if (kind_ != TensorKind::kPacked) {
    mean_ = MeanOf(tensor);
    deviation_ = static_cast<float>(DeviationOf(tensor));
  }
}

float RandomTensor::Value(int64_t index) const {
  const uint64_t bits = Hash(key_, static_cast<uint64_t>(index));
  if (kind_ == TensorKind::kScale) {
    const float uniform = static_cast<float>(bits >> 40) * 0x1p-23f - 1;
    return mean_ * (1 + kScaleSpread * uniform);
  }
  // Four uniform numbers added are close enough to a normal one, and cost one hash.
  constexpr float kSumMean = 2 * 65535.0f, kSumDeviation = 37837.2f;
  const auto sum = static_cast<float>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                      (bits >> 32 & 0xffff) + (bits >> 48));
  return mean_ + deviation_ * ((sum - kSumMean) / kSumDeviation);
}

void RandomTensor::Fill(int64_t first, std::span<std::byte> to) const {
  if (kind_ == TensorKind::kPacked) {
    return FillWith<uint64_t>(to, [&](int64_t i) { return CodeWords(key_, first / 2 + i); });
  }
  switch (dtype_) {
    case DType::kBf16:
      return FillWith<uint16_t>(to, [&](int64_t i) { return FloatToBf16(Value(first + i)); });
    case DType::kF16:
      return FillWith<uint16_t>(to, [&](int64_t i) { return FloatToHalf(Value(first + i)); });
    default: return FillWith<float>(to, [&](int64_t i) { return Value(first + i); });
  }
}

}  // namespace statetap
