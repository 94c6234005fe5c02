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

struct ParsedLine {
  v1::SampleInput sample;
  // What the line is by itself, where --mode does not say: GENERATE for an open chat (its last turn
  // is a user's or a tool's) and for a prompt, PREFILL for ids and finished chats, UNSPECIFIED
  // where it could be either (an empty chat).
  v1::JobMode mode = v1::JOB_MODE_UNSPECIFIED;
  std::vector<std::string> ignored;  // members that nothing reads
};

// INVALID_ARGUMENT says which field, what was found and what would fix it: no JSON, no UTF-8, a key
// given twice, no known shape, a field of a wrong kind, a sampling field that cannot be honoured.
// What the messages hold is not looked at: a template's refusal rejects a sample, not a file.
// `default_source` is used where the line has none; source_line is left to the caller.
absl::StatusOr<ParsedLine> ParseSampleLine(std::string_view line, std::string_view default_source);

}  // namespace statetap
