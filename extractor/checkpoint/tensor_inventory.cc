#include "extractor/checkpoint/tensor_inventory.h"

#include <fmt/ranges.h>

#include <charconv>

#include "extractor/checkpoint/int4.h"

namespace statetap {
namespace {

// Builds names and stops all further visits once `visit` has returned false.
class Visitor {
 public:
  Visitor(bool quantized, const std::function<bool(const ExpectedTensor&)>& visit)
      : quantized_(quantized), visit_(visit) {}

  bool stopped() const { return stopped_; }

  void Add(std::string name, std::vector<int64_t> shape, TensorKind kind = TensorKind::kWeight) {
    if (stopped_) return;
    stopped_ = !visit_({std::move(name), kind, std::move(shape)});
  }

  // gate, up and down of an FFN; `packed` ones as INT4.
  void Ffn(const std::string& prefix, int64_t hidden, int64_t width, bool routed) {
    Linear(prefix + "gate_proj.weight", width, hidden, routed);
    Linear(prefix + "up_proj.weight", width, hidden, routed);
    Linear(prefix + "down_proj.weight", hidden, width, routed);
  }

 private:
  void Linear(const std::string& name, int64_t out, int64_t in, bool routed) {
    if (!routed || !quantized_) return Add(name, {out, in});
    Add(name + "_packed", {out, in / kInt4PerWord}, TensorKind::kPacked);
    Add(name + "_scale", {out, in / kInt4Group}, TensorKind::kScale);
    Add(name + "_shape", {2}, TensorKind::kShape);
  }

  bool quantized_;
  const std::function<bool(const ExpectedTensor&)>& visit_;
  bool stopped_ = false;
};

void AddAttention(const ModelConfig& c, const std::string& layer, Visitor& visitor) {
  const std::string prefix = layer + "self_attn.";
  const int64_t queries = int64_t{c.num_heads} * c.qk_dim();
  if (c.q_lora_rank > 0) {
    visitor.Add(prefix + "q_a_proj.weight", {c.q_lora_rank, c.hidden});
    visitor.Add(prefix + "q_a_layernorm.weight", {c.q_lora_rank});
    visitor.Add(prefix + "q_b_proj.weight", {queries, c.q_lora_rank});
  } else {
    visitor.Add(prefix + "q_proj.weight", {queries, c.hidden});
  }
  visitor.Add(prefix + "kv_a_proj_with_mqa.weight", {c.latent_dim(), c.hidden});
  visitor.Add(prefix + "kv_a_layernorm.weight", {c.kv_lora_rank});
  visitor.Add(prefix + "kv_b_proj.weight",
              {int64_t{c.num_heads} * (c.nope_dim + c.v_dim), c.kv_lora_rank});
  visitor.Add(prefix + "o_proj.weight", {c.hidden, int64_t{c.num_heads} * c.v_dim});
}

void AddExperts(const ModelConfig& c, const std::string& layer, Visitor& visitor) {
  visitor.Add(layer + "mlp.gate.weight", {c.num_experts, c.hidden});
  visitor.Add(layer + "mlp.gate.e_score_correction_bias", {c.num_experts}, TensorKind::kRouterBias);
  if (c.num_shared_experts > 0) {
    visitor.Ffn(layer + "mlp.shared_experts.", c.hidden,
                int64_t{c.num_shared_experts} * c.expert_width, /*routed=*/false);
  }
  for (int expert = 0; expert < c.num_experts && !visitor.stopped(); ++expert) {
    visitor.Ffn(fmt::format("{}mlp.experts.{}.", layer, expert), c.hidden, c.expert_width,
                /*routed=*/true);
  }
}

}  // namespace

bool Accepts(TensorKind kind, DType dtype) {
  switch (kind) {
    case TensorKind::kWeight: return dtype == DType::kBf16;
    case TensorKind::kRouterBias: return dtype == DType::kF32 || dtype == DType::kBf16;
    case TensorKind::kPacked: return dtype == DType::kI32;
    case TensorKind::kScale:
      return dtype == DType::kBf16 || dtype == DType::kF16 || dtype == DType::kF32;
    case TensorKind::kShape: return dtype == DType::kI32 || dtype == DType::kI64;
  }
  return false;
}

std::string_view AcceptedTypes(TensorKind kind) {
  switch (kind) {
    case TensorKind::kWeight: return "bfloat16";
    case TensorKind::kRouterBias: return "float32 or bfloat16";
    case TensorKind::kPacked: return "int32";
    case TensorKind::kScale: return "bfloat16, float16 or float32";
    case TensorKind::kShape: return "int32 or int64";
  }
  return "?";
}

void ForEachTensor(const ModelConfig& c, bool quantized,
                   const std::function<bool(const ExpectedTensor&)>& visit) {
  Visitor visitor(quantized, visit);
  visitor.Add("model.embed_tokens.weight", {c.vocab, c.hidden});
  visitor.Add("model.norm.weight", {c.hidden});
  if (!c.tie_word_embeddings) visitor.Add("lm_head.weight", {c.vocab, c.hidden});
  for (int i = 0; i < c.num_layers && !visitor.stopped(); ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    visitor.Add(layer + "input_layernorm.weight", {c.hidden});
    visitor.Add(layer + "post_attention_layernorm.weight", {c.hidden});
    AddAttention(c, layer, visitor);
    if (c.IsMoe(i)) {
      AddExperts(c, layer, visitor);
    } else {
      visitor.Ffn(layer + "mlp.", c.hidden, c.dense_width, /*routed=*/false);
    }
  }
}

std::array<int64_t, 2> ExpertShape(const ModelConfig& config, std::string_view name) {
  if (name.find(".down_proj.") != name.npos) return {config.hidden, config.expert_width};
  return {config.expert_width, config.hidden};
}

std::optional<std::string> TextTensorName(std::string_view stored) {
  constexpr std::string_view kPrefix = "language_model.";
  if (stored.starts_with("vision_tower.") || stored.starts_with("mm_projector.") ||
      stored.ends_with(".rotary_emb.inv_freq")) {
    return std::nullopt;
  }
  if (!stored.starts_with(kPrefix)) return std::string(stored);
  stored.remove_prefix(kPrefix.size());
  if (stored.starts_with("model.") || stored.starts_with("lm_head.")) return std::string(stored);
  return fmt::format("model.{}", stored);
}

int LayerOf(std::string_view name) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return -1;
  name.remove_prefix(kLayers.size());
  int layer = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  return error == std::errc() && end != name.data() + name.size() && *end == '.' ? layer : -1;
}

bool IsPrediction(std::string_view name, const ModelConfig& config) {
  const int layer = LayerOf(name);
  return layer >= config.num_layers && layer < config.num_layers + config.num_mtp_layers;
}

std::string DescribeTensor(std::string_view types, const std::vector<int64_t>& shape) {
  return fmt::format("{} [{}]", types, fmt::join(shape, ", "));
}

}  // namespace statetap
