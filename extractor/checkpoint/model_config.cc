#include "extractor/checkpoint/model_config.h"

#include "extractor/base/json.h"
#include "extractor/checkpoint/config_parts.h"
#include "extractor/checkpoint/config_reader.h"

namespace statetap {
namespace {

// Ten times what the largest models of the family have: room to grow, and a hostile file cannot
// make us plan for terabytes.
constexpr int kMostWidth = 1 << 17;
constexpr int kMostLayers = 1024;
constexpr int kMostHeads = 1024;
constexpr int kMostHeadDim = 4096;
constexpr int kMostExperts = 8192;
constexpr int kMostVocab = 1 << 24;
constexpr int kMostPositions = 1 << 27;

std::vector<int32_t> ReadTokenIds(ConfigReader& reader, std::string_view key, int vocab) {
  std::vector<int32_t> ids;
  const Json* value = reader.FindAnywhere(key);
  if (value == nullptr) return ids;
  if (!value->is_array()) return {reader.IntOf(*value, key, 0, vocab - 1)};
  for (const Json& id : *value) ids.push_back(reader.IntOf(id, key, 0, vocab - 1));
  return ids;
}

int ReadTokenId(ConfigReader& reader, std::string_view key, int vocab) {
  const Json* value = reader.FindAnywhere(key);
  return value != nullptr ? reader.IntOf(*value, key, 0, vocab - 1) : -1;
}

void ReadNames(ConfigReader& reader, ModelConfig& config) {
  const Json* architectures = reader.FindOuter("architectures");
  if (architectures == nullptr) architectures = reader.FindInner("architectures");
  if (architectures != nullptr && architectures->is_array() && !architectures->empty() &&
      architectures->front().is_string()) {
    config.architecture = architectures->front().get<std::string>();
  }
  const Json* type = reader.FindInner("model_type");
  if (type != nullptr && type->is_string()) config.model_type = type->get<std::string>();
}

void ReadAttention(ConfigReader& reader, ModelConfig& config) {
  config.num_heads = reader.Int("num_attention_heads", 1, kMostHeads);
  config.q_lora_rank = reader.NullableInt("q_lora_rank", 0, 1, kMostWidth);
  config.kv_lora_rank = reader.Int("kv_lora_rank", 1, kMostWidth);
  config.nope_dim = reader.Int("qk_nope_head_dim", 1, kMostHeadDim);
  config.rope_dim = reader.Int("qk_rope_head_dim", 2, kMostHeadDim);
  config.v_dim = reader.Int("v_head_dim", 1, kMostHeadDim);
  if (config.rope_dim % 2 != 0) {
    reader.Fail(fmt::format("{} is {}, an even number is needed", reader.Path("qk_rope_head_dim"),
                            config.rope_dim));
  }
  config.rope = ReadRope(reader);
}

void ReadRouting(ConfigReader& reader, ModelConfig& config) {
  config.top_k = reader.Int("num_experts_per_tok", 1, config.num_experts);
  config.num_groups = reader.Int("n_group", 1, config.num_experts, 1);
  config.top_groups = reader.Int("topk_group", 1, config.num_groups, 1);
  config.norm_topk_prob = reader.Bool("norm_topk_prob");
  config.routed_scaling = reader.Double("routed_scaling_factor", 1e-6, 1e6);
  const int group_size = config.num_experts / config.num_groups;
  if (config.num_experts % config.num_groups != 0) {
    reader.Fail(fmt::format("{} {} does not divide n_routed_experts {}", reader.Path("n_group"),
                            config.num_groups, config.num_experts));
  } else if (config.num_groups > 1 && group_size < 2) {
    reader.Fail(fmt::format("{} {} leaves groups of one expert; a group is scored by its best two",
                            reader.Path("n_group"), config.num_groups));
  } else if (config.top_k > config.top_groups * group_size) {
    reader.Fail(fmt::format("{} {} is more than the {} experts of {} groups",
                            reader.Path("num_experts_per_tok"), config.top_k,
                            config.top_groups * group_size, config.top_groups));
  }
}

void ReadExperts(ConfigReader& reader, ModelConfig& config) {
  config.num_experts = reader.NullableInt("n_routed_experts", 0, 0, kMostExperts);
  if (config.num_experts == 0) return;
  config.expert_width = reader.Int("moe_intermediate_size", 1, kMostWidth);
  config.num_shared_experts = reader.NullableInt("n_shared_experts", 0, 0, 64);
  config.num_dense_layers = reader.Int("first_k_dense_replace", 0, kMostLayers);
  if (config.num_dense_layers > config.num_layers) config.num_dense_layers = config.num_layers;
  ReadRouting(reader, config);
}

// Fields whose other values would need code that is not there.
void RefuseOthers(ConfigReader& reader) {
  const auto only = [&](std::string_view key, std::string_view supported) {
    const std::string found = reader.String(key, supported);
    if (found == supported) return;
    reader.Fail(fmt::format("{} is \"{}\"; only \"{}\" is supported", reader.Path(key),
                            found.substr(0, 80), supported));
  };
  only("hidden_act", "silu");
  only("scoring_func", "sigmoid");
  only("topk_method", "noaux_tc");
  const auto only_bool = [&](std::string_view key, bool supported) {
    if (reader.Bool(key, supported) == supported) return;
    reader.Fail(
        fmt::format("{} is {}; only {} is supported", reader.Path(key), !supported, supported));
  };
  only_bool("attention_bias", false);
  only_bool("mlp_bias", false);
  only_bool("rope_interleave", true);
  if (const Json* frequency = reader.Find("moe_layer_freq"); frequency && *frequency != 1) {
    reader.Fail(fmt::format("{} is {}; only 1 is supported (an expert layer after each)",
                            reader.Path("moe_layer_freq"), ShownValue(*frequency)));
  }
  if (const Json* sparse = reader.Find("index_topk")) {
    reader.Fail(fmt::format("{} is {}; sparse attention is not supported",
                            reader.Path("index_topk"), ShownValue(*sparse)));
  }
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const Json& json) {
  STATETAP_ASSIGN_OR_RETURN(ConfigReader reader, ConfigReader::Make(json));
  ModelConfig config;
  // First: an unsupported checkpoint is told so, not that some field is odd.
  CheckQuantization(reader);
  RefuseOthers(reader);
  ReadNames(reader, config);
  config.hidden = reader.Int("hidden_size", 1, kMostWidth);
  config.num_layers = reader.Int("num_hidden_layers", 1, kMostLayers);
  config.num_mtp_layers = reader.Int("num_nextn_predict_layers", 0, kMostLayers, 0);
  ReadAttention(reader, config);
  config.dense_width = reader.Int("intermediate_size", 1, kMostWidth);
  ReadExperts(reader, config);
  config.rms_norm_eps = reader.Double("rms_norm_eps", 0, 1);
  config.max_positions = reader.Int("max_position_embeddings", 1, kMostPositions);
  config.vocab = reader.Int("vocab_size", 1, kMostVocab);
  STATETAP_RETURN_IF_ERROR(reader.status());
  config.bos_id = ReadTokenId(reader, "bos_token_id", config.vocab);
  config.eos_ids = ReadTokenIds(reader, "eos_token_id", config.vocab);
  config.eos_id = config.eos_ids.empty() ? -1 : config.eos_ids.front();
  config.pad_id = ReadTokenId(reader, "pad_token_id", config.vocab);
  if (const Json* tied = reader.FindAnywhere("tie_word_embeddings")) {
    config.tie_word_embeddings = reader.BoolOf(*tied, "tie_word_embeddings");
  }
  STATETAP_RETURN_IF_ERROR(reader.status());
  return config;
}

std::string ArithmeticFields(const ModelConfig& c) {
  return fmt::format(
      "hidden={} layers={} heads={} q_lora={} kv_lora={} nope={} rope={} v={} dense={} expert={} "
      "experts={} top_k={} shared={} dense_layers={} groups={} top_groups={} norm_topk={} "
      "routed_scaling={} eps={} theta={} yarn={} factor={} original={} beta_fast={} beta_slow={} "
      "mscale={} mscale_all_dim={} vocab={} tied={}",
      c.hidden, c.num_layers, c.num_heads, c.q_lora_rank, c.kv_lora_rank, c.nope_dim, c.rope_dim,
      c.v_dim, c.dense_width, c.expert_width, c.num_experts, c.top_k, c.num_shared_experts,
      c.num_dense_layers, c.num_groups, c.top_groups, c.norm_topk_prob, c.routed_scaling,
      c.rms_norm_eps, c.rope.theta, c.rope.yarn, c.rope.factor, c.rope.original_positions,
      c.rope.beta_fast, c.rope.beta_slow, c.rope.mscale, c.rope.mscale_all_dim, c.vocab,
      c.tie_word_embeddings);
}

}  // namespace statetap
