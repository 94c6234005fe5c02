// ShareGPT conversations as OpenAI-style messages.
#pragma once

#include "extractor/base/json.h"
#include "extractor/base/status.h"

namespace statetap {

struct ChatJson {
  Json messages;
  Json tools;  // null where there are none
};

// `conversations`: the line's list of {"from", "value"} turns: human, user · gpt, assistant,
// chatgpt, bot, model · system · tool, function, observation, function_response, tool_response ·
// function_call (a JSON object with name and arguments, or a list of them). Turns with "role" are
// messages already and pass as they are. The line's "system" text comes first; its "tools" may be a
// list or that list as JSON text. INVALID_ARGUMENT names the turn and the field.
absl::StatusOr<ChatJson> ChatOfShareGpt(const Json& line, const Json& conversations);

}  // namespace statetap
