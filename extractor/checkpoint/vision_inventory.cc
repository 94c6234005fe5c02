#include "extractor/checkpoint/vision_inventory.h"

#include <fmt/format.h>

namespace statetap {
namespace {

// The integers of an object's member; 0 for what is none, or not there.
int64_t SizeAt(const Json& object, std::string_view key) {
  const Json* value = FindMember(object, key);
  return value != nullptr && value->is_number_integer() ? value->get<int64_t>() : 0;
}

}  // namespace

std::optional<VisionSizes> VisionSizesOf(const Json& config) {
  const Json* vision = FindMember(config, "vision_config");
  if (vision == nullptr || !vision->is_object()) return std::nullopt;
  int64_t merged = 1;
  const Json* kernel = FindMember(*vision, "merge_kernel_size");
  if (kernel == nullptr || !kernel->is_array()) return std::nullopt;
  for (const Json& side : *kernel) merged *= side.is_number_integer() ? side.get<int64_t>() : 0;
  const VisionSizes sizes = {.patch = SizeAt(*vision, "patch_size"),
                             .hidden = SizeAt(*vision, "vt_hidden_size"),
                             .layers = SizeAt(*vision, "vt_num_hidden_layers"),
                             .ffn_width = SizeAt(*vision, "vt_intermediate_size"),
                             .positions_high = SizeAt(*vision, "init_pos_emb_height"),
                             .positions_wide = SizeAt(*vision, "init_pos_emb_width"),
                             .merged = merged,
                             .text_hidden = SizeAt(*vision, "text_hidden_size")};
  constexpr int64_t kMost = 1 << 20;
  for (const int64_t size :
       {sizes.patch, sizes.hidden, sizes.layers, sizes.ffn_width, sizes.positions_high,
        sizes.positions_wide, sizes.merged, sizes.text_hidden})
    if (size < 1 || size > kMost) return std::nullopt;
  return sizes;
}

bool IsVisionTensor(std::string_view stored) {
  return stored.starts_with("vision_tower.") || stored.starts_with("mm_projector.");
}

void ForEachVisionTensor(const VisionSizes& sizes,
                         const std::function<void(const ExpectedTensor&)>& visit) {
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    visit({name, TensorKind::kWeight, std::move(shape)});
  };
  // A weight of any shape and a bias as long as its first side.
  const auto add_biased = [&](const std::string& name, std::vector<int64_t> shape) {
    add(name + ".bias", {shape.front()});
    add(name + ".weight", std::move(shape));
  };
  const int64_t hidden = sizes.hidden, joined = hidden * sizes.merged;
  add_biased("vision_tower.patch_embed.proj", {hidden, 3, sizes.patch, sizes.patch});
  add("vision_tower.patch_embed.pos_emb.weight",
      {sizes.positions_high, sizes.positions_wide, hidden});
  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string block = fmt::format("vision_tower.encoder.blocks.{}.", i);
    add_biased(block + "norm0", {hidden});
    add_biased(block + "norm1", {hidden});
    add_biased(block + "wqkv", {3 * hidden, hidden});
    add_biased(block + "wo", {hidden, hidden});
    add_biased(block + "mlp.fc0", {sizes.ffn_width, hidden});
    add_biased(block + "mlp.fc1", {hidden, sizes.ffn_width});
  }
  add_biased("vision_tower.encoder.final_layernorm", {hidden});
  add_biased("mm_projector.pre_norm", {hidden});
  add_biased("mm_projector.proj.0", {joined, joined});
  add_biased("mm_projector.proj.2", {sizes.text_hidden, joined});
}

}  // namespace statetap
