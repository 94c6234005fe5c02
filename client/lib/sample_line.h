// One line of an input file as a sample of statetap.v1. Knows every shape that is accepted:
//   {"messages": […], "tools": […]}                       an OpenAI-style chat
//   {"conversations": [{"from", "value"}, …]}             ShareGPT ("system" and "tools" beside it)
//   {"custom_id", "body": {"messages": […], …}}           an OpenAI batch line
//   {"prompt": "raw text"}                                no template
//   {"input_ids": […], "loss_mask": […]}                  no mask: all ones
//   {"prompt_token_ids": […], "token_ids": […]}           another engine's answer
// and on each, optionally: id, source, meta (an object of scalars), thinking, max_new_tokens.
// A null counts as missing; other fields are named in ParsedLine::ignored, a "prompt" beside a chat
// or another engine's ids too. A chat and ids in one line are refused, and a "prompt" beside
// input_ids.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/status.h"
#include "statetap/v1/jobs.pb.h"

namespace statetap {

// By its last turn a chat is open (a user's or a tool's), finished (the assistant's) or neither (an
// empty one, a system message).
enum class LineKind { kPrompt, kOpenChat, kFinishedChat, kOtherChat, kTokens };

struct ParsedLine {
  v1::SampleInput sample;
  LineKind kind = LineKind::kOtherChat;
  int answers = 0;                   // assistant messages of a chat
  std::vector<std::string> ignored;  // members that nothing reads
};

// What lines of this kind are for, where --mode does not say: GENERATE for open chats and prompts,
// PREFILL for ids and finished chats, UNSPECIFIED for chats that could be either. turns "each"
// makes every chat one to prefill, "regenerate" one to answer.
v1::JobMode ModeOf(LineKind kind, std::string_view turns);

// INVALID_ARGUMENT says which field, what was found and what would fix it: no JSON, no UTF-8, a key
// given twice, no known shape, a field of a wrong kind, a sampling field that cannot be honoured.
// What the messages hold is not looked at: a template's refusal rejects a sample, not a file.
// `default_source` is used where the line has none; source_line is left to the caller.
absl::StatusOr<ParsedLine> ParseSampleLine(std::string_view line, std::string_view default_source);

}  // namespace statetap
