// A small drafter of the public layouts as values in memory, to be changed and written.
#pragma once

#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "extractor/base/json.h"
#include "extractor/checkpoint/drafter_rules.h"
#include "tests/checkpoint/editable_checkpoint.h"

namespace statetap::testing {

inline constexpr int64_t kHidden = 112, kHeads = 4, kHeadDim = 32, kFfn = 96, kVocab = 50,
                         kDraft = 10;
inline constexpr int64_t kTaps = 3;

inline std::string Zeros(std::string_view dtype, const std::vector<int64_t>& shape) {
  size_t bytes = dtype == "I64" ? 8 : dtype == "BOOL" ? 1 : dtype == "F32" ? 4 : 2;
  for (const int64_t size : shape) bytes *= static_cast<size_t>(size);
  return std::string(bytes, '\0');
}

// A sound drafter in memory, to be spoilt: hidden / heads is 28, head_dim 32.
struct EditableDrafter {
  Json config;
  std::map<std::string, StoredTensor> tensors;

  explicit EditableDrafter(const std::string& layer = "midlayer.") {
    config = {{"architectures", {"LlamaForCausalLMEagle3"}},
              {"hidden_size", kHidden},
              {"intermediate_size", kFfn},
              {"num_hidden_layers", 1},
              {"num_attention_heads", kHeads},
              {"num_key_value_heads", kHeads},
              {"head_dim", kHeadDim},
              {"vocab_size", kVocab},
              {"draft_vocab_size", kDraft},
              {"eagle_config", {{"eagle_aux_hidden_state_layer_ids", {2, 30, 58}}}}};
    Set("fc.weight", {kHidden, kTaps * kHidden});
    for (const std::string norm : {"hidden_norm", "input_layernorm", "post_attention_layernorm"}) {
      Set(layer + norm + ".weight", {kHidden});
    }
    for (const std::string part : {"q_proj", "k_proj", "v_proj"}) {
      Set(layer + "self_attn." + part + ".weight", {kHeads * kHeadDim, 2 * kHidden});
    }
    Set(layer + "self_attn.o_proj.weight", {kHidden, kHeads * kHeadDim});
    Set(layer + "mlp.gate_proj.weight", {kFfn, kHidden});
    Set(layer + "mlp.up_proj.weight", {kFfn, kHidden});
    Set(layer + "mlp.down_proj.weight", {kHidden, kFfn});
    Set("norm.weight", {kHidden});
    Set("lm_head.weight", {kDraft, kHidden});
    std::vector<int64_t> targets;
    for (int64_t i = 0; i < kDraft; ++i) targets.push_back(i * 5 + 1);
    SetMaps(targets);
  }

  void Set(const std::string& name, std::vector<int64_t> shape, std::string dtype = "BF16") {
    std::string bytes = Zeros(dtype, shape);
    tensors[name] = {std::move(dtype), std::move(shape), std::move(bytes)};
  }
  void SetOffsets(const std::vector<int64_t>& offsets) {
    Set("d2t", {static_cast<int64_t>(offsets.size())}, "I64");
    std::memcpy(tensors["d2t"].bytes.data(), offsets.data(), offsets.size() * 8);
  }
  void SetMaps(const std::vector<int64_t>& targets) {
    std::vector<int64_t> offsets;
    Set("t2d", {kVocab}, "BOOL");
    for (size_t i = 0; i < targets.size(); ++i) {
      offsets.push_back(targets[i] - static_cast<int64_t>(i));
      tensors["t2d"].bytes[static_cast<size_t>(targets[i])] = 1;
    }
    SetOffsets(offsets);
  }
  void Rename(const std::string& from, const std::string& to) {
    auto node = tensors.extract(from);
    node.key() = to;
    tensors.insert(std::move(node));
  }

  void Write(const std::filesystem::path& folder) const {
    std::filesystem::create_directories(folder);
    EXPECT_OK(WriteFileAtomically(folder / "config.json", config.dump(1)));
    EditableCheckpoint::WriteShard(folder / "model.safetensors", tensors);
  }

  RuleReport Verify(const DrafterCheck& check = {}) const {
    const TempDir folder;
    Write(folder.path());
    auto report = VerifyDrafter(folder.path(), check);
    EXPECT_OK(report.status());
    return report.ok() ? *std::move(report) : RuleReport();
  }
};

}  // namespace statetap::testing
