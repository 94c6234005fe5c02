// Whole and half checkpoints, one of them Kimi-K2.5's true layout as files without content.
#include "extractor/checkpoint/base_rules.h"

#include <gmock/gmock.h>

#include "extractor/base/digest.h"
#include "extractor/checkpoint/tensor_inventory.h"
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

// 64 files with the real headers and no content; the totals are those of the published checkpoint.
TEST(BaseRulesTest, TheTrueLayoutOfKimiK25) {
  const TempDir folder;
  const Json config = *MakeConfig({.preset = "kimi-k2.5"});
  EXPECT_OK(WriteFileAtomically(folder / "config.json", config.dump()));
  ASSERT_OK_AND_ASSIGN(const ModelConfig model, ParseModelConfig(config));
  std::vector<std::vector<SafetensorsEntry>> files(62);
  Json weight_map = Json::object();
  const auto file_name = [](size_t i) {
    return fmt::format("model-{:05}-of-000064.safetensors", i + 1);
  };
  ForEachTensor(model, /*quantized=*/true, [&](const ExpectedTensor& expected) {
    const int layer = LayerOf(expected.name);
    const size_t file = layer < 0 ? 61 : static_cast<size_t>(layer);
    const std::string_view dtype =
        expected.kind == TensorKind::kRouterBias                                      ? "F32"
        : expected.kind == TensorKind::kPacked || expected.kind == TensorKind::kShape ? "I32"
                                                                                      : "BF16";
    files[file].push_back({.name = "language_model." + expected.name,
                           .dtype = std::string(dtype),
                           .shape = expected.shape});
    return true;
  });
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

  ASSERT_OK_AND_ASSIGN(const RuleReport report, VerifyCheckpoint(folder.path(), {}));
  EXPECT_THAT(FaultsOf(report), ::testing::IsEmpty());
  EXPECT_EQ(RowOf(report, "text model").found, "208215 tensors");
  EXPECT_EQ(RowOf(report, "text model").why,
            "594205904896 bytes, 1026408232448 parameters, routed experts INT4");
  EXPECT_THAT(
      RowOf(report, "model.layers.{1..60}.mlp.experts.{0..383}.down_proj.weight_packed").found,
      HasSubstr("23040 × int32 [7168, 256]"));
}

}  // namespace
}  // namespace statetap::testing
