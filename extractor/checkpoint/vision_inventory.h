// Which tensors Kimi-K2.5's image encoder and projector have. The text model uses none of them;
// they are looked at where a checkpoint is to be whole.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "extractor/base/json.h"
#include "extractor/checkpoint/tensor_inventory.h"

namespace statetap {

// Of config.json's vision_config.
struct VisionSizes {
  int64_t patch, hidden, layers, ffn_width;
  int64_t positions_high, positions_wide;  // of the learned grid
  int64_t merged;                          // hidden states of patches that become one
  int64_t text_hidden;
};

// Nothing where config.json has no vision_config, or one that lacks a size: of another encoder.
std::optional<VisionSizes> VisionSizesOf(const Json& config);

bool IsVisionTensor(std::string_view stored);

// Calls `visit` for each tensor, all of them bf16, by its stored name.
void ForEachVisionTensor(const VisionSizes& sizes,
                         const std::function<void(const ExpectedTensor&)>& visit);

}  // namespace statetap
