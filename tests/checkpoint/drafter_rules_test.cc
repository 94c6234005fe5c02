// Sound drafters of the three naming styles and both attention kinds, and what is wrong with
// others.
#include "extractor/checkpoint/drafter_rules.h"

#include <gmock/gmock.h>

#include "tests/checkpoint/editable_drafter.h"
#include "tests/checkpoint/report_rows.h"

namespace statetap::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

#define EXPECT_FAULTS(report, ...) \
  EXPECT_THAT(RulesOf(report, Verdict::kFault), UnorderedElementsAre(__VA_ARGS__))
#define EXPECT_SOUND(report) EXPECT_THAT(RulesOf(report, Verdict::kFault), ::testing::IsEmpty())

TEST(DrafterRulesTest, TheThreeNamingStylesAreSound) {
  const RuleReport midlayer = EditableDrafter("midlayer.").Verify();
  EXPECT_SOUND(midlayer);
  EXPECT_THAT(RowOf(midlayer, "naming style").found, HasSubstr("midlayer"));
  // Which numbering the ids have is for a person to find out.
  EXPECT_THAT(RulesOf(midlayer, Verdict::kWarning),
              UnorderedElementsAre("eagle_config.eagle_aux_hidden_state_layer_ids"));

  EditableDrafter layers("layers.0.");
  layers.tensors.erase("t2d");  // Model-Optimizer writes none
  EXPECT_SOUND(layers.Verify());

  EditableDrafter nested("layers.0.");
  nested.config = {{"speculators_model_type", "eagle3"},
                   {"draft_vocab_size", kDraft},
                   {"eagle_aux_hidden_state_layer_ids", {2, 30, 58}},
                   {"transformer_layer_config", nested.config}};
  nested.config["transformer_layer_config"].erase("draft_vocab_size");
  nested.Set("embed_tokens.weight", {kVocab, kHidden});
  const RuleReport speculators = nested.Verify();
  EXPECT_SOUND(speculators);
  EXPECT_EQ(speculators.Count(Verdict::kWarning), 0);
}

TEST(DrafterRulesTest, LatentAttentionHasShapesOfItsOwn) {
  EditableDrafter drafter("layers.0.");
  for (const std::string part : {"q", "k", "v"}) {
    drafter.tensors.erase("layers.0.self_attn." + part + "_proj.weight");
  }
  for (const auto& [key, value] : std::map<std::string, int>{{"q_lora_rank", 24},
                                                             {"kv_lora_rank", 16},
                                                             {"qk_nope_head_dim", 8},
                                                             {"qk_rope_head_dim", 4},
                                                             {"v_head_dim", 6}}) {
    drafter.config[key] = value;
  }
  drafter.Set("layers.0.self_attn.q_a_proj.weight", {24, 2 * kHidden});
  drafter.Set("layers.0.self_attn.q_a_layernorm.weight", {24});
  drafter.Set("layers.0.self_attn.q_b_proj.weight", {kHeads * 12, 24});
  drafter.Set("layers.0.self_attn.kv_a_proj_with_mqa.weight", {20, 2 * kHidden});
  drafter.Set("layers.0.self_attn.kv_a_layernorm.weight", {16});
  drafter.Set("layers.0.self_attn.kv_b_proj.weight", {kHeads * 14, 16});
  drafter.Set("layers.0.self_attn.o_proj.weight", {kHidden, kHeads * 6});
  EXPECT_SOUND(drafter.Verify());
  drafter.Set("layers.0.self_attn.kv_b_proj.weight", {kHeads * 15, 16});
  EXPECT_FAULTS(drafter.Verify(), "layers.0.self_attn.kv_b_proj.weight");
}

TEST(DrafterRulesTest, AFullVocabularyNeedsNoMaps) {
  EditableDrafter drafter;
  drafter.config["draft_vocab_size"] = kVocab;
  drafter.Set("lm_head.weight", {kVocab, kHidden});
  drafter.tensors.erase("d2t");
  drafter.tensors.erase("t2d");
  EXPECT_SOUND(drafter.Verify());
}

TEST(DrafterRulesTest, OptionalNormsFollowTheConfiguration) {
  EditableDrafter drafter;
  drafter.config["norm_before_fc"] = true;
  EXPECT_FAULTS(drafter.Verify(), "input_norm.weight");
  drafter.Set("input_norm.weight", {kTaps * kHidden});
  EXPECT_SOUND(drafter.Verify());
  drafter.config.erase("norm_before_fc");
  EXPECT_FAULTS(drafter.Verify(), "input_norm.weight");  // nobody would apply it
  drafter.tensors.erase("input_norm.weight");
  drafter.config["fc_norm"] = true;
  EXPECT_FAULTS(drafter.Verify(), "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight");
}

// The size of heads that engines take where config.json says none: 112 / 4 = 28.
TEST(DrafterRulesTest, HeadsBuiltWithHiddenByHeadsAreFound) {
  EditableDrafter drafter;
  for (const std::string part : {"q", "k", "v"}) {
    drafter.Set("midlayer.self_attn." + part + "_proj.weight", {kHidden, 2 * kHidden});
  }
  drafter.Set("midlayer.self_attn.o_proj.weight", {kHidden, kHidden});
  const RuleReport report = drafter.Verify();
  EXPECT_THAT(RowOf(report, "head_dim").found, HasSubstr("28"));
  EXPECT_EQ(RowOf(report, "head_dim").expected, "32");
  EXPECT_FAULTS(report, "head_dim", "midlayer.self_attn.q_proj.weight",
                "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight",
                "midlayer.self_attn.o_proj.weight");
  drafter.config.erase("head_dim");  // tensors and config agree, on heads that are none
  EXPECT_FAULTS(drafter.Verify(), "head_dim");
}

TEST(DrafterRulesTest, AMissingHeadDimWithRightTensorsIsAFault) {
  EditableDrafter drafter;
  drafter.config.erase("head_dim");
  const RuleReport report = drafter.Verify();
  EXPECT_EQ(RowOf(report, "head_dim").verdict, Verdict::kFault);
  EXPECT_THAT(RowOf(report, "head_dim").why, HasSubstr("112 / 4 = 28"));
}

TEST(DrafterRulesTest, ARenamedKeyIsNamedFromBothSides) {
  EditableDrafter drafter;
  drafter.Rename("midlayer.hidden_norm.weight", "midlayer.hiden_norm.weight");
  const RuleReport report = drafter.Verify();
  EXPECT_FAULTS(report, "midlayer.hidden_norm.weight", "midlayer.hiden_norm.weight");
  EXPECT_THAT(RowOf(report, "midlayer.hidden_norm.weight").why,
              HasSubstr("midlayer.hiden_norm.weight"));
  EXPECT_THAT(RowOf(report, "midlayer.hiden_norm.weight").why,
              HasSubstr("did you mean midlayer.hidden_norm.weight"));
}

TEST(DrafterRulesTest, AnUnknownKeyIsAFault) {
  EditableDrafter drafter;
  drafter.Set("verifier_lm_head.weight", {kVocab, kHidden});
  EXPECT_FAULTS(drafter.Verify(), "verifier_lm_head.weight");
}

TEST(DrafterRulesTest, AMissingKeyIsAFault) {
  EditableDrafter drafter;
  drafter.tensors.erase("norm.weight");
  EXPECT_FAULTS(drafter.Verify(), "norm.weight");
}

TEST(DrafterRulesTest, ConfigurationAgainstTensors) {
  EditableDrafter two_taps;
  two_taps.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = {2, 30};
  EXPECT_FAULTS(two_taps.Verify(), "fc.weight");

  EditableDrafter draft_vocab;
  draft_vocab.config["draft_vocab_size"] = kDraft + 1;
  EXPECT_FAULTS(draft_vocab.Verify(), "lm_head.weight", "d2t", "t2d values");

  EditableDrafter nameless;
  nameless.config.erase("draft_vocab_size");
  const std::vector<std::string> faults = RulesOf(nameless.Verify(), Verdict::kFault);
  EXPECT_THAT(faults, ::testing::Contains("config draft_vocab_size"));
  EXPECT_THAT(faults, ::testing::Contains("lm_head.weight"));

  EditableDrafter hidden;
  hidden.config["hidden_size"] = 128;
  EXPECT_GT(hidden.Verify().Count(Verdict::kFault), 5);

  EditableDrafter vocab;
  vocab.config["vocab_size"] = kVocab + 1;
  EXPECT_FAULTS(vocab.Verify(), "t2d");
}

TEST(DrafterRulesTest, ConfigurationOfAWrongKind) {
  EditableDrafter text;
  text.config["hidden_size"] = "112";
  EXPECT_FAULTS(text.Verify(), "config hidden_size");  // what depends on it cannot be judged

  EditableDrafter missing;
  missing.config.erase("num_attention_heads");
  EXPECT_FAULTS(missing.Verify(), "config num_attention_heads");

  EditableDrafter taps;
  taps.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = {2, "30", 58};
  EXPECT_FAULTS(taps.Verify(), "config eagle_config.eagle_aux_hidden_state_layer_ids");

  EditableDrafter order;
  order.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = {30, 2, 58};
  EXPECT_FAULTS(order.Verify(), "eagle_config.eagle_aux_hidden_state_layer_ids");
}

TEST(DrafterRulesTest, WrongTypesOfNumbers) {
  EditableDrafter offsets;
  offsets.Set("d2t", {kDraft}, "F32");
  EXPECT_FAULTS(offsets.Verify(), "d2t");

  EditableDrafter members;
  members.Set("t2d", {kVocab}, "BF16");
  EXPECT_FAULTS(members.Verify(), "t2d");

  EditableDrafter single;
  single.Set("fc.weight", {kHidden, kTaps * kHidden}, "F32");
  const RuleReport report = single.Verify();
  EXPECT_SOUND(report);
  EXPECT_EQ(RowOf(report, "fc.weight").verdict, Verdict::kWarning);

  EditableDrafter transposed;
  transposed.Set("fc.weight", {kTaps * kHidden, kHidden});
  EXPECT_FAULTS(transposed.Verify(), "fc.weight");
}

TEST(DrafterRulesTest, VocabularyMapsThatDisagree) {
  EditableDrafter absolute;
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < kDraft; ++i) ids.push_back(i * 5 + 1);
  absolute.SetOffsets(ids);
  EXPECT_FAULTS(absolute.Verify(), "d2t values");
  EXPECT_THAT(RowOf(absolute.Verify(), "d2t values").why, HasSubstr("target ids themselves"));

  EditableDrafter falling;
  falling.SetOffsets({0, 0, -1, 0, 0, 0, 0, 0, 0, 0});
  EXPECT_EQ(RowOf(falling.Verify(), "d2t values").found, "d2t[2] = -1");

  EditableDrafter huge;
  huge.SetOffsets({0, 0, 0, 0, 0, 0, 0, 0, 0, INT64_MAX});
  EXPECT_FAULTS(huge.Verify(), "d2t values");

  EditableDrafter others;
  std::swap(others.tensors["t2d"].bytes[1], others.tensors["t2d"].bytes[2]);
  EXPECT_FAULTS(others.Verify(), "d2t and t2d");

  EditableDrafter odd;
  odd.tensors["t2d"].bytes[1] = 7;
  EXPECT_FAULTS(odd.Verify(), "t2d values");
}

TEST(DrafterRulesTest, ACutFileIsAFaultAndItsTensorsAreMissing) {
  const EditableDrafter drafter;
  const TempDir folder;
  EXPECT_OK(WriteFileAtomically(folder / "config.json", drafter.config.dump()));
  EditableCheckpoint::WriteShard(folder / "model.safetensors", drafter.tensors);
  std::filesystem::resize_file(folder / "model.safetensors",
                               std::filesystem::file_size(folder / "model.safetensors") - 1);
  ASSERT_OK_AND_ASSIGN(const RuleReport report, VerifyDrafter(folder.path(), {}));
  EXPECT_EQ(RowOf(report, "model.safetensors").verdict, Verdict::kFault);
  EXPECT_EQ(RowOf(report, "fc.weight").found, "missing");
}

TEST(DrafterRulesTest, ATensorInTwoFilesIsAFault) {
  const EditableDrafter drafter;
  const TempDir folder;
  EXPECT_OK(WriteFileAtomically(folder / "config.json", drafter.config.dump()));
  EditableCheckpoint::WriteShard(folder / "a.safetensors", drafter.tensors);
  EditableCheckpoint::WriteShard(folder / "b.safetensors",
                                 {{"norm.weight", drafter.tensors.at("norm.weight")}});
  ASSERT_OK_AND_ASSIGN(const RuleReport report, VerifyDrafter(folder.path(), {}));
  EXPECT_FAULTS(report, "norm.weight");
}

TEST(DrafterRulesTest, FoldersWithoutFilesAreErrors) {
  const TempDir folder;
  EXPECT_EQ(VerifyDrafter(folder.path(), {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_OK(WriteFileAtomically(folder / "config.json", "{}"));
  EXPECT_EQ(VerifyDrafter(folder.path(), {}).status().code(), absl::StatusCode::kNotFound);
  EditableCheckpoint::WriteShard(folder / "model.safetensors", {});
  EXPECT_OK(WriteFileAtomically(folder / "config.json", "[1]"));
  ASSERT_OK_AND_ASSIGN(const RuleReport report, VerifyDrafter(folder.path(), {}));
  EXPECT_FAULTS(report, "config.json");
}

TEST(DrafterRulesTest, AgainstATarget) {
  const EditableDrafter drafter;
  DrafterTarget target{.name = "job pilot",
                       .hidden = kHidden,
                       .layers = 61,
                       .vocab = kVocab,
                       .boundaries = {2, 30, 58, 61}};
  EXPECT_SOUND(drafter.Verify({.against = target, .engine = {}}));
  target.boundaries = {3, 31, 59, 61};  // the same ids, read as outputs of layers
  const RuleReport shifted = drafter.Verify({.against = target, .engine = {}});
  EXPECT_SOUND(shifted);
  EXPECT_EQ(RowOf(shifted, "target's boundaries").verdict, Verdict::kWarning);
  target = {.name = "job other", .hidden = 128, .layers = 40, .vocab = 60, .boundaries = {2, 20}};
  EXPECT_FAULTS(drafter.Verify({.against = target, .engine = {}}), "target's hidden",
                "target's vocabulary", "target's layers", "target's boundaries");
}

TEST(DrafterRulesTest, EnginesSayWhatTheyWouldDo) {
  const EditableDrafter layers("layers.0.");
  EXPECT_FAULTS(layers.Verify({.against = {}, .engine = DrafterEngine::kSglang}), "for sglang");
  EXPECT_SOUND(layers.Verify({.against = {}, .engine = DrafterEngine::kVllm}));
  const EditableDrafter midlayer;
  EXPECT_SOUND(midlayer.Verify({.against = {}, .engine = DrafterEngine::kSglang}));
  EXPECT_SOUND(midlayer.Verify({.against = {}, .engine = DrafterEngine::kSpeculators}));
}

}  // namespace
}  // namespace statetap::testing
