#include "extractor/text/tokenizer.h"

#include <map>

#include "extractor/base/file.h"
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

}  // namespace
}  // namespace statetap
