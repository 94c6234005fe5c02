#include "extractor/text/tokenizer.h"

#include <random>

#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/text/bpe.h"
#include "extractor/text/utf8.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/text/text_fixtures.h"

namespace statetap {
namespace {

using testing::JsonLines;
using testing::OpenBpe20k;
using testing::StatusIs;

std::vector<int32_t> IdsOf(const Json& ids) { return ids.get<std::vector<int32_t>>(); }

TEST(TokenizerTest, OrdinaryTextGivesTheReferencesIds) {
  const Tokenizer tokenizer = OpenBpe20k();
  const std::vector<Json> cases = JsonLines("text/tokenizer_cases.jsonl");
  ASSERT_EQ(cases.size(), 719u);
  for (const Json& line : cases) {
    const std::string text = line["text"];
    ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> ids, tokenizer.Encode(text));
    ASSERT_EQ(ids, IdsOf(line["ids"])) << text.substr(0, 200);
    ASSERT_EQ(tokenizer.DecodeBytes(ids), text);
    for (const int32_t id : ids) ASSERT_FALSE(tokenizer.IsSpecial(id));
  }
}

TEST(TokenizerTest, SpelledSpecialTokensAreReadOnlyWhenAskedFor) {
  const Tokenizer tokenizer = OpenBpe20k();
  int with_specials = 0;
  for (const Json& line : JsonLines("text/tokenizer_cases.jsonl")) {
    const bool spelled = !line["ids_special"].is_null();
    with_specials += spelled;
    ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> ids,
                         tokenizer.EncodeWithSpecials(line["text"].get<std::string>()));
    ASSERT_EQ(ids, IdsOf(line[spelled ? "ids_special" : "ids"]));
  }
  EXPECT_GT(with_specials, 10);
}

TEST(TokenizerTest, DecodesAnyIds) {
  const Tokenizer tokenizer = OpenBpe20k();
  const std::vector<Json> cases = JsonLines("text/decode_cases.jsonl");
  ASSERT_EQ(cases.size(), 52u);
  for (const Json& line : cases) {
    const std::vector<int32_t> ids = IdsOf(line["ids"]);
    std::string hex;
    for (const char byte : tokenizer.DecodeBytes(ids))
      hex += fmt::format("{:02x}", static_cast<uint8_t>(byte));
    ASSERT_EQ(hex, line["bytes_hex"].get<std::string>());
    ASSERT_EQ(tokenizer.Decode(ids), line["text"].get<std::string>());

    StreamDecoder stream(tokenizer);
    std::string streamed;
    for (const int32_t id : ids) streamed += stream.Add(id);
    streamed += stream.Finish();
    ASSERT_EQ(streamed, line["text"].get<std::string>());
  }
}

TEST(TokenizerTest, InvalidUtf8IsRefusedWithItsOffset) {
  const Tokenizer tokenizer = OpenBpe20k();
  const std::pair<std::string, int> kCases[] = {{"\x80", 0},                // a lone continuation
                                                {"abcdefghij\xff", 10},     // no lead byte
                                                {"ab\xe4\xb8", 2},          // cut off
                                                {"\u4e2d\xc0\xaf", 3},      // overlong
                                                {"x\xed\xa0\x80", 1},       // a surrogate
                                                {"xy\xf4\x90\x80\x80", 2},  // above U+10FFFF
                                                {std::string("a\0b\xfe", 4), 3}};
  for (const auto& [text, offset] : kCases) {
    for (const auto& ids : {tokenizer.Encode(text), tokenizer.EncodeWithSpecials(text)})
      EXPECT_THAT(ids, StatusIs(absl::StatusCode::kInvalidArgument,
                                fmt::format("byte offset {};", offset)));
  }
}

TEST(TokenizerTest, NulAndEmptyTextAreText) {
  const Tokenizer tokenizer = OpenBpe20k();
  ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> none, tokenizer.Encode(""));
  EXPECT_TRUE(none.empty());
  const std::string text("a\0\0b", 4);
  ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> ids, tokenizer.Encode(text));
  EXPECT_EQ(tokenizer.DecodeBytes(ids), text);
}

TEST(TokenizerTest, NamesOfSpecialTokensStayTextByDefault) {
  const Tokenizer tokenizer = OpenBpe20k();
  EXPECT_EQ(tokenizer.vocab(), 20'256);
  EXPECT_EQ(tokenizer.SpecialId("[EOS]"), 20'001);
  EXPECT_EQ(tokenizer.SpecialId("<|reserved_token_20005|>"), 20'005);
  EXPECT_EQ(tokenizer.SpecialId("<|reserved_token_20001|>"), std::nullopt);
  for (int32_t id = 20'000; id < 20'256; ++id) {
    ASSERT_TRUE(tokenizer.IsSpecial(id));
    const std::string name = tokenizer.DecodeBytes({&id, 1});
    ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> as_text, tokenizer.Encode(name));
    for (const int32_t text_id : as_text) ASSERT_LT(text_id, 20'000) << name;
    ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> as_special, tokenizer.EncodeWithSpecials(name));
    ASSERT_EQ(as_special, std::vector<int32_t>{id});
  }
}

TEST(TokenizerTest, IdsOutsideTheVocabularyDecodeToNothing) {
  const Tokenizer tokenizer = OpenBpe20k();
  const int32_t ids[] = {-1, 0, 20'256, INT32_MAX, INT32_MIN};
  EXPECT_EQ(tokenizer.DecodeBytes(ids), "!");
}

TEST(TokenizerTest, StreamedTextNeverHoldsHalfACharacter) {
  const Tokenizer tokenizer = OpenBpe20k();
  // Every byte a token of its own.
  std::vector<int32_t> ids;
  const std::string text = "é中\U0001f389!";
  for (const char byte : text) {
    const int32_t id = [&] {
      for (int32_t rank = 0; rank < 256; ++rank) {
        if (tokenizer.DecodeBytes({&rank, 1}) == std::string(1, byte)) return rank;
      }
      return -1;
    }();
    ids.push_back(id);
  }
  StreamDecoder stream(tokenizer);
  std::vector<std::string> complete;
  for (const int32_t id : ids) {
    if (std::string now = stream.Add(id); !now.empty()) complete.push_back(std::move(now));
  }
  EXPECT_EQ(complete, (std::vector<std::string>{"é", "中", "\U0001f389", "!"}));
  stream.Add(ids[2]);
  EXPECT_EQ(stream.Finish(), "\ufffd");
  EXPECT_EQ(stream.Finish(), "");
}

// The definition, step by step.
std::vector<int32_t> MergeByDefinition(const Vocabulary& vocabulary, std::string_view piece) {
  if (const int32_t rank = vocabulary.RankOf(piece); rank >= 0) return {rank};
  std::vector<std::string> parts;
  for (const char byte : piece) parts.emplace_back(1, byte);
  for (;;) {
    size_t best = 0;
    int32_t best_rank = INT32_MAX;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const int32_t rank = vocabulary.RankOf(parts[i] + parts[i + 1]);
      if (rank >= 0 && rank < best_rank) {
        best = i;
        best_rank = rank;
      }
    }
    if (best_rank == INT32_MAX) break;
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + best + 1);
  }
  std::vector<int32_t> ids;
  for (const std::string& part : parts) ids.push_back(vocabulary.RankOf(part));
  return ids;
}

TEST(PairMergerTest, PiecesOfAnyLengthFollowTheDefinition) {
  const std::string file = ReadWholeFile(testing::DataPath("text/bpe20k.tiktoken.model")).value();
  ASSERT_OK_AND_ASSIGN(const Vocabulary vocabulary, Vocabulary::Parse(file));
  PairMerger merger(vocabulary);
  std::mt19937 random(1);
  for (const std::string_view letters : {"a", " ", "ab", "etaoin shrdlu", "\xe4\xb8\xad\xe6\x96"}) {
    for (const size_t size : {1, 2, 3, 63, 64, 65, 95, 96, 97, 200, 700}) {
      std::string piece;
      for (size_t i = 0; i < size; ++i) piece += letters[random() % letters.size()];
      std::vector<int32_t> ids;
      merger.Encode(piece, &ids);
      ASSERT_EQ(ids, MergeByDefinition(vocabulary, piece)) << piece;
    }
  }
}

// Ranks that no training gives: a join makes a pair of lower rank possible.
TEST(PairMergerTest, LowerRanksThatAppearLaterComeFirst) {
  std::string file;
  const auto base64 = [](std::string_view bytes) {
    constexpr std::string_view kDigits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (size_t i = 0; i < bytes.size(); i += 3) {
      uint32_t bits = 0;
      for (size_t k = 0; k < 3; ++k)
        bits = bits << 8 | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0);
      for (int k = 0; k < 4; ++k)
        text += i + k > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
    }
    return text;
  };
  int rank = 0;
  for (const std::string_view token : {"abc", "abcabc", "ca", "ab", "bab"})
    file += fmt::format("{} {}\n", base64(token), rank++);
  for (int byte = 0; byte < 256; ++byte)
    file += fmt::format("{} {}\n", base64(std::string(1, static_cast<char>(byte))), rank++);
  ASSERT_OK_AND_ASSIGN(const Vocabulary vocabulary, Vocabulary::Parse(file));
  PairMerger merger(vocabulary);
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::string piece;
    for (size_t size = 1 + random() % 300; size > 0; --size) piece += "abc"[random() % 3];
    std::vector<int32_t> ids;
    merger.Encode(piece, &ids);
    ASSERT_EQ(ids, MergeByDefinition(vocabulary, piece)) << piece;
  }
}

class TokenizerFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model_ = ReadWholeFile(testing::DataPath("text/bpe20k.tiktoken.model")).value();
    config_ = ReadWholeFile(testing::DataPath("text/bpe20k.tokenizer_config.json")).value();
  }
  absl::StatusOr<Tokenizer> Open(std::string_view model, std::string_view config) {
    EXPECT_OK(WriteFileAtomically(folder_ / "tiktoken.model", model));
    EXPECT_OK(WriteFileAtomically(folder_ / "tokenizer_config.json", config));
    return Tokenizer::Open(folder_.path());
  }
  void ExpectModelRefused(std::string_view model, std::string_view message) {
    const auto opened = Open(model, config_);
    EXPECT_THAT(opened, StatusIs(absl::StatusCode::kInvalidArgument, "tiktoken.model: "));
    EXPECT_THAT(opened, StatusIs(absl::StatusCode::kInvalidArgument, std::string(message)));
  }
  void ExpectConfigRefused(std::string_view config, std::string_view message) {
    const auto opened = Open(model_, config);
    EXPECT_THAT(opened, StatusIs(absl::StatusCode::kInvalidArgument, "tokenizer_config.json: "));
    EXPECT_THAT(opened, StatusIs(absl::StatusCode::kInvalidArgument, std::string(message)));
  }

  testing::TempDir folder_;
  std::string model_, config_;
};

TEST_F(TokenizerFilesTest, DamagedVocabulariesAreRefusedWithTheLine) {
  ExpectModelRefused("", "0x00");
  ExpectModelRefused("IQ==\n", "line 1: no space");
  ExpectModelRefused("IQ== 0\nIg== x\n", "line 2: the rank is not a decimal number");
  ExpectModelRefused("IQ== 0\nIg== 1 2\n", "line 2: the rank is not a decimal number");
  ExpectModelRefused("IQ== 0\nIg== 2\n", "line 2: rank 2 found where 1 is expected");
  ExpectModelRefused("IQ== 0\nIg== 9223372036854775808\n", "line 2: the rank is not");
  ExpectModelRefused("IQ= 0\n", "line 1: the token is not padded base64");
  ExpectModelRefused("I=Q= 0\n", "line 1: the token is not padded base64");
  ExpectModelRefused(" 0\n", "line 1: the token is not padded base64");
  ExpectModelRefused(model_ + "IQ== 20000\n", "ranks 0 and 20000 are the same bytes");
  ExpectModelRefused(model_.substr(0, model_.find("\n", 1000)), "no token for the single byte");
}

TEST_F(TokenizerFilesTest, DamagedConfigsAreRefusedWithTheField) {
  ExpectConfigRefused("{", "byte");
  ExpectConfigRefused("[]", "added_tokens_decoder is missing");
  ExpectConfigRefused(R"({"added_tokens_decoder": []})", "added_tokens_decoder is missing");
  ExpectConfigRefused(R"({"added_tokens_decoder": {"x": {"content": "a"}}})",
                      "\"x\" is no token id");
  ExpectConfigRefused(R"({"added_tokens_decoder": {"20000": {}}})", "[20000].content");
  ExpectConfigRefused(R"({"added_tokens_decoder": {"20000": {"content": ""}}})", "[20000].content");
  ExpectConfigRefused(R"({"added_tokens_decoder": {"7": {"content": "a"}}})",
                      "[7] is the id of an");
  ExpectConfigRefused(
      R"({"added_tokens_decoder": {"20000": {"content": "a"}, "20009": {"content": "a"}}})",
      "both 20000 and 20009");
}

TEST_F(TokenizerFilesTest, MissingFilesAreNamed) {
  EXPECT_THAT(Tokenizer::Open(folder_.path()),
              StatusIs(absl::StatusCode::kNotFound, "tiktoken.model"));
}

TEST_F(TokenizerFilesTest, IdsBehindTheSpecialsAreLeftOut) {
  ASSERT_OK_AND_ASSIGN(
      const Tokenizer tokenizer,
      Open(model_,
           R"({"added_tokens_decoder": {"20000": {"content": "[BOS]"}, "20255": {"content": "a"},)"
           R"( "20256": {"content": "b"}}})"));
  EXPECT_EQ(tokenizer.SpecialId("a"), 20'255);
  EXPECT_EQ(tokenizer.SpecialId("b"), std::nullopt);
  EXPECT_EQ(tokenizer.vocab(), 20'256);
}

TEST_F(TokenizerFilesTest, DigestFollowsRanksAndNames) {
  ASSERT_OK_AND_ASSIGN(const Tokenizer one, Open(model_, config_));
  ASSERT_OK_AND_ASSIGN(const Tokenizer same, Open(model_ + "\n", config_));
  ASSERT_OK_AND_ASSIGN(const Tokenizer longer, Open(model_ + "QUFBQUFBQUFBQUFB 20000\n",
                                                    R"({"added_tokens_decoder": {}})"));
  ASSERT_OK_AND_ASSIGN(const Tokenizer renamed, Open(model_, R"({"added_tokens_decoder": {}})"));
  EXPECT_EQ(one.digest().size(), 64u);
  EXPECT_EQ(one.digest(), same.digest());
  EXPECT_NE(one.digest(), longer.digest());
  EXPECT_NE(one.digest(), renamed.digest());
}

TEST(Utf8Test, EachMaximalSubpartBecomesOneReplacement) {
  const std::pair<std::string_view, std::string_view> kCases[] = {
      {"a\x80z", "a\ufffdz"},
      {"\xe4\xb8z", "\ufffdz"},
      {"\xe4\xb8\xe4\xb8\xad", "\ufffd中"},
      {"\xc0\xaf", "\ufffd\ufffd"},
      {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
      {"\xf0\x9f\x8e", "\ufffd"},
      {"\xf4\x90\x80", "\ufffd\ufffd\ufffd"},
      {"", ""}};
  for (const auto& [bytes, text] : kCases) EXPECT_EQ(ReplaceInvalidUtf8(bytes), text);
}

TEST(Utf8Test, OnlyACharacterThatCanBeCompletedIsATail) {
  EXPECT_EQ(IncompleteUtf8Tail(""), 0u);
  EXPECT_EQ(IncompleteUtf8Tail("a"), 0u);
  EXPECT_EQ(IncompleteUtf8Tail("é"), 0u);
  EXPECT_EQ(IncompleteUtf8Tail("a\xc3"), 1u);
  EXPECT_EQ(IncompleteUtf8Tail("a\xe4\xb8"), 2u);
  EXPECT_EQ(IncompleteUtf8Tail("a\xf0\x9f\x8e"), 3u);
  EXPECT_EQ(IncompleteUtf8Tail("a\xed\xa0"), 0u);
  EXPECT_EQ(IncompleteUtf8Tail("a\x80"), 0u);
}

TEST(TokenizerTest, VocabularyThatLostItsEndIsRefused) {
  const testing::TempDir dir;
  const auto from = std::filesystem::path(STATETAP_SOURCE_DIR) / "models/tiny-kimi";
  ASSERT_OK_AND_ASSIGN(const std::string model, ReadWholeFile(from / "tiktoken.model"));
  std::filesystem::copy(from / "tokenizer_config.json", dir / "tokenizer_config.json");
  ASSERT_OK(WriteFileAtomically(dir / "tiktoken.model", model));
  EXPECT_OK(Tokenizer::Open(dir.path()));
  size_t cut = model.size() - 1;
  for (int lines = 1; lines <= 3; ++lines) {
    cut = model.rfind('\n', cut - 1);
    ASSERT_OK(WriteFileAtomically(dir / "tiktoken.model", model.substr(0, cut + 1)));
    EXPECT_THAT(Tokenizer::Open(dir.path()),
                StatusIs(absl::StatusCode::kInvalidArgument, "begins at 2048"));
  }
}

}  // namespace
}  // namespace statetap
