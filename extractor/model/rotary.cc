#include "extractor/model/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace statetap {
namespace {

double Magnitude(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

// The pair whose wavelength turns `rotations` times over the original context.
double PairOf(const RopeConfig& rope, int dim, double rotations) {
  return dim * std::log(rope.original_positions / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(rope.theta));
}

}  // namespace

std::vector<float> InverseFrequencies(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  const int pairs = config.rope_dim / 2;
  double low = 0, high = 0;
  if (rope.yarn) {
    low = std::max(std::floor(PairOf(rope, config.rope_dim, rope.beta_fast)), 0.0);
    high =
        std::min(std::ceil(PairOf(rope, config.rope_dim, rope.beta_slow)), config.rope_dim - 1.0);
    if (low == high) high += 0.001;
  }
  std::vector<float> frequencies;
  for (int i = 0; i < pairs; ++i) {
    const double plain = std::pow(rope.theta, -2.0 * i / config.rope_dim);
    const double ramp = rope.yarn ? std::clamp((i - low) / (high - low), 0.0, 1.0) : 0;
    frequencies.push_back(static_cast<float>(plain * (1 - ramp) + plain / rope.factor * ramp));
  }
  return frequencies;
}

float SoftmaxScale(const ModelConfig& config) {
  const double magnitude =
      config.rope.yarn ? Magnitude(config.rope.factor, config.rope.mscale_all_dim) : 1;
  return static_cast<float>(magnitude * magnitude / std::sqrt(config.qk_dim()));
}

}  // namespace statetap
