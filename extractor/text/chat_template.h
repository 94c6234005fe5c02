// A chat as the model sees it: a list of segments, never one string, so that what a person wrote
// cannot become structure and the supervised spans are known by construction.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/json_fwd.h"
#include "extractor/base/status.h"
#include "extractor/text/text_counts.h"
#include "extractor/text/tokenizer.h"

namespace statetap {

enum class TemplateKind { kKimiK25, kKimiK2Thinking, kKimiK2Instruct, kNone };
// Which assistant messages keep their reasoning; the others get an empty think block.
enum class KeepReasoning {
  kNone,
  kToolLoop,  // the vendor's rule: those behind the last answer without tool calls
  kLast,      // the same, looked at from the last assistant message: it and its own tool loop keep
              // theirs, as when the model wrote it
  kAll        // with thinking off too
};
// How K2.5 declares tools. kTypeScript falls back to JSON where a schema cannot be said.
enum class ToolDeclarationStyle { kTypeScript, kJson };

// The loss mask: of which assistant messages what is rendered behind the generation prompt of their
// mode. K2.5 thinking: behind <think>; instant: behind <think></think>; the other templates: behind
// <|im_middle|>. Of a message whose thought was dropped, only what follows the think block: the
// model did not write an empty one.
struct Supervision {
  enum class Answers { kNone, kLast, kAll } answers = Answers::kNone;
  bool thought = true;  // what the model writes of the think block
  bool stop = true;     // <|im_end|>
};

struct Segment {
  // kAnswer: ordinary text too, but an assistant's, which may be meant to spell special tokens.
  enum class Kind { kText, kAnswer, kSpecial } kind = Kind::kText;
  std::string text;         // a special token's name, or ordinary text
  bool supervised = false;  // part of the answer that is learned from
};

struct RenderOptions {
  TemplateKind kind = TemplateKind::kKimiK25;
  bool thinking = true;
  KeepReasoning keep_reasoning = KeepReasoning::kToolLoop;
  bool generation_prompt = true;
  Supervision supervision;
  ToolDeclarationStyle tool_declaration = ToolDeclarationStyle::kTypeScript;
};

// `messages`: a list of OpenAI-style messages, perhaps empty; `tools`: a list of declarations, or
// null. The text is the vendor's, but for what follows.
// - Null in a message's field counts as missing (the vendor prints the word None).
// - Refused with INVALID_ARGUMENT that names message and field, where the vendor prints nothing or
//   Python's form: messages or parts that are no objects, a missing role, content that is an
//   object, lists and objects as name, id or reasoning. (What makes the vendor's template raise is
//   refused as well: content or tool_calls that are numbers, calls without function or arguments.)
// - Unless keep_reasoning is kToolLoop, a thought inside an answer's content ("<think>thought
//   </think>answer", also without the opening tag) counts as its reasoning; one without an end is
//   refused. Under kToolLoop content is printed as it is.
// Image and video parts are rendered; CheckTextOnly refuses them. `counts` (may be null) is added
// to, but for spelled_specials.
absl::StatusOr<std::vector<Segment>> RenderChat(const Json& messages, const Json* tools,
                                                const RenderOptions& options,
                                                TextCounts* counts = nullptr);

// INVALID_ARGUMENT for the first part of a message that is not text: its states would be those of a
// placeholder. An unreadable message is left to RenderChat.
absl::Status CheckTextOnly(const Json& messages);

std::string TextOf(std::span<const Segment> segments);

// What becomes of a special token that an assistant's text spells: text like any other, the token
// (as the vendor's tokenizer has it), or INVALID_ARGUMENT. Text of others stays text in any case.
enum class SpelledSpecials { kText, kParsed, kRefused };

struct EncodedText {
  std::vector<int32_t> ids;
  std::vector<uint8_t> loss_mask;  // one a token, 1 where supervised; unshifted
  int64_t spelled_specials = 0;    // in segments of kAnswer
};
// Each stretch of text between special tokens is encoded whole; a mask boundary inside one splits
// it there.
absl::StatusOr<EncodedText> EncodeSegments(const Tokenizer& tokenizer,
                                           std::span<const Segment> segments,
                                           SpelledSpecials spelled = SpelledSpecials::kText);

// "kimi-k2.5", …; INVALID_ARGUMENT lists the names.
absl::StatusOr<TemplateKind> ParseTemplateKind(std::string_view name);
absl::StatusOr<KeepReasoning> ParseKeepReasoning(std::string_view name);
std::string_view NameOf(TemplateKind kind);
std::string_view NameOf(KeepReasoning keep);
// The template of a checkpoint, by its model_type and by which special tokens its tokenizer names:
// kimi_k25 → kimi-k2.5; else with <think> named → kimi-k2-thinking; else with <|im_middle|> →
// kimi-k2-instruct; else none.
TemplateKind DetectTemplate(std::string_view outer_model_type, const Tokenizer& tokenizer);
// Changes when the rendering of a template changes: stored with every shard.
std::string TemplateDigest(TemplateKind kind);

}  // namespace statetap
