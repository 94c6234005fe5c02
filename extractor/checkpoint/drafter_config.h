// config.json of an EAGLE-3 drafter in its public layouts: flat (SafeAILab, SpecForge, TorchSpec,
// Model-Optimizer) or nested in transformer_layer_config (speculators). Read leniently: what is
// missing stays unknown, so that the tensors can still be checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "extractor/base/json_fwd.h"
#include "extractor/checkpoint/rule_report.h"

namespace statetap {

struct DrafterConfig {
  static constexpr int64_t kUnknown = -1;

  std::string architecture;       // as written; empty where it is not given
  bool speculators = false;       // speculators_model_type is given
  bool latent_attention = false;  // MLA: kv_lora_rank is given
  int64_t hidden = kUnknown;
  int64_t target_hidden = kUnknown;  // width of a tap; hidden where it is not given
  int64_t num_layers = 1;
  int64_t num_heads = kUnknown, num_kv_heads = kUnknown;
  int64_t head_dim = kUnknown;  // as written; engines take hidden / num_heads where it is not
  int64_t intermediate = kUnknown;
  int64_t vocab = kUnknown;        // of the target
  int64_t draft_vocab = kUnknown;  // vocab where it is not given
  bool names_draft_vocab = false;
  int64_t q_lora_rank = kUnknown, kv_lora_rank = kUnknown;
  int64_t nope_dim = kUnknown, rope_dim = kUnknown, v_dim = kUnknown;
  std::vector<int64_t> taps;  // as written; empty where it names none
  std::string taps_key;       // "eagle_config.eagle_aux_hidden_state_layer_ids"
  bool attention_bias = false, mlp_bias = false;
  bool fc_norm = false;         // one norm a tap before fc
  bool norm_before_fc = false;  // one norm over the taps joined
};

// Adds a row for every field that is missing though the checks need it, or of a wrong kind.
DrafterConfig ReadDrafterConfig(const Json& config, RuleReport& report);

}  // namespace statetap
