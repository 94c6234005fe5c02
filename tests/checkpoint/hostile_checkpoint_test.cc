// Damaged and hostile files: an error in bounded time and memory, never a crash. What happens is
// left to the sanitizers; the tests below look at what the readers return.
#include <random>

#include "extractor/base/json.h"
#include "extractor/checkpoint/safetensors_json.h"
#include "tests/checkpoint/editable_checkpoint.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
using testing::EditableCheckpoint;
using testing::StatusIs;
using testing::TempDir;

// Without syncing: these tests write thousands of files.
void WritePlain(const fs::path& path, const std::string& content) {
  const auto file = File::Create(path);
  ASSERT_OK(file);
  ASSERT_OK(file->WriteAt(0, std::as_bytes(std::span(content))));
}

// Every tensor lies inside the data, whatever the header says.
bool IsSane(const std::vector<SafetensorsEntry>& entries, int64_t offset, int64_t data_bytes) {
  for (const SafetensorsEntry& entry : entries) {
    if (entry.offset < offset || entry.size_bytes < 0) return false;
    if (entry.offset + entry.size_bytes > offset + data_bytes) return false;
  }
  return true;
}

// Header and data of three small tensors.
struct SmallFile {
  SmallFile() {
    std::vector<SafetensorsEntry> entries = {{.name = "a", .dtype = "F32", .shape = {2, 2}},
                                             {.name = "bb", .dtype = "BF16", .shape = {3}},
                                             {.name = "c", .dtype = "U8", .shape = {}}};
    bytes = MakeSafetensorsHeader(entries);
    json = bytes.substr(8);
    bytes.append(data_bytes, 'x');
  }
  static constexpr int64_t data_bytes = 16 + 6 + 1;
  std::string bytes, json;
};

TEST(HostileSafetensorsTest, EveryTruncationIsAnError) {
  const SmallFile file;
  const TempDir folder;
  for (size_t size = 0; size < file.bytes.size(); ++size) {
    WritePlain(folder / "x", file.bytes.substr(0, size));
    ASSERT_FALSE(ReadSafetensorsHeader(folder / "x").ok()) << size;
  }
  for (size_t size = 0; size < file.json.find_last_not_of(' ') + 1; ++size) {
    ASSERT_FALSE(ParseSafetensorsHeader(file.json.substr(0, size), 0, SmallFile::data_bytes).ok())
        << size;
  }
  WritePlain(folder / "x", file.bytes);
  EXPECT_OK(ReadSafetensorsHeader(folder / "x"));
}

TEST(HostileSafetensorsTest, FlippedBitsNeverLeadOutOfTheFile) {
  const SmallFile file;
  std::mt19937 random(28);
  int accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string json = file.json;
    for (uint32_t flips = 1 + random() % 4; flips > 0; --flips) {
      json[random() % json.size()] ^= static_cast<char>(1u << random() % 8);
    }
    const auto entries = ParseSafetensorsHeader(json, 100, SmallFile::data_bytes);
    if (!entries.ok()) continue;
    ++accepted;
    ASSERT_TRUE(IsSane(*entries, 100, SmallFile::data_bytes)) << json;
  }
  // A flip inside a name changes nothing that counts.
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, 10'000);
}

// Pieces of headers joined at random: reaches states that flips do not.
TEST(HostileSafetensorsTest, RandomPiecesOfHeaders) {
  constexpr std::string_view kPieces[] = {"{",
                                          "}",
                                          "[",
                                          "]",
                                          ",",
                                          ":",
                                          "\"a\"",
                                          "\"b\"",
                                          "\"dtype\"",
                                          "\"shape\"",
                                          "\"data_offsets\"",
                                          "\"__metadata__\"",
                                          "\"F32\"",
                                          "0",
                                          "1",
                                          "23",
                                          "9223372036854775807",
                                          "18446744073709551615",
                                          "-1",
                                          "1e999",
                                          "null",
                                          "true",
                                          "\"\\ud800\""};
  std::mt19937 random(29);
  const SmallFile file;
  for (int round = 0; round < 20'000; ++round) {
    // A whole header with a piece put over or into it.
    std::string json = file.json;
    for (uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
      const std::string_view piece = kPieces[random() % std::size(kPieces)];
      const size_t at = random() % json.size();
      json.replace(at, random() % 2 == 0 ? 0 : random() % 24, piece);
    }
    const auto entries = ParseSafetensorsHeader(json, 8, SmallFile::data_bytes);
    if (!entries.ok()) continue;
    ASSERT_TRUE(IsSane(*entries, 8, SmallFile::data_bytes)) << json;
  }
}

TEST(HostileSafetensorsTest, DeepAndWideHeadersAreRefusedAtOnce) {
  const auto parse = [](const std::string& json) { return ParseSafetensorsHeader(json, 0, 0); };
  EXPECT_FALSE(parse(std::string(1'000'000, '{')).ok());
  EXPECT_FALSE(parse("{\"a\":" + std::string(1'000'000, '[')).ok());
  EXPECT_FALSE(parse("{\"" + std::string(10'000'000, 'a') + "\":{}}").ok());
  std::string many_dims = R"({"a":{"dtype":"U8","data_offsets":[0,0],"shape":[0)";
  for (int i = 0; i < 1'000'000; ++i) many_dims += ",0";
  EXPECT_THAT(parse(many_dims + "]}}"),
              StatusIs(absl::StatusCode::kInvalidArgument, "17th dimension"));
  // As many tensors as a large header holds: read in time that grows with its size.
  std::string many = "{";
  for (int i = 0; i < 200'000; ++i) {
    many += fmt::format(R"("{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}},)", i);
  }
  many.back() = '}';
  ASSERT_OK_AND_ASSIGN(const auto entries, parse(many));
  EXPECT_EQ(entries.size(), 200'000u);
}

TEST(HostileWeightMapTest, FlipsAndTruncations) {
  const std::string json =
      R"({"metadata":{"total_size":7,"x":[1,{"y":null}]},"weight_map":{"a":"f","b":"g"},"z":2.5})";
  ASSERT_OK_AND_ASSIGN(const IndexJson index, ParseIndexJson(json));
  ASSERT_EQ(index.weight_map.size(), 2u);
  EXPECT_EQ(index.total_size, 7);
  EXPECT_EQ(index.weight_map[1], (std::pair<std::string, std::string>("b", "g")));
  for (size_t size = 0; size < json.size(); ++size) {
    ASSERT_FALSE(ParseIndexJson(json.substr(0, size)).ok()) << size;
  }
  std::mt19937 random(30);
  for (int round = 0; round < 20'000; ++round) {
    std::string damaged = json;
    for (uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
      damaged[random() % damaged.size()] ^= static_cast<char>(1u << random() % 8);
    }
    const auto parsed = ParseIndexJson(damaged);
    if (!parsed.ok()) continue;
    ASSERT_LE(parsed->weight_map.size(), 3u);
  }
  for (const char* bad : {"{}", "[]", "3", "null", R"({"weight_map":3})", R"({"weight_map":[]})",
                          R"({"weight_map":{"a":3}})", R"({"weight_map":{"a":{}}})",
                          R"({"weight_map":{},"weight_map":{}})"}) {
    EXPECT_FALSE(ParseIndexJson(bad).ok()) << bad;
  }
  EXPECT_FALSE(ParseIndexJson("{\"x\":" + std::string(1'000'000, '[')).ok());
}

class HostileFolderTest : public ::testing::Test {
 protected:
  HostileFolderTest() {
    checkpoint_.config["text_config"]["n_routed_experts"] = 4;
    for (int expert = 4; expert < 16; ++expert) {
      std::erase_if(checkpoint_.tensors, [&](const auto& item) {
        return item.first.find(fmt::format(".experts.{}.", expert)) != std::string::npos;
      });
    }
    for (const char* name : {"gate.weight", "gate.e_score_correction_bias"}) {
      auto& tensor = checkpoint_.tensors[fmt::format("language_model.model.layers.1.mlp.{}", name)];
      tensor.bytes.resize(tensor.bytes.size() / 4);
      tensor.shape[0] = 4;
    }
    checkpoint_.Write(folder_, 2);
  }

  // Flips bits in the first `within` bytes of a file and opens, again and again.
  void FlipAndOpen(const std::string& name, size_t within, int rounds) {
    const std::string original = *ReadWholeFile(folder_ / name);
    within = std::min(within, original.size());
    std::mt19937 random(31);
    int refused = 0;
    for (int round = 0; round < rounds; ++round) {
      std::string damaged = original;
      for (uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
        damaged[random() % within] ^= static_cast<char>(1u << random() % 8);
      }
      WritePlain(folder_ / name, damaged);
      const auto index = CheckpointIndex::Open(folder_);
      if (index.ok()) {
        ASSERT_EQ(index->config().hidden, 128);
      } else {
        ASSERT_FALSE(MessageOf(index.status()).empty());
        ++refused;
      }
    }
    WritePlain(folder_ / name, original);
    EXPECT_OK(CheckpointIndex::Open(folder_));
    EXPECT_GT(refused, rounds / 10) << name;
  }

  EditableCheckpoint checkpoint_;
  TempDir temp_;
  const fs::path folder_ = temp_ / "model";
};

TEST_F(HostileFolderTest, FlippedHeader) { FlipAndOpen("0.safetensors", 6000, 300); }
TEST_F(HostileFolderTest, FlippedIndex) {
  FlipAndOpen("model.safetensors.index.json", 1 << 20, 300);
}
TEST_F(HostileFolderTest, FlippedConfig) { FlipAndOpen("config.json", 1 << 20, 300); }

TEST(HostileConfigTest, FlipsAndTruncations) {
  const std::string config = MakeConfig({})->dump();
  const auto parse = [](const std::string& text) -> absl::StatusOr<ModelConfig> {
    STATETAP_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
    return ParseModelConfig(json);
  };
  for (size_t size = 0; size < config.size(); ++size) {
    ASSERT_FALSE(parse(config.substr(0, size)).ok()) << size;
  }
  std::mt19937 random(32);
  for (int round = 0; round < 10'000; ++round) {
    std::string damaged = config;
    for (uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
      damaged[random() % damaged.size()] ^= static_cast<char>(1u << random() % 8);
    }
    const auto parsed = parse(damaged);
    if (!parsed.ok()) continue;
    ASSERT_GE(parsed->hidden, 1);
    ASSERT_LE(parsed->hidden, 1 << 17);
    ASSERT_LE(parsed->top_k, parsed->num_experts);
  }
}

// The largest model that the bounds let through is refused for its missing tensors, soon.
TEST_F(HostileFolderTest, AHugeConfigurationCostsNothing) {
  Json& text = checkpoint_.config["text_config"];
  text["num_hidden_layers"] = 1024;
  text["n_routed_experts"] = 8192;
  text["vocab_size"] = 1 << 24;
  WritePlain(folder_ / "config.json", checkpoint_.config.dump());
  EXPECT_THAT(CheckpointIndex::Open(folder_),
              StatusIs(absl::StatusCode::kInvalidArgument, "missing"));
}

}  // namespace
}  // namespace statetap
