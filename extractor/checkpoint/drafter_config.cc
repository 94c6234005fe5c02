#include "extractor/checkpoint/drafter_config.h"

#include <fmt/format.h>

#include <string_view>

#include "extractor/base/json.h"
#include "extractor/checkpoint/config_reader.h"

namespace statetap {
namespace {

// Beyond any model; products of two stay within 64 bits.
constexpr int64_t kMost = 100'000'000;
constexpr int64_t kMostLayers = 64;
constexpr size_t kMostTaps = 1024;

class Reader {
 public:
  Reader(const Json& config, RuleReport& report)
      : config_(config), report_(report), layer_(FindMember(config, "transformer_layer_config")) {
    if (layer_ != nullptr && !layer_->is_object()) {
      Fault("transformer_layer_config", *layer_, "an object");
      layer_ = nullptr;
    }
  }

  // Of the decoder layer: below transformer_layer_config where there is one.
  const Json* Find(std::string_view key) const {
    const Json* inner = layer_ != nullptr ? FindMember(*layer_, key) : nullptr;
    return inner != nullptr ? inner : FindMember(config_, key);
  }

  int64_t Optional(std::string_view key, int64_t most = kMost) {
    const Json* value = Find(key);
    if (value == nullptr) return DrafterConfig::kUnknown;
    if (value->is_number_integer()) {
      const auto number = value->get<int64_t>();
      if (number >= 1 && number <= most) return number;
    }
    Fault(key, *value, fmt::format("an integer from 1 to {}", most));
    return DrafterConfig::kUnknown;
  }

  int64_t Required(std::string_view key, std::string_view why) {
    if (Find(key) == nullptr) {
      report_.Add({Verdict::kFault, fmt::format("config {}", key), "missing", "a positive integer",
                   std::string(why)});
      return DrafterConfig::kUnknown;
    }
    return Optional(key);
  }

  bool Flag(std::string_view key) {
    const Json* value = Find(key);
    if (value == nullptr) return false;
    if (value->is_boolean()) return value->get<bool>();
    Fault(key, *value, "true or false");
    return false;
  }

  std::string Text(std::string_view key) const {
    const Json* value = Find(key);
    return value != nullptr && value->is_string() ? value->get<std::string>() : "";
  }

  void Fault(std::string_view key, const Json& found, std::string_view expected) {
    report_.Add({Verdict::kFault, fmt::format("config {}", key), ShownValue(found),
                 std::string(expected), "config.json has another kind of value"});
  }

 private:
  const Json& config_;
  RuleReport& report_;
  const Json* layer_;
};

// The ids under their first key that is there; engines look in this order.
void ReadTaps(const Json& config, Reader& reader, DrafterConfig& to) {
  constexpr std::string_view kIds = "eagle_aux_hidden_state_layer_ids";
  const Json* ids = FindMember(config, kIds);
  to.taps_key = kIds;
  if (const Json* nested = FindMember(config, "eagle_config");
      ids == nullptr && nested != nullptr && nested->is_object()) {
    ids = FindMember(*nested, kIds);
    to.taps_key = fmt::format("eagle_config.{}", kIds);
  }
  if (ids == nullptr) return;
  const auto is_id = [](const Json& id) {
    return id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() <= kMost;
  };
  if (!ids->is_array() || ids->empty() || ids->size() > kMostTaps ||
      !std::ranges::all_of(*ids, is_id)) {
    return reader.Fault(to.taps_key, *ids, "a list of layer numbers");
  }
  for (const Json& id : *ids) to.taps.push_back(id.get<int64_t>());
}

}  // namespace

DrafterConfig ReadDrafterConfig(const Json& config, RuleReport& report) {
  Reader reader(config, report);
  DrafterConfig c;
  if (const Json* names = FindMember(config, "architectures");
      names != nullptr && names->is_array() && !names->empty() && names->front().is_string()) {
    c.architecture = names->front().get<std::string>();
  }
  c.speculators = FindMember(config, "speculators_model_type") != nullptr;
  c.hidden = reader.Required("hidden_size", "the width of every norm and of fc's output");
  c.target_hidden = reader.Optional("target_hidden_size");
  if (c.target_hidden == DrafterConfig::kUnknown) c.target_hidden = c.hidden;
  if (const int64_t layers = reader.Optional("num_hidden_layers", kMostLayers); layers > 0) {
    c.num_layers = layers;
  }
  c.num_heads = reader.Required("num_attention_heads", "head_dim × heads is q_proj's height");
  c.intermediate = reader.Required("intermediate_size", "the width of the FFN");
  c.vocab = reader.Required("vocab_size", "the target's vocabulary, which t2d and embed span");
  c.draft_vocab = reader.Optional("draft_vocab_size");
  c.names_draft_vocab = c.draft_vocab != DrafterConfig::kUnknown;
  if (!c.names_draft_vocab) c.draft_vocab = c.vocab;
  c.latent_attention = reader.Find("kv_lora_rank") != nullptr;
  if (c.latent_attention) {
    constexpr std::string_view kWhy =
        "a part of latent attention (MLA), which kv_lora_rank asks for";
    c.kv_lora_rank = reader.Required("kv_lora_rank", kWhy);
    c.q_lora_rank = reader.Optional("q_lora_rank");
    c.nope_dim = reader.Required("qk_nope_head_dim", kWhy);
    c.rope_dim = reader.Required("qk_rope_head_dim", kWhy);
    c.v_dim = reader.Required("v_head_dim", kWhy);
  } else {
    c.num_kv_heads = reader.Optional("num_key_value_heads");
    if (c.num_kv_heads == DrafterConfig::kUnknown) c.num_kv_heads = c.num_heads;
    c.head_dim = reader.Optional("head_dim");
  }
  ReadTaps(config, reader, c);
  c.attention_bias = reader.Flag("attention_bias");
  c.mlp_bias = reader.Flag("mlp_bias");
  c.fc_norm = reader.Flag("fc_norm");
  c.norm_before_fc = reader.Flag("norm_before_fc");
  return c;
}

}  // namespace statetap
