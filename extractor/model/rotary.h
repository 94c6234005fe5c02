// Rotary frequencies and the softmax scale, with and without YaRN (Peng et al. 2023, as DeepSeek-V3
// applies it: always, and with the magnitude in the softmax scale, not in cos and sin).
#pragma once

#include <vector>

#include "extractor/checkpoint/model_config.h"

namespace statetap {

// [rope_dim / 2]
std::vector<float> InverseFrequencies(const ModelConfig& config);
// (nope + rope)^-½, times the square of YaRN's magnitude.
float SoftmaxScale(const ModelConfig& config);

}  // namespace statetap
