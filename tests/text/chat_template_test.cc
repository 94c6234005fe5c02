#include "extractor/text/chat_template.h"

#include "extractor/text/python_text.h"
#include "extractor/text/tool_declaration.h"
#include "tests/support/status_matchers.h"
#include "tests/text/text_fixtures.h"

namespace statetap {
namespace {

using testing::JsonLines;
using testing::OpenBpe20k;
using testing::StatusIs;

RenderOptions OptionsOf(const Json& line) {
  const Json& given = line["options"];
  RenderOptions options{.kind = ParseTemplateKind(line["template"].get<std::string>()).value()};
  const Json* thinking = FindMember(given, "thinking");
  options.thinking = thinking == nullptr || thinking->get<bool>();
  options.generation_prompt = given["add_generation_prompt"];
  if (given.value("tool_declaration", "") == "json")
    options.tool_declaration = ToolDeclarationStyle::kJson;
  return options;
}

// The reference prints None where a message's field is null; we count null as missing.
std::string WithoutNone(std::string text) {
  const auto replace = [&](std::string_view from, std::string_view to) {
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
      text.replace(at, from.size(), to);
  };
  replace("<think>None</think>", "<think></think>");
  replace("\n    None<|im_end|>", "\n    <|im_end|>");
  return text;
}

TEST(ChatTemplateTest, RendersAsTheReference) {
  const Tokenizer tokenizer = OpenBpe20k();
  const std::vector<Json> cases = JsonLines("text/template_cases.jsonl");
  ASSERT_EQ(cases.size(), 242u);
  for (size_t i = 0; i < cases.size(); ++i) {
    const Json& line = cases[i];
    const auto segments = RenderChat(line["messages"], &line["tools"], OptionsOf(line));
    if (line.contains("error")) {
      EXPECT_THAT(segments, StatusIs(absl::StatusCode::kInvalidArgument, "messages["));
      continue;
    }
    ASSERT_OK(segments);
    ASSERT_EQ(TextOf(*segments), WithoutNone(line["rendered"]))
        << "case " << i << " " << line["template"] << " " << line["options"];
    // No structure but the template's: the segments' ids spell the rendered text.
    ASSERT_OK_AND_ASSIGN(const EncodedText encoded, EncodeSegments(tokenizer, *segments));
    ASSERT_EQ(tokenizer.DecodeBytes(encoded.ids), TextOf(*segments));
    ASSERT_EQ(encoded.ids.size(), encoded.loss_mask.size());
  }
}

TEST(ToolDeclarationTest, EncodesAsTheReference) {
  const std::vector<Json> cases = JsonLines("text/tool_declaration_cases.jsonl");
  ASSERT_EQ(cases.size(), 38u);
  for (const Json& line : cases) {
    const auto text = TypeScriptDeclaration(SortedByKey(line["tools"]));
    if (line.contains("error")) {
      EXPECT_FALSE(text.ok()) << *text << line["error"];
    } else {
      ASSERT_OK(text);
      EXPECT_EQ(*text, line["tools_ts_str"].get<std::string>());
    }
  }
}

}  // namespace
}  // namespace statetap
