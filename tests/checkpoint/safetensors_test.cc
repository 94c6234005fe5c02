#include "extractor/checkpoint/safetensors.h"

#include <cstring>

#include "extractor/base/file.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using ::testing::ElementsAre;
using testing::StatusIs;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kOutOfRange = absl::StatusCode::kOutOfRange;

// One tensor "a" with these fields in front of `data_bytes` bytes.
absl::Status One(std::string_view fields, int64_t data_bytes = 24) {
  return ParseSafetensorsHeader(fmt::format(R"({{"a":{{{}}}}})", fields), 100, data_bytes).status();
}

TEST(SafetensorsTest, ReadsTensorsInTheOrderOfTheirOffsets) {
  ASSERT_OK_AND_ASSIGN(const auto entries,
                       ParseSafetensorsHeader(R"({"__metadata__":{"format":"pt"},
        "b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]},
        "a":{"shape":[2,3],"data_offsets":[0,12],"dtype":"BF16"},
        "empty":{"dtype":"I64","shape":[0,5],"data_offsets":[12,12]},
        "scalar":{"dtype":"U8","shape":[],"data_offsets":[16,17]}}   )",
                                              100, 17));
  ASSERT_EQ(entries.size(), 4u);
  EXPECT_EQ(entries[0].name, "a");
  EXPECT_EQ(entries[0].dtype, "BF16");
  EXPECT_THAT(entries[0].shape, ElementsAre(2, 3));
  EXPECT_EQ(entries[0].offset, 100);
  EXPECT_EQ(entries[0].size_bytes, 12);
  EXPECT_EQ(entries[1].name, "empty");
  EXPECT_EQ(entries[2].name, "b");
  EXPECT_EQ(entries[3].name, "scalar");
  EXPECT_EQ(entries[3].offset, 116);
}

TEST(SafetensorsTest, RefusesSizesThatDoNotFit) {
  EXPECT_OK(One(R"("dtype":"F32","shape":[2,3],"data_offsets":[0,24])"));
  EXPECT_THAT(One(R"("dtype":"F32","shape":[2,2],"data_offsets":[0,24])"),
              StatusIs(kInvalid, "tensor a has 24 bytes, expected 16 for F32 [2, 2]"));
  EXPECT_THAT(One(R"("dtype":"F32","shape":[2,3],"data_offsets":[24,0])"),
              StatusIs(kInvalid, "before its begin"));
  EXPECT_THAT(One(R"("dtype":"Q3","shape":[24],"data_offsets":[0,24])"),
              StatusIs(kInvalid, "unknown dtype \"Q3\""));
  EXPECT_THAT(One(R"("dtype":"F4","shape":[3],"data_offsets":[0,1])", 1),
              StatusIs(kInvalid, "expected more"));
}

TEST(SafetensorsTest, RefusesShapesThatOverflow) {
  for (const char* shape :
       {"4294967296,4294967296", "9223372036854775807", "9223372036854775807,2",
        "3,6148914691236517206", "65536,65536,65536,65536", "2305843009213693952,4"}) {
    const std::string fields =
        fmt::format(R"("dtype":"F32","shape":[{}],"data_offsets":[0,24])", shape);
    EXPECT_THAT(One(fields), StatusIs(kInvalid, "tensor a has 24 bytes, expected")) << shape;
  }
  for (const char* number : {"9223372036854775808", "18446744073709551616", "1e30", "-1", "1.5"}) {
    const std::string fields =
        fmt::format(R"("dtype":"F32","shape":[{}],"data_offsets":[0,24])", number);
    EXPECT_THAT(One(fields), StatusIs(kInvalid, "tensor a")) << number;
  }
}

TEST(SafetensorsTest, RefusesOverlapsHolesAndTrailingBytes) {
  const auto two = [](int b_begin, int b_end, int64_t data_bytes) {
    return ParseSafetensorsHeader(
        fmt::format(R"({{"a":{{"dtype":"U8","shape":[8],"data_offsets":[0,8]}},
                        "b":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}}})",
                    b_end - b_begin, b_begin, b_end),
        0, data_bytes);
  };
  EXPECT_OK(two(8, 12, 12));
  EXPECT_THAT(two(7, 12, 12), StatusIs(kInvalid, "tensor b begins at offset 7, inside tensor a"));
  EXPECT_THAT(two(9, 12, 12), StatusIs(kInvalid, "1 bytes of no tensor before tensor b"));
  EXPECT_THAT(two(8, 12, 13), StatusIs(kInvalid, "1 bytes behind the last tensor b"));
  EXPECT_THAT(two(8, 12, 11),
              StatusIs(kOutOfRange, "tensor b ends at byte 12 of the data, found 11"));
}

TEST(SafetensorsTest, RefusesHeadersOfAnotherForm) {
  const auto parse = [](std::string_view header) { return ParseSafetensorsHeader(header, 0, 0); };
  EXPECT_OK(parse("{}"));
  for (const char* header :
       {"",
        " {}",
        "[]",
        "3",
        "null",
        "{",
        "{}{}",
        R"({"a":3})",
        R"({"a":[]})",
        R"({"a":{}})",
        R"({"__metadata__":[]})",
        R"({"__metadata__":{"a":3}})",
        R"({"__metadata__":{},"__metadata__":{}})",
        R"({"a":{"dtype":"U8","shape":[0]}})",
        R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0]}})",
        R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}})",
        R"({"a":{"dtype":"U8","shape":[[0]],"data_offsets":[0,0]}})",
        R"({"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
        R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":1}})",
        "{\"\xff\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"}) {
    EXPECT_THAT(parse(header), StatusIs(kInvalid, "")) << header;
  }
  const std::string a = R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  EXPECT_THAT(parse(fmt::format("{{{},{}}}", a, a)), StatusIs(kInvalid, "a is given twice"));
}

class SafetensorsFileTest : public ::testing::Test {
 protected:
  absl::Status Read(uint64_t length, std::string_view rest) {
    std::string content(8, '\0');
    std::memcpy(content.data(), &length, 8);
    EXPECT_OK(WriteFileAtomically(path_, content + std::string(rest)));
    return ReadSafetensorsHeader(path_).status();
  }
  testing::TempDir folder_;
  const std::filesystem::path path_ = folder_ / "x.safetensors";
};

TEST_F(SafetensorsFileTest, BoundsTheLengthOfTheHeader) {
  EXPECT_OK(Read(2, "{}"));
  EXPECT_THAT(Read(3, "{}"), StatusIs(kOutOfRange, "cut short: its header ends at byte 11"));
  EXPECT_THAT(Read(kMaxSafetensorsHeader + 1, "{}"), StatusIs(kInvalid, "the format allows"));
  EXPECT_THAT(Read(~uint64_t{0}, "{}"), StatusIs(kInvalid, "x.safetensors"));
  EXPECT_THAT(Read(kMaxSafetensorsHeader, "{}"), StatusIs(kOutOfRange, "cut short"));
  ASSERT_OK(WriteFileAtomically(path_, "1234567"));
  EXPECT_THAT(ReadSafetensorsHeader(path_), StatusIs(kOutOfRange, "7 bytes"));
  EXPECT_THAT(ReadSafetensorsHeader(folder_ / "none"),
              StatusIs(absl::StatusCode::kNotFound, "none"));
}

TEST_F(SafetensorsFileTest, ReadsWhatMakeSafetensorsHeaderMakes) {
  std::vector<SafetensorsEntry> made = {{.name = "x\"y", .dtype = "I64", .shape = {2}},
                                        {.name = "b", .dtype = "BF16", .shape = {3, 1}}};
  std::string file = MakeSafetensorsHeader(made);
  EXPECT_EQ(file.size() % 8, 0u);
  file.append(16 + 6, 'x');
  ASSERT_OK(WriteFileAtomically(path_, file));
  ASSERT_OK_AND_ASSIGN(const auto read, ReadSafetensorsHeader(path_));
  ASSERT_EQ(read.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(read[i].name, made[i].name);
    EXPECT_EQ(read[i].shape, made[i].shape);
    EXPECT_EQ(read[i].offset, made[i].offset);
    EXPECT_EQ(read[i].size_bytes, made[i].size_bytes);
  }
}

}  // namespace
}  // namespace statetap
