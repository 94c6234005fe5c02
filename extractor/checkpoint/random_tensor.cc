#include "extractor/checkpoint/random_tensor.h"

#include <array>
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
constexpr double kScaleSpread = 0.25;
// Of four uniform bytes added: close enough to a normal number, and two such cost one hash.
constexpr double kSumMean = 510, kSumDeviation = 147.8;

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

}  // namespace

RandomTensor::RandomTensor(const ExpectedTensor& tensor, DType dtype, uint64_t seed)
    : key_(Hash(seed, Xxh3Of(std::as_bytes(std::span(tensor.name))))),
      kind_(tensor.kind),
      dtype_(dtype) {
  assert(Accepts(kind_, dtype) && kind_ != TensorKind::kShape);
  if (kind_ == TensorKind::kScale) {
    const double mean = ScaleOf(tensor);
    step_ = static_cast<float>(mean * kScaleSpread * 0x1p-23);
    offset_ = static_cast<float>(mean * (1 - kScaleSpread));
  } else if (kind_ != TensorKind::kPacked) {
    const double step = DeviationOf(tensor) / kSumDeviation;
    step_ = static_cast<float>(step);
    offset_ = static_cast<float>(MeanOf(tensor) - step * kSumMean);
  }
}

// Calls number(bits) twice a hash and stores offset + step * number, converted.
template <typename T, typename Number, typename Convert>
void RandomTensor::FillPairs(int64_t first, std::span<std::byte> to, Number number,
                             Convert convert) const {
  // Copies: the compiler has to expect that `to` overlaps the members.
  const uint64_t key = key_;
  const float step = step_, offset = offset_;
  const auto pair_at = [=](size_t i) {
    const uint64_t bits = Hash(key, (static_cast<uint64_t>(first) + i) / 2);
    const auto value = [=](uint32_t half) {
      return convert(offset + step * static_cast<float>(number(half)));
    };
    return std::array<T, 2>{value(static_cast<uint32_t>(bits)),
                            value(static_cast<uint32_t>(bits >> 32))};
  };
  const size_t count = to.size() / sizeof(T);
  for (size_t i = 0; i + 1 < count; i += 2) {
    const std::array<T, 2> pair = pair_at(i);
    std::memcpy(to.data() + i * sizeof(T), pair.data(), sizeof(pair));
  }
  if (count % 2 == 0) return;
  const std::array<T, 2> last = pair_at(count - 1);
  std::memcpy(to.data() + (count - 1) * sizeof(T), last.data(), sizeof(T));
}

template <typename Number>
void RandomTensor::FillNumbers(int64_t first, std::span<std::byte> to, Number number) const {
  switch (dtype_) {
    case DType::kBf16:
      return FillPairs<uint16_t>(first, to, number, [](float v) { return FloatToBf16(v); });
    case DType::kF16:
      return FillPairs<uint16_t>(first, to, number, [](float v) { return FloatToHalf(v); });
    default: return FillPairs<float>(first, to, number, [](float v) { return v; });
  }
}

void RandomTensor::Fill(int64_t first, std::span<std::byte> to) const {
  if (kind_ == TensorKind::kPacked) {
    for (size_t at = 0; at < to.size(); at += sizeof(uint64_t)) {
      const uint64_t words = CodeWords(key_, (static_cast<uint64_t>(first) + at / 4) / 2);
      std::memcpy(to.data() + at, &words, sizeof(words));
    }
  } else if (kind_ == TensorKind::kScale) {
    FillNumbers(first, to, [](uint32_t bits) { return static_cast<int32_t>(bits >> 8); });
  } else {
    FillNumbers(first, to, [](uint32_t bits) {
      return static_cast<int32_t>((bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) +
                                  (bits >> 24));
    });
  }
}

}  // namespace statetap
