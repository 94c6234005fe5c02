// What a checkpoint's config.json says of the architecture: the DeepSeek-V3 family (Kimi-K2,
// K2-Thinking, K2.5, DeepSeek-V3, Moonlight), by its fields, never by its name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "extractor/base/json_fwd.h"
#include "extractor/base/status.h"

namespace statetap {

struct RopeConfig {
  double theta = 10000;
  bool yarn = false;  // the rest counts only with YaRN
  double factor = 1;
  int original_positions = 0;
  double beta_fast = 32, beta_slow = 1;
  double mscale = 1, mscale_all_dim = 0;

  bool operator==(const RopeConfig&) const = default;
};

struct ModelConfig {
  std::string architecture;  // as written; for people, not for decisions
  std::string model_type;
  int hidden = 0;
  int num_layers = 0;
  int num_mtp_layers = 0;  // num_nextn_predict_layers: behind the last layer, not used here
  int num_heads = 0;
  int q_lora_rank = 0;  // 0: one query projection from hidden (Moonlight)
  int kv_lora_rank = 0;
  int nope_dim = 0;  // of a head's query and key, without position
  int rope_dim = 0;  // rotated, even
  int v_dim = 0;
  int dense_width = 0;   // intermediate_size
  int expert_width = 0;  // moe_intermediate_size
  int num_experts = 0;   // 0: every layer is dense
  int top_k = 0;
  int num_shared_experts = 0;  // one FFN of num_shared_experts * expert_width
  int num_dense_layers = 0;    // first_k_dense_replace
  int num_groups = 1, top_groups = 1;
  bool norm_topk_prob = true;
  double routed_scaling = 1;
  double rms_norm_eps = 1e-6;
  RopeConfig rope;
  int max_positions = 0;
  int vocab = 0;
  int bos_id = -1, eos_id = -1, pad_id = -1;  // -1: not given; eos_id is the first of eos_ids
  std::vector<int32_t> eos_ids;               // eos_token_id may be a list
  bool tie_word_embeddings = false;

  int qk_dim() const { return nope_dim + rope_dim; }
  // Width of a token's cached row: normed latent, then rotated key.
  int latent_dim() const { return kv_lora_rank + rope_dim; }
  bool IsMoe(int layer) const { return num_experts > 0 && layer >= num_dense_layers; }
};

// Reads the fields from `config`, flat or below "text_config". INVALID_ARGUMENT names the field,
// what was found and what is supported: fields missing or of a wrong kind, outer and inner values
// that differ, both RoPE forms with different content, fp8 or any quantisation other than INT4
// pack-quantized group 32, scoring functions other than sigmoid, other activations, biases, numbers
// beyond any model of the family. Where there is a text_config, fields of the architecture are read
// from it alone, as the model's own code does; token ids, tied embeddings and quantisation may
// stand at either level. model_type, architectures, dtype and whatever we do not read may differ.
absl::StatusOr<ModelConfig> ParseModelConfig(const Json& config);

// The fields that change what a forward pass computes, as one line of text for digests.
std::string ArithmeticFields(const ModelConfig& config);

}  // namespace statetap
