#include "extractor/checkpoint/maker_files.h"

#include <algorithm>
#include <array>
#include <vector>

#include "extractor/base/json.h"

namespace statetap {
namespace {

struct Preset {
  std::string_view name;
  int hidden, layers, heads, q_lora, kv_lora, nope, rope, v, dense_width, expert_width, experts,
      top_k, original_positions, base_vocab;
};
constexpr std::array kPresets = {
    Preset{"tiny", 128, 4, 8, 64, 64, 16, 8, 16, 512, 256, 16, 4, 64, 1000},
    Preset{"mid", 1024, 6, 16, 384, 512, 128, 64, 128, 2048, 512, 48, 8, 128, 1000},
    Preset{"kimi-k2.5", 7168, 61, 64, 1536, 512, 128, 64, 128, 18432, 2048, 384, 8, 4096, 163584},
};
constexpr int kYarnFactor = 64;

// Offsets behind the ordinary tokens. Those not `special` are text to a decoder.
struct SpecialToken {
  int offset;
  std::string_view text;
  bool special;
};
constexpr std::array kSpecial = {
    SpecialToken{0, "[BOS]", true},
    SpecialToken{1, "[EOS]", true},
    SpecialToken{2, "<|im_end|>", true},
    SpecialToken{3, "<|im_user|>", true},
    SpecialToken{4, "<|im_assistant|>", true},
    SpecialToken{6, "<|start_header_id|>", true},
    SpecialToken{7, "<|end_header_id|>", true},
    SpecialToken{9, "[EOT]", true},
    SpecialToken{10, "<|im_system|>", true},
    SpecialToken{11, "<|tool_calls_section_begin|>", false},
    SpecialToken{12, "<|tool_calls_section_end|>", false},
    SpecialToken{13, "<|tool_call_begin|>", false},
    SpecialToken{14, "<|tool_call_argument_begin|>", false},
    SpecialToken{15, "<|tool_call_end|>", false},
    SpecialToken{17, "<|im_middle|>", true},
    SpecialToken{18, "<|media_begin|>", true},
    SpecialToken{19, "<|media_content|>", true},
    SpecialToken{20, "<|media_end|>", true},
    SpecialToken{21, "<|media_pad|>", true},
    SpecialToken{22, "<think>", false},
    SpecialToken{23, "</think>", false},
    SpecialToken{254, "[UNK]", true},
    SpecialToken{255, "[PAD]", true},
};
constexpr int kEos = 1, kImEnd = 2, kMediaPad = 21, kPad = 255;

Json QuantizationConfig() {
  const Json weights = {{"num_bits", 4},       {"type", "int"},    {"symmetric", true},
                        {"strategy", "group"}, {"group_size", 32}, {"dynamic", false},
                        {"actorder", nullptr}};
  const Json group = {{"targets", {"Linear"}},
                      {"weights", weights},
                      {"input_activations", nullptr},
                      {"output_activations", nullptr}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"quantization_status", "compressed"},
          {"kv_cache_scheme", nullptr},
          {"ignore",
           {"lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            R"(re:.*mlp\.(gate|up|gate_up|down)_proj.*)"}},
          {"config_groups", {{"group_0", group}}}};
}

Json RopeScaling(const Preset& p, bool yarn) {
  if (!yarn) return nullptr;
  return {{"type", "yarn"},
          {"factor", double{kYarnFactor}},
          {"original_max_position_embeddings", p.original_positions},
          {"beta_fast", 32.0},
          {"beta_slow", 1.0},
          {"mscale", 1.0},
          {"mscale_all_dim", 1.0}};
}

void AddTokenIds(Json& config, int base) {
  config["bos_token_id"] = base;
  config["eos_token_id"] = base + kEos;
  config["pad_token_id"] = base + kPad;
}

Json TextConfig(const Preset& p, const MakeOptions& o) {
  Json text = {{"architectures", {"DeepseekV3ForCausalLM"}},
               {"model_type", "kimi_k2"},
               {"hidden_size", p.hidden},
               {"num_hidden_layers", o.layers != 0 ? o.layers : p.layers},
               {"num_attention_heads", p.heads},
               {"num_key_value_heads", p.heads},
               {"q_lora_rank", o.query_lora ? Json(p.q_lora) : Json()},
               {"kv_lora_rank", p.kv_lora},
               {"qk_nope_head_dim", p.nope},
               {"qk_rope_head_dim", p.rope},
               {"v_head_dim", p.v},
               {"intermediate_size", p.dense_width},
               {"moe_intermediate_size", p.expert_width},
               {"n_routed_experts", p.experts},
               {"num_experts_per_tok", p.top_k},
               {"n_shared_experts", o.shared_experts},
               {"first_k_dense_replace", o.dense_layers},
               {"moe_layer_freq", 1},
               {"n_group", o.groups},
               {"topk_group", o.top_groups},
               {"topk_method", "noaux_tc"},
               {"scoring_func", "sigmoid"},
               {"norm_topk_prob", true},
               {"routed_scaling_factor", 2.827},
               {"rms_norm_eps", 1e-5},
               {"rope_theta", 50000.0},
               {"rope_scaling", RopeScaling(p, o.yarn)},
               {"max_position_embeddings", p.original_positions * kYarnFactor},
               {"vocab_size", p.base_vocab + kSpecialTokens},
               {"hidden_act", "silu"},
               {"attention_bias", false},
               {"attention_dropout", 0.0},
               {"tie_word_embeddings", o.tied_embeddings},
               {"num_nextn_predict_layers", 0},
               {"dtype", "bfloat16"}};
  AddTokenIds(text, p.base_vocab);
  if (o.int4_experts) text["quantization_config"] = QuantizationConfig();
  return text;
}

// Base64 of one to three bytes.
std::string Base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  uint32_t bits = 0;
  for (size_t i = 0; i < 3; ++i) {
    bits = bits << 8 | (i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0u);
  }
  std::string text;
  for (int shift = 18; shift >= 0; shift -= 6) text += kDigits[bits >> shift & 63];
  for (size_t i = bytes.size(); i < 3; ++i) text[i + 1] = '=';
  return text;
}

// The order of the 256 single bytes in vocabularies of this kind: printable ones first.
std::vector<char> ByteOrder() {
  const auto printable = [](int b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  };
  std::vector<char> order;
  for (const bool wanted : {true, false}) {
    for (int b = 0; b < 256; ++b) {
      if (printable(b) == wanted) order.push_back(static_cast<char>(b));
    }
  }
  return order;
}

// Bytes with those first that text is made of: short vocabularies merge letters.
std::vector<char> CommonFirst() {
  std::vector<char> order;
  for (const char c : std::string_view(" etaoinshrdlucmfwypvbgkjqxz")) order.push_back(c);
  for (const char c : ByteOrder()) {
    if (std::ranges::find(order, c) == order.end()) order.push_back(c);
  }
  return order;
}

}  // namespace

absl::StatusOr<Json> MakeConfig(const MakeOptions& options) {
  const auto* preset = std::ranges::find(kPresets, options.preset, &Preset::name);
  if (preset == kPresets.end()) {
    return absl::InvalidArgumentError(
        fmt::format("preset is \"{}\"; there are tiny, mid and kimi-k2.5", options.preset));
  }
  Json text = TextConfig(*preset, options);
  if (options.flat) return text;
  Json config = {{"architectures", {"KimiK25ForConditionalGeneration"}},
                 {"model_type", "kimi_k25"},
                 {"dtype", "bfloat16"},
                 {"ignore_index", -100},
                 {"media_placeholder_token_id", preset->base_vocab + kMediaPad},
                 {"tie_word_embeddings", options.tied_embeddings},
                 {"use_unified_vision_chunk", true},
                 {"vision_config", {{"patch_size", 14}, {"vt_hidden_size", 16}}}};
  AddTokenIds(config, preset->base_vocab);
  config["text_config"] = std::move(text);
  return config;
}

std::string MakeVocabulary(int size) {
  std::string file;
  int rank = 0;
  const auto add = [&](std::string_view bytes) {
    if (rank < size) file += fmt::format("{} {}\n", Base64(bytes), rank++);
  };
  for (const char c : ByteOrder()) add({&c, 1});
  const std::vector<char> bytes = CommonFirst();
  // Shell by shell of the order above, so that any prefix holds the common ones.
  for (int shell = 0; shell < 256; ++shell) {
    for (int a = 0; a <= shell; ++a) {
      for (int b = a == shell ? 0 : shell; b <= shell; ++b)
        add({std::array{bytes[a], bytes[b]}.data(), 2});
    }
  }
  for (int shell = 0; shell < 256 && rank < size; ++shell) {
    for (int a = 0; a <= shell; ++a) {
      for (int b = 0; b <= shell; ++b) {
        for (int c = std::max(a, b) == shell ? 0 : shell; c <= shell; ++c) {
          add({std::array{bytes[a], bytes[b], bytes[c]}.data(), 3});
        }
      }
    }
  }
  return file;
}

Json MakeGenerationConfig(int base, int max_positions) {
  return {{"max_length", max_positions}, {"eos_token_id", base + kImEnd}};
}

Json MakeTokenizerConfig(int base, int max_positions) {
  Json tokens = Json::object();
  for (const SpecialToken& token : kSpecial) {
    tokens[fmt::to_string(base + token.offset)] = {{"content", token.text},
                                                   {"special", token.special}};
  }
  return {{"added_tokens_decoder", std::move(tokens)},
          {"bos_token", "[BOS]"},
          {"eos_token", "[EOS]"},
          {"unk_token", "[UNK]"},
          {"pad_token", "[PAD]"},
          {"tokenizer_class", "TikTokenTokenizer"},
          {"model_max_length", max_positions}};
}

}  // namespace statetap
