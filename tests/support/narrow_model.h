// A model so small that samples of 66,000 tokens are a matter of seconds: one dense layer of one
// head. Its weights are known here, so that any row can be computed again in double precision, keys
// and values expanded, position by position.
#pragma once

#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/checkpoint/editable_checkpoint.h"

namespace statetap::testing {

class NarrowModel {
 public:
  // kKvLora + kRope fill one vector of the CPU backend.
  static constexpr int kHidden = 32, kKvLora = 12, kNope = 4, kRope = 4, kV = 4, kWidth = 32,
                       kVocab = 300;
  static constexpr int kOriginal = 2048;  // positions before YaRN; 64 times as many with it
  static constexpr double kEps = 1e-5;
  // kHalves: pairs are (i, i + 2) and not (2i, 2i + 1): what a test must be able to tell apart.
  enum class Pairs { kInterleaved, kHalves };

  NarrowModel() {
    checkpoint_.config =
        *MakeConfig({.layers = 1, .query_lora = false, .int4_experts = false, .flat = true});
    Json& config = checkpoint_.config;
    config["hidden_size"] = kHidden;
    config["num_attention_heads"] = config["num_key_value_heads"] = 1;
    config["kv_lora_rank"] = kKvLora;
    config["qk_nope_head_dim"] = kNope;
    config["qk_rope_head_dim"] = kRope;
    config["v_head_dim"] = kV;
    config["intermediate_size"] = kWidth;
    config["vocab_size"] = kVocab;
    config["bos_token_id"] = config["eos_token_id"] = config["pad_token_id"] = kVocab - 1;
    config["rms_norm_eps"] = kEps;
    config["rope_theta"] = 50000.0;
    config["rope_scaling"]["original_max_position_embeddings"] = kOriginal;
    config["max_position_embeddings"] = kOriginal * 64;
    checkpoint_.tensors.clear();
    const std::string layer = "model.layers.0.";
    // Scores of a deviation of about 4: attention looks at few places, so a wrong position shows.
    Add("model.embed_tokens.weight", kVocab, kHidden, 1);
    AddNorm(layer + "input_layernorm.weight", kHidden);
    Add(layer + "self_attn.q_proj.weight", kNope + kRope, kHidden, 2 / std::sqrt(kHidden));
    Add(layer + "self_attn.kv_a_proj_with_mqa.weight", kKvLora + kRope, kHidden,
        1 / std::sqrt(kHidden));
    AddNorm(layer + "self_attn.kv_a_layernorm.weight", kKvLora);
    Add(layer + "self_attn.kv_b_proj.weight", kNope + kV, kKvLora, 1 / std::sqrt(kKvLora));
    Add(layer + "self_attn.o_proj.weight", kHidden, kV, 1);
    AddNorm(layer + "post_attention_layernorm.weight", kHidden);
    Add(layer + "mlp.gate_proj.weight", kWidth, kHidden, 1 / std::sqrt(kHidden));
    Add(layer + "mlp.up_proj.weight", kWidth, kHidden, 1 / std::sqrt(kHidden));
    Add(layer + "mlp.down_proj.weight", kHidden, kWidth, 1 / std::sqrt(kWidth));
    AddNorm("model.norm.weight", kHidden);
    Add("lm_head.weight", kVocab, kHidden, 1);
  }
  absl::StatusOr<CheckpointIndex> Write(const std::filesystem::path& folder) const {
    checkpoint_.Write(folder);
    return CheckpointIndex::Open(folder);
  }

  // The residual stream after the layer, of the last token of `ids`.
  std::vector<double> LastRow(const std::vector<int32_t>& ids,
                              Pairs pairs = Pairs::kInterleaved) const {
    const std::string layer = "model.layers.0.", attention = layer + "self_attn.";
    const auto last = static_cast<int64_t>(ids.size()) - 1;
    std::vector<double> query, weights, values;
    double largest = -INFINITY;
    for (int64_t t = last; t >= 0; --t) {
      const std::vector<double> x = Norm(layer + "input_layernorm.weight", Embedding(ids[t]));
      if (t == last) {
        query = Times(attention + "q_proj.weight", x);
        Rotate(query.data() + kNope, t, pairs);
      }
      std::vector<double> latent = Times(attention + "kv_a_proj_with_mqa.weight", x);
      Rotate(latent.data() + kKvLora, t, pairs);
      const std::vector<double> key_value = Times(
          attention + "kv_b_proj.weight",
          Norm(attention + "kv_a_layernorm.weight", {latent.begin(), latent.begin() + kKvLora}));
      double score = 0;
      for (int i = 0; i < kNope; ++i) score += query[i] * key_value[i];
      for (int i = 0; i < kRope; ++i) score += query[kNope + i] * latent[kKvLora + i];
      weights.push_back(score * Scale());
      largest = std::max(largest, weights.back());
      values.insert(values.end(), key_value.begin() + kNope, key_value.end());
    }
    std::vector<double> mixed(kV);
    double sum = 0;
    for (size_t t = 0; t < weights.size(); ++t) {
      const double weight = std::exp(weights[t] - largest);
      sum += weight;
      for (int i = 0; i < kV; ++i) mixed[i] += weight * values[t * kV + i];
    }
    for (double& value : mixed) value /= sum;
    std::vector<double> stream = Embedding(ids.back());
    AddTo(stream, Times(attention + "o_proj.weight", mixed));
    const std::vector<double> x = Norm(layer + "post_attention_layernorm.weight", stream);
    std::vector<double> gate = Times(layer + "mlp.gate_proj.weight", x);
    const std::vector<double> up = Times(layer + "mlp.up_proj.weight", x);
    for (int i = 0; i < kWidth; ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
    AddTo(stream, Times(layer + "mlp.down_proj.weight", gate));
    return stream;
  }

 private:
  void Add(const std::string& name, int rows, int columns, double deviation) {
    std::normal_distribution<double> normal(0, deviation);
    Store(name, {rows, columns}, [&] { return normal(random_); });
  }
  void AddNorm(const std::string& name, int size) {
    std::uniform_real_distribution<double> around_one(0.8, 1.2);
    Store(name, {size}, [&] { return around_one(random_); });
  }
  template <typename Draw>
  void Store(const std::string& name, std::vector<int64_t> shape, const Draw& draw) {
    int64_t count = 1;
    for (const int64_t dim : shape) count *= dim;
    StoredTensor tensor{"BF16", std::move(shape), {}};
    std::vector<double>& values = values_[name];
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = FloatToBf16(static_cast<float>(draw()));
      tensor.bytes.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
      values.push_back(double{Bf16ToFloat(bits)});
    }
    checkpoint_.tensors[name] = std::move(tensor);
  }

  std::vector<double> Embedding(int32_t id) const {
    const auto begin = values_.at("model.embed_tokens.weight").begin() + int64_t{id} * kHidden;
    return {begin, begin + kHidden};
  }
  std::vector<double> Times(const std::string& name, const std::vector<double>& x) const {
    const std::vector<double>& matrix = values_.at(name);
    std::vector<double> y(matrix.size() / x.size());
    for (size_t r = 0; r < y.size(); ++r) {
      for (size_t c = 0; c < x.size(); ++c) y[r] += matrix[r * x.size() + c] * x[c];
    }
    return y;
  }
  std::vector<double> Norm(const std::string& name, std::vector<double> x) const {
    double sum = 0;
    for (const double value : x) sum += value * value;
    const double scale = 1 / std::sqrt(sum / static_cast<double>(x.size()) + kEps);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= scale * values_.at(name)[i];
    return x;
  }
  static void AddTo(std::vector<double>& to, const std::vector<double>& x) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += x[i];
  }
  static double Scale() {
    const double magnitude = 0.1 * std::log(64.0) + 1;
    return magnitude * magnitude / std::sqrt(kNope + kRope);
  }
  // YaRN over two pairs: the first turns as without it; of the second, half is stretched 64 times
  // (its ramp from pair 0 to pair 2 stands at 1/2).
  static void Rotate(double* x, int64_t position, Pairs pairs) {
    const double plain = std::pow(50000.0, -0.5);
    const double frequencies[] = {1, plain * 0.5 + plain / 64 * 0.5};
    for (int i = 0; i < 2; ++i) {
      double& a = x[pairs == Pairs::kInterleaved ? 2 * i : i];
      double& b = x[pairs == Pairs::kInterleaved ? 2 * i + 1 : i + 2];
      const double angle = static_cast<double>(position) * frequencies[i];
      const double turned = a * std::cos(angle) - b * std::sin(angle);
      b = a * std::sin(angle) + b * std::cos(angle);
      a = turned;
    }
  }

  EditableCheckpoint checkpoint_{MakeOptions{.layers = 1}};
  std::map<std::string, std::vector<double>> values_;
  std::mt19937 random_{5};
};

}  // namespace statetap::testing
