#include "extractor/checkpoint/checkpoint_index.h"

#include <cstring>

#include "extractor/base/json.h"
#include "extractor/checkpoint/tensor_inventory.h"
#include "tests/checkpoint/editable_checkpoint.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
using testing::EditableCheckpoint;
using ::testing::ElementsAre;
using testing::StatusIs;
using testing::StoredTensor;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

const fs::path kTinyKimi = STATETAP_SOURCE_DIR "/models/tiny-kimi";
constexpr const char* kExpert = "language_model.model.layers.1.mlp.experts.3.";

// The checkpoint with every tensor renamed by `rename`.
template <typename Rename>
EditableCheckpoint Renamed(const EditableCheckpoint& from, Rename rename) {
  EditableCheckpoint to = from;
  to.tensors.clear();
  for (const auto& [name, tensor] : from.tensors) to.tensors[rename(name)] = tensor;
  return to;
}

StoredTensor Bf16(std::vector<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  return {"BF16", std::move(shape), std::string(static_cast<size_t>(count) * 2, '\0')};
}

TEST(CheckpointIndexTest, ReadsTheEmbeddedModel) {
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(kTinyKimi));
  EXPECT_EQ(index.name(), "tiny-kimi");
  EXPECT_TRUE(index.quantized());
  EXPECT_EQ(index.config().num_layers, 8);
  EXPECT_EQ(index.config().q_lora_rank, 96);
  EXPECT_TRUE(index.config().rope.yarn);
  EXPECT_EQ(index.files().size(), 3u);
  EXPECT_THAT(index.stop_ids(), ElementsAre(2049, 2050));
  EXPECT_EQ(index.digest().size(), 64u);
  // The index file's total_size less the two vision tensors of 16 bf16 each.
  EXPECT_EQ(index.total_bytes(), 11179904 - 2 * 16 * 2);

  const TensorInfo* packed = index.Find("model.layers.7.mlp.experts.15.down_proj.weight_packed");
  ASSERT_NE(packed, nullptr);
  EXPECT_EQ(packed->dtype, DType::kI32);
  EXPECT_THAT(packed->shape, ElementsAre(128, 32));
  EXPECT_EQ(packed->size_bytes, 128 * 32 * 4);
  EXPECT_EQ(index.Find("language_model.lm_head.weight"), nullptr);
  EXPECT_EQ(index.Find("vision_tower.encoder.final_layernorm.weight"), nullptr);
}

// Counts, bytes and parameters of the real text model, from its published totals.
TEST(TensorInventoryTest, KimiK25HasTheTensorsItHas) {
  ASSERT_OK_AND_ASSIGN(const ModelConfig config,
                       ParseModelConfig(*MakeConfig({.preset = "kimi-k2.5"})));
  int64_t tensors = 0, bytes = 0, parameters = 0;
  ForEachTensor(config, /*quantized=*/true, [&](const ExpectedTensor& tensor) {
    int64_t elements = 1;
    for (const int64_t dim : tensor.shape) elements *= dim;
    ++tensors;
    switch (tensor.kind) {
      case TensorKind::kWeight:
        bytes += elements * 2;
        parameters += elements;
        break;
      case TensorKind::kRouterBias:
        bytes += elements * 4;
        parameters += elements;
        break;
      case TensorKind::kPacked:
        bytes += elements * 4;
        parameters += elements * 8;
        break;
      case TensorKind::kScale: bytes += elements * 2; break;
      case TensorKind::kShape: bytes += elements * 4; break;
    }
    return true;
  });
  EXPECT_EQ(tensors, 208'215);
  EXPECT_EQ(bytes, 594'205'904'896);
  EXPECT_EQ(parameters, 1'026'408'232'448);
}

TEST(CheckpointIndexTest, PrefixesAndShardsAreOneCheckpoint) {
  const EditableCheckpoint nested;
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex one, nested.Open());
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex sharded, nested.Open(/*num_files=*/5));
  EXPECT_EQ(sharded.files().size(), 5u);
  const auto without_prefix = [](std::string name) {
    return name.starts_with("language_model.") ? name.substr(15) : name;
  };
  const auto without_inner = [](std::string name) {
    constexpr std::string_view kBoth = "language_model.model.";
    return name.starts_with(kBoth) ? "language_model." + name.substr(kBoth.size()) : name;
  };
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex bare, Renamed(nested, without_prefix).Open());
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex inner, Renamed(nested, without_inner).Open());
  for (const CheckpointIndex* index : {&sharded, &bare, &inner}) {
    EXPECT_EQ(index->digest(), one.digest());
    EXPECT_EQ(index->total_bytes(), one.total_bytes());
    EXPECT_NE(index->Find("model.layers.0.input_layernorm.weight"), nullptr);
  }
  EXPECT_EQ(one.parameters(), EditableCheckpoint({.int4_experts = false}).Open()->parameters());
}

TEST(CheckpointIndexTest, SkipsWhatATextModelDoesNotUse) {
  EditableCheckpoint checkpoint;
  const std::string digest = checkpoint.Open()->digest();
  checkpoint.tensors["vision_tower.blocks.0.wqkv.bias"] = {"U16", {1}, "xx"};
  checkpoint.tensors["mm_projector.proj.0.bias"] = Bf16({4});
  checkpoint.tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = Bf16({4});
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, checkpoint.Open());
  EXPECT_EQ(index.digest(), digest);
}

TEST(CheckpointIndexTest, SkipsPredictionLayersThatTheConfigNames) {
  EditableCheckpoint checkpoint;
  const std::string digest = checkpoint.Open()->digest();
  checkpoint.tensors["language_model.model.layers.2.eh_proj.weight"] = Bf16({128, 256});
  EXPECT_THAT(checkpoint.Open(),
              StatusIs(kInvalid, "not called for by config.json: model.layers.2.eh_proj.weight"));
  checkpoint.config["text_config"]["num_nextn_predict_layers"] = 1;
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, checkpoint.Open());
  EXPECT_EQ(index.digest(), digest);
}

TEST(CheckpointIndexTest, ReadsTheWholeFamily) {
  const auto open = [](MakeOptions options) { return EditableCheckpoint(options).Open(); };
  EXPECT_NE(open({.query_lora = false})->Find("model.layers.1.self_attn.q_proj.weight"), nullptr);
  EXPECT_FALSE(open({.int4_experts = false})->quantized());
  EXPECT_TRUE(open({.flat = true})->quantized());
  EXPECT_FALSE(open({.yarn = false})->config().rope.yarn);
  EXPECT_EQ(open({.tied_embeddings = true})->Find("lm_head.weight"), nullptr);
  EXPECT_TRUE(open({.dense_layers = 2})->tensors().size() < 50);
  EXPECT_THAT(
      open({.shared_experts = 2})->Find("model.layers.1.mlp.shared_experts.up_proj.weight")->shape,
      ElementsAre(512, 128));
  EXPECT_EQ(open({.shared_experts = 0})->Find("model.layers.1.mlp.shared_experts.up_proj.weight"),
            nullptr);
  EXPECT_EQ(open({.groups = 4, .top_groups = 2})->config().num_groups, 4);
  EXPECT_OK(open({.scale_dtype = DType::kF16, .shape_dtype = DType::kI64}));
  EXPECT_OK(open({.scale_dtype = DType::kF32}));
}

TEST(CheckpointIndexTest, TiedEmbeddingsDropAStoredHead) {
  EditableCheckpoint checkpoint;
  checkpoint.config["tie_word_embeddings"] = true;
  checkpoint.config["text_config"]["tie_word_embeddings"] = true;
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, checkpoint.Open());
  EXPECT_EQ(index.Find("lm_head.weight"), nullptr);
}

TEST(CheckpointIndexTest, NamesTensorsThatAreMissingMisshapenOrLeftOver) {
  EditableCheckpoint checkpoint;
  checkpoint.tensors.erase("language_model.model.norm.weight");
  EXPECT_THAT(checkpoint.Open(), StatusIs(kInvalid, "missing: model.norm.weight"));

  checkpoint = EditableCheckpoint();
  checkpoint.tensors["language_model.model.norm.weight"] = Bf16({64});
  EXPECT_THAT(checkpoint.Open(),
              StatusIs(kInvalid,
                       "model.norm.weight in model.safetensors is bfloat16 [64], "
                       "expected bfloat16 [128]"));

  checkpoint = EditableCheckpoint();
  checkpoint.tensors["language_model.lm_head.weight"].dtype = "F16";
  EXPECT_THAT(checkpoint.Open(), StatusIs(kInvalid,
                                          "lm_head.weight in model.safetensors is "
                                          "float16 [1256, 128], expected bfloat16"));

  checkpoint = EditableCheckpoint();
  checkpoint.tensors["language_model.model.layers.0.self_attn.q_a_proj.bias"] = Bf16({64});
  EXPECT_THAT(checkpoint.Open(),
              StatusIs(kInvalid, "not called for by config.json: model.layers.0.self_attn.q_a"));

  // Another config than the weights': the first few by name, the rest as a count.
  checkpoint = EditableCheckpoint();
  checkpoint.config["text_config"]["num_hidden_layers"] = 1000;
  EXPECT_THAT(checkpoint.Open(), StatusIs(kInvalid, "missing: model.layers.2.input_layernorm"));
  EXPECT_THAT(checkpoint.Open(), StatusIs(kInvalid, " more"));
}

TEST(CheckpointIndexTest, ExpertsAreInt4AllOrNone) {
  EditableCheckpoint checkpoint;
  const std::string name = std::string(kExpert) + "up_proj.weight";
  for (const char* part : {"_packed", "_scale", "_shape"}) checkpoint.tensors.erase(name + part);
  checkpoint.tensors[name] = Bf16({256, 128});
  EXPECT_THAT(checkpoint.Open(), StatusIs(kInvalid, "up_proj.weight_packed"));
  EXPECT_THAT(checkpoint.Open(), StatusIs(kInvalid, "all or none"));
}

TEST(CheckpointIndexTest, ComparesTheStoredShapes) {
  for (const DType dtype : {DType::kI32, DType::kI64}) {
    EditableCheckpoint checkpoint({.shape_dtype = dtype});
    EXPECT_OK(checkpoint.Open());
    // Swapped: (in, out).
    StoredTensor& up = checkpoint.tensors[std::string(kExpert) + "up_proj.weight_shape"];
    std::swap(up.bytes, checkpoint.tensors[std::string(kExpert) + "down_proj.weight_shape"].bytes);
    EXPECT_THAT(checkpoint.Open(),
                StatusIs(kInvalid, "down_proj.weight_shape holds (256, 128), expected (128, 256)"));
  }
}

TEST(CheckpointIndexTest, Int4NeedsWholeGroups) {
  EditableCheckpoint checkpoint;
  checkpoint.config["text_config"]["moe_intermediate_size"] = 250;
  EXPECT_THAT(checkpoint.Open(), StatusIs(kInvalid, "moe_intermediate_size 250 to be multiples"));
}

TEST(CheckpointIndexTest, TwoNamesForOneTensorAreRefused) {
  EditableCheckpoint checkpoint;
  checkpoint.tensors["model.norm.weight"] = Bf16({128});
  EXPECT_THAT(checkpoint.Open(), StatusIs(kInvalid, "is a second model.norm.weight"));
}

TEST(CheckpointIndexTest, DigestSeesConfigNamesTypesAndBytes) {
  const EditableCheckpoint original;
  const std::string digest = original.Open()->digest();
  EXPECT_EQ(original.Open()->digest(), digest);
  EditableCheckpoint other = original;
  other.config["text_config"]["rms_norm_eps"] = 1e-6;
  EXPECT_NE(other.Open()->digest(), digest);
  for (const char* name :
       {"language_model.model.embed_tokens.weight", "language_model.model.layers.1.mlp.gate.weight",
        "language_model.model.layers.1.mlp.experts.15.up_proj.weight_packed"}) {
    other = original;
    other.tensors[name].bytes[0] ^= 1;
    EXPECT_NE(other.Open()->digest(), digest) << name;
    other = original;
    std::string& bytes = other.tensors[name].bytes;
    bytes[bytes.size() / 2] ^= 1;
    EXPECT_NE(other.Open()->digest(), digest) << name;
  }
  EXPECT_NE(EditableCheckpoint({.seed = 1}).Open()->digest(), digest);
  // What only people read does not count.
  other = original;
  other.config["architectures"] = {"Another"};
  other.config["text_config"]["model_type"] = "deepseek_v3";
  EXPECT_EQ(other.Open()->digest(), digest);
}

class CheckpointFolderTest : public ::testing::Test {
 protected:
  CheckpointFolderTest() { checkpoint_.Write(folder_, 3); }

  absl::StatusOr<CheckpointIndex> Open() const { return CheckpointIndex::Open(folder_); }
  Json WeightMap() const {
    return (*ParseJson(*ReadWholeFile(folder_ / "model.safetensors.index.json")))["weight_map"];
  }
  void SetWeightMap(const Json& map) { EditableCheckpoint::WriteIndex(folder_, map); }

  const EditableCheckpoint checkpoint_;
  testing::TempDir temp_;
  const fs::path folder_ = temp_ / "model";
};

constexpr const char* kNorm = "language_model.model.norm.weight";

TEST_F(CheckpointFolderTest, IndexListsATensorThatNoFileHas) {
  Json map = WeightMap();
  map["language_model.model.extra.weight"] = "1.safetensors";
  SetWeightMap(map);
  EXPECT_THAT(Open(), StatusIs(kInvalid,
                               "that the files lack: language_model.model.extra.weight "
                               "in 1.safetensors"));
}

TEST_F(CheckpointFolderTest, IndexNamesAnotherFileThanTheTensorIsIn) {
  Json map = WeightMap();
  map[kNorm] = map[kNorm] == "0.safetensors" ? "1.safetensors" : "0.safetensors";
  SetWeightMap(map);
  EXPECT_THAT(Open(), StatusIs(kInvalid, "tensor language_model.model.norm.weight is here"));
}

TEST_F(CheckpointFolderTest, IndexLacksATensor) {
  Json map = WeightMap();
  map.erase(kNorm);
  SetWeightMap(map);
  EXPECT_THAT(Open(), StatusIs(kInvalid, "norm.weight is not in model.safetensors.index.json"));
}

TEST_F(CheckpointFolderTest, TensorInTwoFiles) {
  const fs::path path = folder_ / WeightMap()[kNorm].get<std::string>();
  const std::string other = path.filename() == "0.safetensors" ? "1.safetensors" : "0.safetensors";
  std::map<std::string, StoredTensor> shard;
  const Json map = WeightMap();
  for (const auto& [name, tensor] : checkpoint_.tensors) {
    if (map[name] == other || name == kNorm) shard[name] = tensor;
  }
  EditableCheckpoint::WriteShard(folder_ / other, shard);
  EXPECT_THAT(Open(), StatusIs(kInvalid, "norm.weight is here, model.safetensors.index.json says"));
}

TEST_F(CheckpointFolderTest, IndexMustNameFilesOfItsFolder) {
  for (const char* file : {"../0.safetensors", "/etc/passwd", "", ".."}) {
    Json map = WeightMap();
    map[kNorm] = file;
    SetWeightMap(map);
    EXPECT_THAT(Open(), StatusIs(kInvalid, "a file in the same folder")) << file;
  }
}

TEST_F(CheckpointFolderTest, MissingFilesAreNamed) {
  fs::remove(folder_ / "1.safetensors");
  EXPECT_THAT(Open(), StatusIs(kNotFound, "1.safetensors is missing"));
  fs::remove(folder_ / "model.safetensors.index.json");
  EXPECT_THAT(Open(), StatusIs(kNotFound, "has neither model.safetensors.index.json nor"));
  fs::remove(folder_ / "config.json");
  EXPECT_THAT(Open(), StatusIs(kNotFound, "config.json"));
  EXPECT_THAT(CheckpointIndex::Open(folder_ / "none"), StatusIs(kNotFound, "is no folder"));
}

TEST_F(CheckpointFolderTest, FilesOfVisionTensorsAloneMayBeAbsent) {
  Json map = WeightMap();
  map["vision_tower.patch_embed.proj.weight"] = "vision.safetensors";
  SetWeightMap(map);
  EXPECT_OK(Open());
}

TEST_F(CheckpointFolderTest, CutFilesNameFileAndTensor) {
  const fs::path path = folder_ / "2.safetensors";
  const auto size = fs::file_size(path);
  const std::string last = ReadSafetensorsHeader(path)->back().name;
  fs::resize_file(path, size - 1);
  EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kOutOfRange, "2.safetensors"));
  EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kOutOfRange, last));
}

TEST_F(CheckpointFolderTest, ReadsAHuggingFaceCache) {
  const fs::path model = temp_ / "models--org--name";
  const fs::path snapshot = model / "snapshots" / "abc";
  fs::create_directories(snapshot);
  fs::create_directories(model / "blobs");
  fs::create_directories(model / "refs");
  ASSERT_OK(WriteFileAtomically(model / "refs" / "main", "abc"));
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string blob = "sha-of-" + entry.path().filename().string();
    fs::rename(entry.path(), model / "blobs" / blob);
    fs::create_symlink(fs::path("../../blobs") / blob, snapshot / entry.path().filename());
  }
  for (const fs::path& path : {model, snapshot}) {
    ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(path));
    EXPECT_EQ(index.name(), "org/name");
    EXPECT_EQ(index.folder().filename(), "abc");
    EXPECT_EQ(index.digest(), checkpoint_.Open()->digest());
  }
  // A download that was interrupted: the link is there, its blob is not.
  fs::remove(model / "blobs" / "sha-of-1.safetensors");
  EXPECT_THAT(CheckpointIndex::Open(model), StatusIs(kNotFound, "1.safetensors is missing"));
}

TEST_F(CheckpointFolderTest, StopIdsOfGenerationConfig) {
  const auto with = [&](std::string_view json) {
    EXPECT_OK(WriteFileAtomically(folder_ / "generation_config.json", json));
    return Open();
  };
  EXPECT_THAT(Open()->stop_ids(), ElementsAre(1001));
  EXPECT_THAT(with(R"({"eos_token_id":1002})")->stop_ids(), ElementsAre(1001, 1002));
  EXPECT_THAT(with(R"({"eos_token_id":[1007,1001,1002,1002]})")->stop_ids(),
              ElementsAre(1001, 1002, 1007));
  EXPECT_THAT(with(R"({"eos_token_id":null})")->stop_ids(), ElementsAre(1001));
  EXPECT_THAT(with(R"({"eos_token_id":1256})"), StatusIs(kInvalid, "0 to 1255"));
  EXPECT_THAT(with(R"({"eos_token_id":[-1]})"), StatusIs(kInvalid, "eos_token_id holds -1"));
  EXPECT_THAT(with(R"({"eos_token_id":"x"})"), StatusIs(kInvalid, "eos_token_id"));
  EXPECT_THAT(with("{"), StatusIs(kInvalid, "generation_config.json"));
}

}  // namespace
}  // namespace statetap
