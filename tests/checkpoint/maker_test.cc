#include "extractor/checkpoint/maker.h"

#include <sys/stat.h>

#include <cmath>
#include <set>

#include "extractor/checkpoint/int4.h"
#include "extractor/checkpoint/random_tensor.h"
#include "extractor/checkpoint/tensor_inventory.h"
#include "tests/checkpoint/editable_checkpoint.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
using testing::EditableCheckpoint;
using testing::StatusIs;
using testing::TempDir;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// All files of a folder by name.
std::map<std::string, std::string> Files(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename()] = *ReadWholeFile(entry.path());
  }
  return files;
}

TEST(MakerTest, WhatItMakesOpens) {
  const TempDir folder;
  int64_t last_done = 0, total = 0;
  ASSERT_OK_AND_ASSIGN(const MakeResult made,
                       MakeCheckpoint(folder / "m", {.progress = [&](int64_t done, int64_t of) {
                                        EXPECT_GT(done, last_done);
                                        last_done = done;
                                        total = of;
                                      }}));
  EXPECT_EQ(last_done, made.bytes);
  EXPECT_EQ(total, made.bytes);
  // Four layers, one for the rest, two of vision tensors.
  EXPECT_EQ(made.files, 7);
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(folder / "m"));
  EXPECT_EQ(index.files().size(), 5u);
  EXPECT_EQ(index.total_bytes(), made.bytes - 2 * 16 * 2);
  EXPECT_EQ(static_cast<int64_t>(index.tensors().size()), made.tensors - 2);
  EXPECT_EQ(index.config().num_layers, 4);
  EXPECT_THAT(index.stop_ids(), ::testing::ElementsAre(1001, 1002));
}

TEST(MakerTest, BytesDependOnSeedAndNameAlone) {
  const TempDir folder;
  for (const int num_threads : {1, 3}) {
    ASSERT_OK(MakeCheckpoint(folder / fmt::to_string(num_threads),
                             {.layers = 2, .seed = 5, .num_threads = num_threads}));
  }
  EXPECT_EQ(Files(folder / "1"), Files(folder / "3"));

  const EditableCheckpoint two({.layers = 2, .seed = 5}), three({.layers = 3, .seed = 5}),
      other({.layers = 2, .seed = 6});
  for (const auto& [name, tensor] : two.tensors) {
    EXPECT_EQ(tensor.bytes, three.tensors.at(name).bytes) << name;
    if (name.ends_with("weight_shape")) continue;
    EXPECT_NE(tensor.bytes, other.tensors.at(name).bytes) << name;
  }
  std::set<std::string> contents;
  for (const auto& [name, tensor] : two.tensors) {
    if (name.ends_with("weight_shape")) continue;
    EXPECT_TRUE(contents.insert(tensor.bytes).second) << name;
  }
}

// A part made by itself is the same as within the whole.
TEST(MakerTest, PartsOfATensorFitTogether) {
  const ExpectedTensor weight{
      "model.layers.0.self_attn.o_proj.weight", TensorKind::kWeight, {7, 11}};
  const ExpectedTensor packed{"x.weight_packed", TensorKind::kPacked, {2, 20}};
  const auto check = [](const ExpectedTensor& tensor, DType dtype, int64_t count, int64_t cut) {
    const auto size = static_cast<int64_t>(SizeOf(dtype));
    const RandomTensor random(tensor, dtype, 9);
    std::vector<std::byte> whole(count * size), parts(count * size);
    random.Fill(0, whole);
    random.Fill(0, std::span(parts).first(cut * size));
    random.Fill(cut, std::span(parts).subspan(cut * size));
    EXPECT_EQ(whole, parts);
  };
  check(weight, DType::kBf16, 77, 10);
  check(packed, DType::kI32, 40, 14);
}

struct Moments {
  double mean = 0, deviation = 0;
};
Moments MomentsOf(const std::vector<float>& values) {
  Moments m;
  for (const float v : values) m.mean += v / static_cast<double>(values.size());
  for (const float v : values) {
    m.deviation += (v - m.mean) * (v - m.mean) / static_cast<double>(values.size());
  }
  m.deviation = std::sqrt(m.deviation);
  return m;
}

TEST(MakerTest, WeightsAreScaledByTheirInputs) {
  const EditableCheckpoint made;
  const auto bf16 = [&](const std::string& name) {
    const std::string& bytes = made.tensors.at("language_model.model." + name).bytes;
    std::vector<float> values(bytes.size() / 2);
    ScalesToFloat(DType::kBf16, reinterpret_cast<const std::byte*>(bytes.data()), values);
    return values;
  };
  // 5 % is five standard errors and more at these sizes.
  const Moments o_proj = MomentsOf(bf16("layers.0.self_attn.o_proj.weight"));
  EXPECT_NEAR(o_proj.deviation * std::sqrt(128), 1, 0.05);
  EXPECT_NEAR(o_proj.mean * std::sqrt(128), 0, 0.05);
  EXPECT_NEAR(MomentsOf(bf16("embed_tokens.weight")).deviation, 1, 0.05);
  const Moments norm = MomentsOf(bf16("norm.weight"));
  EXPECT_NEAR(norm.mean, 1, 0.05);
  EXPECT_NEAR(norm.deviation, 0.1, 0.04);

  // Experts, dequantised, are as plain weights would be; all sixteen codes occur.
  const std::string expert = "language_model.model.layers.1.mlp.experts.3.up_proj.weight_";
  const std::string& packed = made.tensors.at(expert + "packed").bytes;
  const std::vector<float> scales = bf16("layers.1.mlp.experts.3.up_proj.weight_scale");
  std::vector<uint32_t> words(packed.size() / 4);
  std::memcpy(words.data(), packed.data(), packed.size());
  std::vector<float> weights(words.size() * 8);
  std::vector<int8_t> codes(words.size() * 8);
  DequantizeInt4Row(words.data(), scales.data(), static_cast<int64_t>(weights.size()),
                    weights.data());
  UnpackInt4Row(words.data(), static_cast<int64_t>(codes.size()), codes.data());
  EXPECT_NEAR(MomentsOf(weights).deviation * std::sqrt(128), 1, 0.05);
  EXPECT_NEAR(MomentsOf(weights).mean * std::sqrt(128), 0, 0.05);
  EXPECT_EQ(std::set<int8_t>(codes.begin(), codes.end()).size(), 16u);
}

TEST(MakerTest, HolesOpenAndTakeNoRoom) {
  const TempDir folder;
  ASSERT_OK(MakeCheckpoint(folder / "m", {.preset = "kimi-k2.5", .layers = 2, .holes = true}));
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(folder / "m"));
  EXPECT_GT(index.total_bytes(), int64_t{14} << 30);
  int64_t taken = 0;
  for (const fs::path& file : index.files()) {
    struct stat facts;
    ASSERT_EQ(stat(file.c_str(), &facts), 0);
    taken += facts.st_blocks * 512;
  }
  EXPECT_LT(taken, 16 << 20);
}

TEST(MakerTest, RefusesWrongOptionsAndFullFolders) {
  const TempDir folder;
  const auto make = [&](MakeOptions options) { return MakeCheckpoint(folder / "m", options); };
  EXPECT_THAT(make({.preset = "huge"}), StatusIs(kInvalid, "tiny, mid and kimi-k2.5"));
  EXPECT_THAT(make({.layers = -1}), StatusIs(kInvalid, "num_hidden_layers is -1"));
  EXPECT_THAT(make({.groups = 3}), StatusIs(kInvalid, "n_group"));
  EXPECT_THAT(make({.scale_dtype = DType::kI32}), StatusIs(kInvalid, "scales of int32"));
  EXPECT_THAT(make({.shape_dtype = DType::kBf16}), StatusIs(kInvalid, "shapes of bfloat16"));
  EXPECT_FALSE(fs::exists(folder / "m"));
  ASSERT_OK(make({.layers = 1}));
  EXPECT_THAT(make({}), StatusIs(absl::StatusCode::kFailedPrecondition, "is not empty"));
}

TEST(MakerTest, RefusesWhatTheDiskHasNoRoomFor) {
  const TempDir folder;
  constexpr uintmax_t kBytes = 10'000'000'000'000;  // 1024 layers of 9.8 GB
  if (fs::space(folder.path()).available > kBytes) {
    GTEST_SKIP() << "the disk has more than 10 TB free";
  }
  EXPECT_THAT(
      MakeCheckpoint(folder / "big", {.preset = "kimi-k2.5", .layers = 1024, .num_threads = 1}),
      StatusIs(absl::StatusCode::kResourceExhausted, "take fewer layers"));
}

// Entries are distinct, and each beyond the single bytes is two earlier entries joined.
TEST(MakerTest, VocabulariesAreLegal) {
  const auto decode = [](std::string_view text) {
    constexpr std::string_view kDigits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t bits = 0;
    for (const char c : text) {
      bits = bits << 6 | static_cast<uint32_t>(c == '=' ? 0 : kDigits.find(c));
    }
    const std::string bytes = {static_cast<char>(bits >> 16), static_cast<char>(bits >> 8),
                               static_cast<char>(bits)};
    return bytes.substr(0, 3 - std::ranges::count(text, '='));
  };
  for (const int size : {1000, 163584}) {
    const std::string file = MakeVocabulary(size);
    std::set<std::string> seen;
    size_t at = 0;
    for (int rank = 0; rank < size; ++rank) {
      const size_t space = file.find(' ', at), end = file.find('\n', at);
      ASSERT_EQ(file.substr(space + 1, end - space - 1), fmt::to_string(rank));
      const std::string bytes = decode(file.substr(at, space - at));
      if (rank < 256) {
        ASSERT_EQ(bytes.size(), 1u);
      } else {
        ASSERT_TRUE(seen.contains(bytes.substr(0, bytes.size() - 1)));
      }
      ASSERT_TRUE(seen.insert(bytes).second);
      at = end + 1;
    }
    EXPECT_EQ(at, file.size());
  }
}

}  // namespace
}  // namespace statetap
