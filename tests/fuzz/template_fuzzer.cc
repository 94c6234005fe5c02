// A chat and its tools, as {"messages", "tools"} behind a byte that chooses the options: refused,
// or segments whose ids spell the rendered text, with no special token but the template's own.
#include <algorithm>

#include "extractor/base/json.h"
#include "extractor/text/chat_template.h"
#include "tests/fuzz/fuzz.h"

using namespace statetap;

namespace {

RenderOptions OptionsOf(uint8_t choice) {
  constexpr TemplateKind kKinds[] = {TemplateKind::kKimiK25, TemplateKind::kKimiK2Thinking,
                                     TemplateKind::kKimiK2Instruct, TemplateKind::kNone};
  RenderOptions options;
  options.kind = kKinds[choice & 3];
  options.keep_reasoning = static_cast<KeepReasoning>(choice >> 2 & 3);
  options.thinking = (choice & 16) == 0;
  options.generation_prompt = (choice & 32) == 0;
  options.supervision.answers =
      (choice & 64) != 0 ? Supervision::Answers::kAll : Supervision::Answers::kLast;
  options.supervision.thought = (choice & 128) == 0;
  return options;
}

int64_t CountSpecials(const EncodedText& encoded) {
  return std::count_if(encoded.ids.begin(), encoded.ids.end(),
                       [](int32_t id) { return fuzz::TinyKimi().IsSpecial(id); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const absl::StatusOr<Json> chat =
      ParseJson(std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1));
  if (!chat.ok()) return 0;
  const Json* messages = FindMember(*chat, "messages");
  const Json none = Json::array();
  TextCounts counts;
  const auto segments = RenderChat(messages != nullptr ? *messages : none,
                                   FindMember(*chat, "tools"), OptionsOf(data[0]), &counts);
  if (!segments.ok()) return 0;
  const Tokenizer& tokenizer = fuzz::TinyKimi();
  const auto encoded = EncodeSegments(tokenizer, *segments);
  if (!encoded.ok()) return 0;  // a token that the template needs and the tokenizer lacks
  fuzz::Require(encoded->loss_mask.size() == encoded->ids.size());
  fuzz::Require(tokenizer.DecodeBytes(encoded->ids) == TextOf(*segments));
  const auto structure = std::count_if(segments->begin(), segments->end(), [](const Segment& s) {
    return s.kind == Segment::Kind::kSpecial;
  });
  fuzz::Require(CountSpecials(*encoded) == structure);
  fuzz::Require(counts.dropped_earlier + counts.dropped_tool_turns + counts.dropped_last <=
                counts.thoughts);
  const auto parsed = EncodeSegments(tokenizer, *segments, SpelledSpecials::kParsed);
  fuzz::Require(parsed.ok() && tokenizer.DecodeBytes(parsed->ids) == TextOf(*segments));
  fuzz::Require(CountSpecials(*parsed) == structure + parsed->spelled_specials);
  return 0;
}
