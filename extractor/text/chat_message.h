// One message of a chat, read and checked: what a template needs, with null taken as missing.
#pragma once

#include <string>
#include <vector>

#include "extractor/base/json_fwd.h"
#include "extractor/base/status.h"

namespace statetap {

struct ContentPart {
  enum class Kind { kText, kImage, kVideo, kUnknown } kind = Kind::kText;
  std::string type;  // as given
  std::string text;
  // The vendor's K2-Instruct template takes a part with such a key for an image whatever its type.
  bool has_image_key = false;
};

struct ToolCall {
  std::string id;         // as given; empty where it is missing
  std::string name;       // of the function; empty where it is missing
  std::string arguments;  // a string as given, else JSON as Python prints it
};

struct ChatMessage {
  std::string role;
  std::string name;  // the role where the message has none
  std::vector<ContentPart> content;
  std::string reasoning;  // reasoning_content
  std::vector<ToolCall> tool_calls;
  std::string tool_call_id;

  bool IsAssistant() const { return role == "assistant"; }
  // An answer that ends a turn, unlike one that waits for tools.
  bool IsPlainAnswer() const { return IsAssistant() && tool_calls.empty(); }
};

// INVALID_ARGUMENT names message and field: no list of objects; a role that is no name; content
// that is neither text, a list of parts nor null; tool calls without function or arguments.
absl::StatusOr<std::vector<ChatMessage>> ReadMessages(const Json& messages);

}  // namespace statetap
