// Whole and half checkpoints, one of them Kimi-K2.5's true layout as files without content.
#include "extractor/checkpoint/base_rules.h"

#include <gmock/gmock.h>

#include "extractor/base/digest.h"
#include "extractor/checkpoint/tensor_inventory.h"
#include "extractor/checkpoint/vision_inventory.h"
#include "tests/checkpoint/editable_checkpoint.h"
#include "tests/checkpoint/report_rows.h"

namespace statetap::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

std::vector<std::string> FaultsOf(const RuleReport& report) {
  return RulesOf(report, Verdict::kFault);
}

RuleReport Verify(const EditableCheckpoint& checkpoint, const BaseCheck& check = {}) {
  const TempDir folder;
  checkpoint.Write(folder / "model", /*num_files=*/3);
  auto report = VerifyCheckpoint(folder / "model", check);
  EXPECT_OK(report.status());
  return report.ok() ? *std::move(report) : RuleReport();
}

TEST(BaseRulesTest, AWholeCheckpointHolds) {
  const RuleReport report = Verify(EditableCheckpoint(), {.deep = true});
  EXPECT_THAT(FaultsOf(report), ::testing::IsEmpty());
  EXPECT_EQ(RowOf(report, "files").found, "3 of 3 whole");
  EXPECT_THAT(RowOf(report, "model.layers.1.mlp.experts.{0..15}.up_proj.weight_packed").found,
              HasSubstr("16 × int32"));
  EXPECT_EQ(RowOf(report, "weight_shape values").verdict, Verdict::kOk);
  EXPECT_THAT(FaultsOf(Verify(EditableCheckpoint({.flat = true}))), ::testing::IsEmpty());
}

TEST(BaseRulesTest, MissingMisshapenAndForeignTensorsAreRowsOfTheirKind) {
  EditableCheckpoint checkpoint({.flat = true});
  const std::string lost = "model.layers.1.mlp.experts.3.up_proj.weight_scale";
  checkpoint.tensors.erase(lost);
  checkpoint.tensors["model.norm.weight"].shape = {64, 2};
  checkpoint.tensors["model.layers.1.mlp.experts.3.up_proj.weight_scales"] = {"BF16", {1}, "ab"};
  const RuleReport report = Verify(checkpoint);
  EXPECT_THAT(FaultsOf(report),
              UnorderedElementsAre("model.layers.1.mlp.experts.{0..15}.up_proj.weight_scale",
                                   "model.norm.weight",
                                   "model.layers.1.mlp.experts.3.up_proj.weight_scales"));
  EXPECT_THAT(RowOf(report, "model.layers.1.mlp.experts.{0..15}.up_proj.weight_scale").why,
              HasSubstr(lost));
  EXPECT_THAT(RowOf(report, "model.layers.1.mlp.experts.3.up_proj.weight_scales").why,
              HasSubstr("did you mean model.layers.*.mlp.experts.*.up_proj.weight_scale?"));
}

TEST(BaseRulesTest, AHeadThatIsTiedIsNotUsedAsLoadingSays) {
  EditableCheckpoint checkpoint({.flat = true});
  checkpoint.config["tie_word_embeddings"] = true;
  const RuleReport report = Verify(checkpoint);
  EXPECT_THAT(FaultsOf(report), ::testing::IsEmpty());
  EXPECT_EQ(RowOf(report, "lm_head.weight").verdict, Verdict::kWarning);
  EXPECT_THAT(RowOf(report, "lm_head.weight").why, HasSubstr("model.embed_tokens.weight"));
  const TempDir folder;
  checkpoint.Write(folder / "model");
  EXPECT_OK(CheckpointIndex::Open(folder / "model").status());
}

TEST(BaseRulesTest, AHalfDownloadedFolderNamesItsFiles) {
  const TempDir folder;
  EditableCheckpoint().Write(folder / "model", 3);
  std::filesystem::remove(folder / "model" / EditableCheckpoint::ShardName(1));
  std::filesystem::resize_file(folder / "model" / EditableCheckpoint::ShardName(2), 100);
  ASSERT_OK_AND_ASSIGN(const RuleReport report, VerifyCheckpoint(folder / "model", {}));
  EXPECT_EQ(RowOf(report, "files").found, "1 of 3 whole");
  EXPECT_THAT(RowOf(report, "files").why, HasSubstr("1.safetensors"));
  EXPECT_THAT(RowOf(report, "2.safetensors").why, HasSubstr("cut short"));
  EXPECT_EQ(RowOf(report, "index").verdict, Verdict::kFault);
}

TEST(BaseRulesTest, DeepReadsFindValuesThatAreNotFinite) {
  EditableCheckpoint checkpoint;
  const std::string norm = "language_model.model.norm.weight";
  checkpoint.tensors[norm].bytes.replace(2, 2, "\x80\x7f");  // +inf
  checkpoint.tensors["language_model.model.layers.1.mlp.experts.2.down_proj.weight_shape"]
      .bytes[0] ^= 1;
  const RuleReport report = Verify(checkpoint, {.deep = true});
  EXPECT_THAT(FaultsOf(report), UnorderedElementsAre("weights and scales", "weight_shape values"));
  EXPECT_EQ(RowOf(report, "weights and scales").found, "1 of model.norm.weight");
}

TEST(BaseRulesTest, DigestsAreTheNamesOfACachesBlobs) {
  const TempDir cache;
  const std::filesystem::path snapshot = cache / "models--a--b/snapshots/c0ffee";
  const std::filesystem::path blobs = cache / "models--a--b/blobs";
  std::filesystem::create_directories(blobs);
  EditableCheckpoint().Write(snapshot);
  const std::string content = *ReadWholeFile(snapshot / "model.safetensors");
  const std::string digest = Sha256Hex(content);
  std::filesystem::remove(snapshot / "model.safetensors");
  EXPECT_OK(WriteFileAtomically(blobs / digest, content));
  std::filesystem::create_symlink("../../blobs/" + digest, snapshot / "model.safetensors");
  ASSERT_OK_AND_ASSIGN(const RuleReport right, VerifyCheckpoint(snapshot, {.digests = true}));
  EXPECT_THAT(FaultsOf(right), ::testing::IsEmpty());
  EXPECT_EQ(RowOf(right, "SHA-256").found, "1 files right");
  std::string damaged = content;
  damaged.back() ^= 1;
  EXPECT_OK(WriteFileAtomically(blobs / digest, damaged));
  ASSERT_OK_AND_ASSIGN(const RuleReport wrong, VerifyCheckpoint(snapshot, {.digests = true}));
  EXPECT_THAT(FaultsOf(wrong), UnorderedElementsAre("SHA-256"));
}

TEST(BaseRulesTest, AConfigurationOfAnotherFamilyIsARow) {
  EditableCheckpoint checkpoint({.flat = true});
  checkpoint.config["hidden_act"] = "gelu";
  EXPECT_THAT(FaultsOf(Verify(checkpoint)), UnorderedElementsAre("config.json"));
}

Json VisionConfigOfKimiK25() {
  return {{"patch_size", 14},
          {"vt_hidden_size", 1152},
          {"vt_num_hidden_layers", 27},
          {"vt_num_attention_heads", 16},
          {"vt_intermediate_size", 4304},
          {"merge_kernel_size", {2, 2}},
          {"init_pos_emb_height", 64},
          {"init_pos_emb_width", 64},
          {"text_hidden_size", 7168}};
}

// Files with the real headers and no content: a layer a file, then what is in no layer, and with
// `vision` projector and encoder in two more. `stored` gives a text tensor's name in the files.
void WriteTrueLayout(const std::filesystem::path& folder, const Json& config, bool vision,
                     const std::function<std::string(const std::string&)>& stored) {
  EXPECT_OK(WriteFileAtomically(folder / "config.json", config.dump()));
  const ModelConfig model = *ParseModelConfig(config);
  std::vector<std::vector<SafetensorsEntry>> files(vision ? 64 : 62);
  const auto file_name = [&](size_t i) {
    return fmt::format("model-{:05}-of-{:06}.safetensors", i + 1, files.size());
  };
  ForEachTensor(model, /*quantized=*/true, [&](const ExpectedTensor& expected) {
    const int layer = LayerOf(expected.name);
    const size_t file = layer < 0 ? 61 : static_cast<size_t>(layer);
    const std::string_view dtype =
        expected.kind == TensorKind::kRouterBias                                      ? "F32"
        : expected.kind == TensorKind::kPacked || expected.kind == TensorKind::kShape ? "I32"
                                                                                      : "BF16";
    files[file].push_back(
        {.name = stored(expected.name), .dtype = std::string(dtype), .shape = expected.shape});
    return true;
  });
  if (vision) {
    ForEachVisionTensor(*VisionSizesOf(config), [&](const ExpectedTensor& expected) {
      files[expected.name.starts_with("mm_projector.") ? 62 : 63].push_back(
          {.name = expected.name, .dtype = "BF16", .shape = expected.shape});
    });
  }
  std::string index = R"({"weight_map":{)";
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string header = MakeSafetensorsHeader(files[i]);
    EXPECT_OK(WriteFileAtomically(folder / file_name(i), header));
    const SafetensorsEntry& last = files[i].back();
    std::filesystem::resize_file(folder / file_name(i),
                                 static_cast<uintmax_t>(last.offset + last.size_bytes));
    for (const SafetensorsEntry& entry : files[i]) {
      index += fmt::format("\"{}\":\"{}\",", entry.name, file_name(i));
    }
  }
  index.back() = '}';
  EXPECT_OK(WriteFileAtomically(folder / "model.safetensors.index.json", index + "}"));
}

// The totals are those of the published checkpoint.
TEST(BaseRulesTest, TheTrueLayoutOfKimiK25) {
  const TempDir folder;
  Json config = *MakeConfig({.preset = "kimi-k2.5"});
  config["vision_config"] = VisionConfigOfKimiK25();
  WriteTrueLayout(folder.path(), config, /*vision=*/true,
                  [](const std::string& name) { return "language_model." + name; });
  ASSERT_OK_AND_ASSIGN(const RuleReport report, VerifyCheckpoint(folder.path(), {}));
  EXPECT_THAT(FaultsOf(report), ::testing::IsEmpty());
  EXPECT_EQ(report.Count(Verdict::kWarning), 0);
  EXPECT_EQ(RowOf(report, "files").found, "64 of 64 whole");
  EXPECT_EQ(RowOf(report, "files").why, "595148192736 bytes of tensors");
  EXPECT_EQ(RowOf(report, "index").found, "208550 tensors");
  EXPECT_EQ(RowOf(report, "text model").found, "208215 tensors");
  EXPECT_EQ(RowOf(report, "text model").why,
            "594205904896 bytes, 1026408232448 parameters, routed experts INT4");
  EXPECT_EQ(RowOf(report, "vision model").found, "335 tensors");
  EXPECT_EQ(RowOf(report, "vision model").why,
            "942287840 bytes, 471143920 parameters, not used");  // 833,732,064 + 108,555,776 bytes
  EXPECT_THAT(
      RowOf(report, "model.layers.{1..60}.mlp.experts.{0..383}.down_proj.weight_packed").found,
      HasSubstr("23040 × int32 [7168, 256]"));
}

TEST(BaseRulesTest, TheLayoutOfK2ThinkingAndOfReExports) {
  const Json flat = *MakeConfig({.preset = "kimi-k2.5", .flat = true});
  const auto expect_whole = [&](const std::function<std::string(const std::string&)>& stored) {
    const TempDir folder;
    WriteTrueLayout(folder.path(), flat, /*vision=*/false, stored);
    ASSERT_OK_AND_ASSIGN(const RuleReport report, VerifyCheckpoint(folder.path(), {}));
    EXPECT_THAT(FaultsOf(report), ::testing::IsEmpty());
    EXPECT_EQ(RowOf(report, "files").found, "62 of 62 whole");
    EXPECT_EQ(RowOf(report, "text model").found, "208215 tensors");
  };
  expect_whole([](const std::string& name) { return name; });
  expect_whole([](const std::string& name) {
    return "language_model." + (name.starts_with("model.") ? name.substr(6) : name);
  });
}

// The text model runs without it: exit 0, and said all the same.
TEST(BaseRulesTest, VisionTensorsThatDepartAreWarnings) {
  EditableCheckpoint checkpoint;
  checkpoint.config["vision_config"] = VisionConfigOfKimiK25();
  std::erase_if(checkpoint.tensors, [](const auto& named) { return IsVisionTensor(named.first); });
  EXPECT_EQ(Verify(checkpoint).Count(Verdict::kWarning), 0) << "a text model of its own";
  const std::string bytes(2 * 7168, '\0');
  checkpoint.tensors["mm_projector.proj.2.bias"] = {"BF16", {7168}, bytes};
  checkpoint.tensors["mm_projector.proj.0.bias"] = {"BF16", {7168}, bytes};
  const RuleReport report = Verify(checkpoint);
  EXPECT_THAT(FaultsOf(report), ::testing::IsEmpty());
  EXPECT_EQ(RowOf(report, "vision_tower.encoder.blocks.{0..26}.wo.weight").verdict,
            Verdict::kWarning);
  EXPECT_EQ(RowOf(report, "vision model").found, "2 tensors");
  EXPECT_THAT(RowOf(report, "mm_projector.proj.0.bias").why, HasSubstr("is bfloat16 [7168]"));
}

}  // namespace
}  // namespace statetap::testing
