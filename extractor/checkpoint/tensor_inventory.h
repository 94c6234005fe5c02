// Which tensors a configuration calls for, and what checkpoints name them. Reader and maker share
// it.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/dtype.h"
#include "extractor/checkpoint/model_config.h"

namespace statetap {

enum class TensorKind {
  kWeight,      // bf16: matrices [out, in], norms [n]
  kRouterBias,  // f32 or bf16
  kPacked,      // int32 [out, in / 8]: eight INT4 codes a word
  kScale,       // bf16, fp16 or f32 [out, in / 32]
  kShape        // int32 or int64 [2]: (out, in)
};

// Whether a tensor of this kind may be stored as `dtype`, and for messages: "bfloat16".
bool Accepts(TensorKind kind, DType dtype);
std::string_view AcceptedTypes(TensorKind kind);

struct ExpectedTensor {
  std::string name;  // without prefix
  TensorKind kind;
  std::vector<int64_t> shape;
};

// Calls `visit` for each tensor of the text model until it returns false. `quantized`: routed
// experts are INT4.
void ForEachTensor(const ModelConfig& config, bool quantized,
                   const std::function<bool(const ExpectedTensor&)>& visit);

// (out, in) of an expert's gate_proj, up_proj or down_proj, as weight_shape holds them.
std::array<int64_t, 2> ExpertShape(const ModelConfig& config, std::string_view name);

// Our name of a stored tensor: "language_model." taken off, "model." put back where only the inner
// one was left out. Nothing for what a text model does not use: vision_tower, mm_projector, stored
// rotary frequencies.
std::optional<std::string> TextTensorName(std::string_view stored);

// Of a layer of multi-token prediction, behind the last: not used here.
bool IsPrediction(std::string_view name, const ModelConfig& config);

// "bfloat16 [3, 4]"
std::string DescribeTensor(std::string_view types, const std::vector<int64_t>& shape);

// The layer of "model.layers.7.…", -1 for other names.
int LayerOf(std::string_view name);

}  // namespace statetap
