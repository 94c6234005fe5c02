// A chat as the model sees it: a list of segments, never one string, so that what a person wrote
// cannot become structure and the supervised spans are known by construction.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/json.h"
#include "extractor/base/status.h"
#include "extractor/text/tokenizer.h"

namespace statetap {

enum class TemplateKind { kKimiK25, kKimiK2Thinking, kKimiK2Instruct, kNone };
// Which assistant turns keep their reasoning: none; the vendor's rule (only after the last
// assistant turn without tool calls); the last assistant turn too; all.
enum class KeepReasoning { kNone, kToolLoop, kLast, kAll };

struct Segment {
  enum class Kind { kText, kSpecial } kind = Kind::kText;
  std::string text;         // a special token's name, or ordinary text
  bool supervised = false;  // part of the answer that is learned from
};

struct RenderOptions {
  TemplateKind kind = TemplateKind::kKimiK25;
  bool thinking = true;
  KeepReasoning keep_reasoning = KeepReasoning::kToolLoop;
  bool generation_prompt = true;
  // Supervise the last assistant turn (its reasoning, content, tool calls and end token), as far as
  // it is rendered.
  bool supervise_last = false;
};

// `messages`: a list of OpenAI-style messages; `tools`: a list of declarations or null.
// INVALID_ARGUMENT names the message and the field, where the vendor's template would raise too.
absl::StatusOr<std::vector<Segment>> RenderChat(const Json& messages, const Json* tools,
                                                const RenderOptions& options);

std::string TextOf(std::span<const Segment> segments);

struct EncodedText {
  std::vector<int32_t> ids;
  std::vector<uint8_t> loss_mask;  // one a token, 1 where supervised; unshifted
};
// Each stretch of text between special tokens is encoded whole; a mask boundary inside one splits
// it there.
absl::StatusOr<EncodedText> EncodeSegments(const Tokenizer& tokenizer,
                                           std::span<const Segment> segments);

// "kimi-k2.5", …; INVALID_ARGUMENT lists the names.
absl::StatusOr<TemplateKind> ParseTemplateKind(std::string_view name);
absl::StatusOr<KeepReasoning> ParseKeepReasoning(std::string_view name);
std::string_view NameOf(TemplateKind kind);
// The template of a checkpoint, by its model_type and by which special tokens its tokenizer names:
// kimi_k25 → kimi-k2.5; else with <think> named → kimi-k2-thinking; else with <|im_middle|> →
// kimi-k2-instruct; else none.
TemplateKind DetectTemplate(std::string_view outer_model_type, const Tokenizer& tokenizer);
// Changes when the rendering of a template changes: stored with every shard.
std::string TemplateDigest(TemplateKind kind);

}  // namespace statetap
