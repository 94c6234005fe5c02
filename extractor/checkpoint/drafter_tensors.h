// Which tensors a drafter's configuration calls for, by the public naming styles.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/checkpoint/drafter_config.h"

namespace statetap {

enum class DrafterStyle {
  kMidlayer,    // SafeAILab, SpecForge, SGLang, AQ-MedAI: midlayer.*
  kLayers,      // TorchSpec --vllm, Model-Optimizer: layers.0.*
  kSpeculators  // layers.0.* with speculators_model_type in config.json
};
std::string_view NameOf(DrafterStyle style);

enum class DrafterTensorKind { kWeight, kOffsets, kMembers };

struct DrafterTensor {
  std::string name;
  std::vector<int64_t> shape;  // DrafterConfig::kUnknown: any
  std::string why;
  bool required = true;
  DrafterTensorKind kind = DrafterTensorKind::kWeight;
};

// In the order of the forward pass. `num_taps`: kUnknown where nothing says it.
std::vector<DrafterTensor> DrafterTensors(const DrafterConfig& config, DrafterStyle style,
                                          int64_t num_taps);

}  // namespace statetap
