#include "extractor/checkpoint/model_config.h"

#include "extractor/base/json.h"
#include "extractor/checkpoint/maker_files.h"
#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using ::testing::ElementsAre;
using testing::StatusIs;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

Json Nested() { return *MakeConfig({}); }
Json Flat() { return *MakeConfig({.flat = true}); }

// The flat configuration with one field set, or erased where `value` is discarded.
Json With(std::string_view key, Json value) {
  Json config = Flat();
  config[std::string(key)] = std::move(value);
  return config;
}
Json Without(std::string_view key) {
  Json config = Flat();
  config.erase(std::string(key));
  return config;
}

TEST(ModelConfigTest, ReadsNestedAndFlatAlike) {
  ASSERT_OK_AND_ASSIGN(const ModelConfig nested, ParseModelConfig(Nested()));
  ASSERT_OK_AND_ASSIGN(const ModelConfig flat, ParseModelConfig(Flat()));
  EXPECT_EQ(ArithmeticFields(nested), ArithmeticFields(flat));
  EXPECT_EQ(nested.architecture, "KimiK25ForConditionalGeneration");
  EXPECT_EQ(flat.architecture, "DeepseekV3ForCausalLM");
  EXPECT_EQ(nested.model_type, "kimi_k2");
  EXPECT_EQ(nested.hidden, 128);
  EXPECT_EQ(nested.q_lora_rank, 64);
  EXPECT_EQ(nested.qk_dim(), 24);
  EXPECT_EQ(nested.latent_dim(), 72);
  EXPECT_EQ(nested.num_experts, 16);
  EXPECT_FALSE(nested.IsMoe(0));
  EXPECT_TRUE(nested.IsMoe(1));
  EXPECT_EQ(nested.rope.theta, 50000);
  EXPECT_EQ(nested.rope.factor, 64);
  EXPECT_EQ(nested.rope.original_positions, 64);
  EXPECT_EQ(nested.max_positions, 4096);
  EXPECT_EQ(nested.bos_id, 1000);
  EXPECT_EQ(nested.eos_id, 1001);
  EXPECT_EQ(nested.pad_id, 1255);
}

TEST(ModelConfigTest, RefusesOuterValuesThatDifferFromInnerOnes) {
  for (const char* key : {"hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps",
                          "n_routed_experts", "eos_token_id", "scoring_func"}) {
    Json config = Nested();
    config[key] = 7;
    EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, key)) << key;
    EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "7 outside")) << key;
  }
  Json config = Nested();
  config["q_lora_rank"] = nullptr;
  EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "q_lora_rank is null outside and 64"));
  config = Nested();
  config["tie_word_embeddings"] = true;
  EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "tie_word_embeddings"));
}

TEST(ModelConfigTest, LevelsMayAgreeAndMayDifferInWhatDescribesThem) {
  Json config = Nested();
  config["hidden_size"] = 128.0;
  config["rms_norm_eps"] = 1e-5;
  config["pad_token_id"] = nullptr;
  config["dtype"] = "float32";
  config["transformers_version"] = "5";
  config["text_config"]["transformers_version"] = "4";
  // Another order of the keys is the same content.
  Json scaling = Json::object();
  for (const char* key : {"mscale_all_dim", "mscale", "beta_slow", "beta_fast",
                          "original_max_position_embeddings", "factor", "type"}) {
    scaling[key] = config["text_config"]["rope_scaling"][key];
  }
  config["rope_scaling"] = scaling;
  EXPECT_OK(ParseModelConfig(config));
}

TEST(ModelConfigTest, TakesNoArchitectureFromTheOuterLevel) {
  Json config = Nested();
  config["hidden_size"] = 128;
  config["text_config"].erase("hidden_size");
  EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "text_config.hidden_size"));
  config = Nested();
  config["rope_scaling"] = config["text_config"]["rope_scaling"];
  config["text_config"]["rope_scaling"] = nullptr;
  EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "rope_scaling"));
}

TEST(ModelConfigTest, TakesTokensAndTyingFromEitherLevel) {
  Json config = Nested();
  for (const char* key : {"bos_token_id", "eos_token_id", "tie_word_embeddings"}) {
    config["text_config"].erase(key);
  }
  config["tie_word_embeddings"] = true;
  ASSERT_OK_AND_ASSIGN(const ModelConfig parsed, ParseModelConfig(config));
  EXPECT_EQ(parsed.bos_id, 1000);
  EXPECT_EQ(parsed.eos_id, 1001);
  EXPECT_TRUE(parsed.tie_word_embeddings);
}

TEST(ModelConfigTest, NamesEveryMissingField) {
  for (const char* key : {"hidden_size",
                          "num_hidden_layers",
                          "num_attention_heads",
                          "q_lora_rank",
                          "kv_lora_rank",
                          "qk_nope_head_dim",
                          "qk_rope_head_dim",
                          "v_head_dim",
                          "intermediate_size",
                          "moe_intermediate_size",
                          "n_routed_experts",
                          "num_experts_per_tok",
                          "n_shared_experts",
                          "first_k_dense_replace",
                          "norm_topk_prob",
                          "routed_scaling_factor",
                          "rms_norm_eps",
                          "rope_theta",
                          "max_position_embeddings",
                          "vocab_size"}) {
    EXPECT_THAT(ParseModelConfig(Without(key)), StatusIs(kInvalid, key));
  }
  Json config = Without("hidden_size");
  config.erase("v_head_dim");
  config["rope_scaling"].erase("factor");
  const auto parsed = ParseModelConfig(config);
  EXPECT_THAT(parsed, StatusIs(kInvalid, "hidden_size"));
  EXPECT_THAT(parsed, StatusIs(kInvalid, "v_head_dim"));
  EXPECT_THAT(parsed, StatusIs(kInvalid, "rope_scaling.factor"));
}

TEST(ModelConfigTest, NullsThatSaySomething) {
  ASSERT_OK_AND_ASSIGN(ModelConfig config, ParseModelConfig(With("q_lora_rank", nullptr)));
  EXPECT_EQ(config.q_lora_rank, 0);
  ASSERT_OK_AND_ASSIGN(config, ParseModelConfig(With("n_shared_experts", nullptr)));
  EXPECT_EQ(config.num_shared_experts, 0);
  ASSERT_OK_AND_ASSIGN(config, ParseModelConfig(With("rope_scaling", nullptr)));
  EXPECT_FALSE(config.rope.yarn);
  EXPECT_EQ(config.rope.theta, 50000);
  ASSERT_OK_AND_ASSIGN(config, ParseModelConfig(With("n_routed_experts", nullptr)));
  EXPECT_FALSE(config.IsMoe(3));
}

TEST(ModelConfigTest, ReadsRopeParameters) {
  Json config = Flat();
  Json parameters = config["rope_scaling"];
  parameters["rope_type"] = "yarn";
  parameters["rope_theta"] = 50000.0;
  config.erase("rope_scaling");
  config.erase("rope_theta");
  config["rope_parameters"] = parameters;
  ASSERT_OK_AND_ASSIGN(const ModelConfig parsed, ParseModelConfig(config));
  ASSERT_OK_AND_ASSIGN(const ModelConfig original, ParseModelConfig(Flat()));
  EXPECT_EQ(parsed.rope, original.rope);

  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 10000}};
  ASSERT_OK_AND_ASSIGN(const ModelConfig plain, ParseModelConfig(config));
  EXPECT_EQ(plain.rope, (RopeConfig{.theta = 10000}));
}

TEST(ModelConfigTest, BothRopeFormsHaveToAgree) {
  Json config = Flat();
  config["rope_parameters"] = config["rope_scaling"];
  config["rope_parameters"]["rope_theta"] = 50000;
  EXPECT_OK(ParseModelConfig(config));
  Json other = config;
  other["rope_parameters"]["factor"] = 32;
  EXPECT_THAT(ParseModelConfig(other), StatusIs(kInvalid, "rope_scaling and rope_parameters"));
  other = config;
  other["rope_parameters"]["rope_theta"] = 10000;
  EXPECT_THAT(ParseModelConfig(other), StatusIs(kInvalid, "rope_theta is 50000"));
}

TEST(ModelConfigTest, RefusesRopeThatIsNotImplemented) {
  const auto rope = [](std::string_view key, Json value) {
    Json config = Flat();
    config["rope_scaling"][std::string(key)] = std::move(value);
    return ParseModelConfig(config);
  };
  EXPECT_THAT(rope("type", "linear"), StatusIs(kInvalid, "\"linear\""));
  EXPECT_THAT(rope("type", 3), StatusIs(kInvalid, "rope_scaling.type"));
  EXPECT_THAT(rope("rope_type", "default"), StatusIs(kInvalid, "make the two agree"));
  EXPECT_THAT(rope("attention_factor", 1.5), StatusIs(kInvalid, "attention_factor"));
  EXPECT_THAT(rope("factor", -1), StatusIs(kInvalid, "rope_scaling.factor is -1"));
  EXPECT_THAT(rope("factor", "64"), StatusIs(kInvalid, "a number is needed"));
  EXPECT_THAT(rope("original_max_position_embeddings", 64.5),
              StatusIs(kInvalid, "an integer is needed"));
  EXPECT_THAT(ParseModelConfig(With("rope_scaling", Json::array())),
              StatusIs(kInvalid, "an object is needed"));
}

TEST(ModelConfigTest, RefusesWhatIsNotImplemented) {
  EXPECT_THAT(ParseModelConfig(With("scoring_func", "softmax")), StatusIs(kInvalid, "sigmoid"));
  EXPECT_THAT(ParseModelConfig(With("topk_method", "greedy")), StatusIs(kInvalid, "noaux_tc"));
  EXPECT_THAT(ParseModelConfig(With("hidden_act", "gelu")), StatusIs(kInvalid, "silu"));
  EXPECT_THAT(ParseModelConfig(With("attention_bias", true)), StatusIs(kInvalid, "attention_bias"));
  EXPECT_THAT(ParseModelConfig(With("moe_layer_freq", 2)), StatusIs(kInvalid, "moe_layer_freq"));
  EXPECT_THAT(ParseModelConfig(With("index_topk", 2048)), StatusIs(kInvalid, "sparse attention"));
  EXPECT_THAT(ParseModelConfig(With("qk_rope_head_dim", 7)), StatusIs(kInvalid, "even"));
}

TEST(ModelConfigTest, ChecksRoutingGroups) {
  Json config = Flat();
  config["n_group"] = 4;
  config["topk_group"] = 2;
  ASSERT_OK_AND_ASSIGN(const ModelConfig parsed, ParseModelConfig(config));
  EXPECT_EQ(parsed.num_groups, 4);
  EXPECT_EQ(parsed.top_groups, 2);
  config["n_group"] = 5;
  EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "n_group 5 does not divide"));
  config["n_group"] = 16;
  EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "groups of one expert"));
  config["n_group"] = 8;
  config["topk_group"] = 1;
  EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "num_experts_per_tok 4 is more"));
  config["topk_group"] = 9;
  EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "topk_group is 9"));
  EXPECT_THAT(ParseModelConfig(With("num_experts_per_tok", 17)),
              StatusIs(kInvalid, "num_experts_per_tok is 17, 1 to 16"));
}

TEST(ModelConfigTest, BoundsEveryNumber) {
  const Json bad_values = {0,   -1,  int64_t{1} << 31, std::numeric_limits<uint64_t>::max(), 1e300,
                           "7", true};
  for (const char* key : {"hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
                          "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                          "intermediate_size", "moe_intermediate_size", "num_experts_per_tok",
                          "n_group", "topk_group", "max_position_embeddings", "vocab_size"}) {
    for (const Json& value : bad_values) {
      EXPECT_THAT(ParseModelConfig(With(key, value)), StatusIs(kInvalid, key)) << value;
    }
  }
  for (const char* key : {"rms_norm_eps", "routed_scaling_factor", "rope_theta"}) {
    for (const Json& value : {Json(-1), Json(1e300), Json("1"), Json(false)}) {
      EXPECT_THAT(ParseModelConfig(With(key, value)), StatusIs(kInvalid, key)) << value;
    }
  }
  EXPECT_THAT(ParseModelConfig(With("eos_token_id", 1256)), StatusIs(kInvalid, "eos_token_id"));
  EXPECT_THAT(ParseModelConfig(With("bos_token_id", -2)), StatusIs(kInvalid, "bos_token_id"));
}

TEST(ModelConfigTest, EndTokensMayBeAList) {
  ASSERT_OK_AND_ASSIGN(ModelConfig config,
                       ParseModelConfig(With("eos_token_id", {1002, 1001, 1009})));
  EXPECT_EQ(config.eos_id, 1002);
  EXPECT_THAT(config.eos_ids, ElementsAre(1002, 1001, 1009));
  ASSERT_OK_AND_ASSIGN(config, ParseModelConfig(Without("eos_token_id")));
  EXPECT_EQ(config.eos_id, -1);
  EXPECT_TRUE(config.eos_ids.empty());
  EXPECT_THAT(ParseModelConfig(With("eos_token_id", {1002, "x"})),
              StatusIs(kInvalid, "eos_token_id"));
}

TEST(ModelConfigTest, AcceptsOnlyTheInt4ThatIsSupported) {
  const auto with_weights = [](std::string_view key, Json value) {
    Json config = Flat();
    config["quantization_config"]["config_groups"]["group_0"]["weights"][std::string(key)] =
        std::move(value);
    return ParseModelConfig(config);
  };
  EXPECT_THAT(with_weights("num_bits", 8), StatusIs(kInvalid, "num_bits 8"));
  EXPECT_THAT(with_weights("group_size", 128), StatusIs(kInvalid, "group_size 128"));
  EXPECT_THAT(with_weights("symmetric", false), StatusIs(kInvalid, "symmetric false"));
  EXPECT_THAT(with_weights("actorder", "group"), StatusIs(kInvalid, "actorder"));
  EXPECT_OK(ParseModelConfig(Without("quantization_config")));

  const Json fp8 = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const auto refused = ParseModelConfig(With("quantization_config", fp8));
  EXPECT_THAT(refused, StatusIs(kInvalid, "quant_method \"fp8\""));
  EXPECT_THAT(refused, StatusIs(kInvalid, "supported are checkpoints in bf16 and"));
  // A block at the outer level counts as well.
  Json nested = Nested();
  nested["text_config"].erase("quantization_config");
  nested["quantization_config"] = fp8;
  EXPECT_THAT(ParseModelConfig(nested), StatusIs(kInvalid, "fp8"));
}

TEST(ModelConfigTest, RefusesWhatIsNoConfiguration) {
  EXPECT_THAT(ParseModelConfig(Json::array()), StatusIs(kInvalid, "an object is needed"));
  Json config = Nested();
  config["text_config"] = 3;
  EXPECT_THAT(ParseModelConfig(config), StatusIs(kInvalid, "text_config is number"));
}

}  // namespace
}  // namespace statetap
