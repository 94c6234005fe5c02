#include "extractor/checkpoint/drafter_tensors.h"

#include <fmt/format.h>

namespace statetap {
namespace {

constexpr int64_t kUnknown = DrafterConfig::kUnknown;

int64_t Times(int64_t a, int64_t b) { return a == kUnknown || b == kUnknown ? kUnknown : a * b; }
int64_t Plus(int64_t a, int64_t b) { return a == kUnknown || b == kUnknown ? kUnknown : a + b; }

class Tensors {
 public:
  Tensors(const DrafterConfig& config, std::vector<DrafterTensor>& to) : c_(config), to_(to) {}

  void Add(std::string name, std::vector<int64_t> shape, std::string why, bool required = true,
           DrafterTensorKind kind = DrafterTensorKind::kWeight) {
    to_.push_back({std::move(name), std::move(shape), std::move(why), required, kind});
  }

  void Layer(const std::string& prefix, bool first) {
    if (first) {
      Add(prefix + "hidden_norm.weight", {c_.hidden}, "norms the state that comes in");
    }
    Add(prefix + "input_layernorm.weight", {c_.hidden}, "norms the token's embedding");
    // The first layer sees embedding and state side by side.
    const int64_t in = first ? Times(2, c_.hidden) : c_.hidden;
    const std::string in_why = first ? "2 × hidden in: embedding, then state" : "hidden in";
    if (c_.latent_attention) {
      LatentAttention(prefix + "self_attn.", in, in_why);
    } else {
      Attention(prefix + "self_attn.", in, in_why);
    }
    Add(prefix + "post_attention_layernorm.weight", {c_.hidden}, "norms before the FFN");
    Linear(prefix + "mlp.gate_proj", c_.intermediate, c_.hidden, "intermediate_size × hidden",
           c_.mlp_bias);
    Linear(prefix + "mlp.up_proj", c_.intermediate, c_.hidden, "intermediate_size × hidden",
           c_.mlp_bias);
    Linear(prefix + "mlp.down_proj", c_.hidden, c_.intermediate, "hidden × intermediate_size",
           c_.mlp_bias);
  }

 private:
  void Linear(const std::string& name, int64_t out, int64_t in, std::string why, bool bias) {
    Add(name + ".weight", {out, in}, std::move(why));
    if (bias) Add(name + ".bias", {out}, "config.json asks for biases");
  }

  void Attention(const std::string& prefix, int64_t in, const std::string& in_why) {
    const int64_t head = c_.head_dim != kUnknown             ? c_.head_dim
                         : c_.hidden > 0 && c_.num_heads > 0 ? c_.hidden / c_.num_heads
                                                             : kUnknown;
    const int64_t queries = Times(c_.num_heads, head), keys = Times(c_.num_kv_heads, head);
    const bool bias = c_.attention_bias;
    Linear(prefix + "q_proj", queries, in, "heads × head_dim; " + in_why, bias);
    Linear(prefix + "k_proj", keys, in, "kv heads × head_dim; " + in_why, bias);
    Linear(prefix + "v_proj", keys, in, "kv heads × head_dim; " + in_why, bias);
    Linear(prefix + "o_proj", c_.hidden, queries, "hidden × (heads × head_dim)", bias);
  }

  void LatentAttention(const std::string& prefix, int64_t in, const std::string& in_why) {
    const int64_t queries = Times(c_.num_heads, Plus(c_.nope_dim, c_.rope_dim));
    if (c_.q_lora_rank == kUnknown) {
      Add(prefix + "q_proj.weight", {queries, in}, "heads × (nope + rope); " + in_why);
    } else {
      Add(prefix + "q_a_proj.weight", {c_.q_lora_rank, in}, "q_lora_rank; " + in_why);
      Add(prefix + "q_a_layernorm.weight", {c_.q_lora_rank}, "norms the query's latent");
      Add(prefix + "q_b_proj.weight", {queries, c_.q_lora_rank}, "heads × (nope + rope)");
    }
    Add(prefix + "kv_a_proj_with_mqa.weight", {Plus(c_.kv_lora_rank, c_.rope_dim), in},
        "kv_lora_rank + rope; " + in_why);
    Add(prefix + "kv_a_layernorm.weight", {c_.kv_lora_rank}, "norms the key's latent");
    Add(prefix + "kv_b_proj.weight",
        {Times(c_.num_heads, Plus(c_.nope_dim, c_.v_dim)), c_.kv_lora_rank}, "heads × (nope + v)");
    Add(prefix + "o_proj.weight", {c_.hidden, Times(c_.num_heads, c_.v_dim)},
        "hidden × (heads × v)");
  }

  const DrafterConfig& c_;
  std::vector<DrafterTensor>& to_;
};

}  // namespace

std::string_view NameOf(DrafterStyle style) {
  switch (style) {
    case DrafterStyle::kMidlayer: return "midlayer.* (SafeAILab, SpecForge, SGLang)";
    case DrafterStyle::kLayers: return "layers.0.* (vLLM: TorchSpec, Model-Optimizer)";
    case DrafterStyle::kSpeculators: return "layers.0.* with speculators' config.json";
  }
  return "?";
}

std::vector<DrafterTensor> DrafterTensors(const DrafterConfig& c, DrafterStyle style,
                                          int64_t num_taps) {
  std::vector<DrafterTensor> list;
  Tensors tensors(c, list);
  tensors.Add("embed_tokens.weight", {c.vocab, c.hidden}, "a copy of the target's table",
              /*required=*/false);
  for (int64_t i = 0; c.fc_norm && i < num_taps; ++i) {
    tensors.Add(fmt::format("fc_norm.{}.weight", i), {c.target_hidden}, "fc_norm: a norm a tap");
  }
  if (c.norm_before_fc) {
    tensors.Add("input_norm.weight", {Times(num_taps, c.target_hidden)},
                "norm_before_fc: one norm over the taps joined");
  }
  tensors.Add("fc.weight", {c.hidden, Times(num_taps, c.target_hidden)},
              "hidden × (taps × the target's hidden)");
  const std::string front = style == DrafterStyle::kMidlayer ? "midlayer" : "layers.0";
  tensors.Layer(front + ".", /*first=*/true);
  for (int64_t i = 1; i < c.num_layers; ++i) {
    tensors.Layer(fmt::format("layers.{}.", i), /*first=*/false);
  }
  tensors.Add("norm.weight", {c.hidden}, "norms before lm_head");
  tensors.Add("lm_head.weight", {c.draft_vocab, c.hidden}, "draft_vocab_size × hidden");
  const bool reduced = c.draft_vocab != c.vocab;
  tensors.Add("d2t", {c.draft_vocab}, "target id = draft id + d2t[draft id]", reduced,
              DrafterTensorKind::kOffsets);
  tensors.Add("t2d", {c.vocab}, "true for target ids that the drafter knows",
              reduced && style != DrafterStyle::kLayers, DrafterTensorKind::kMembers);
  return list;
}

}  // namespace statetap
