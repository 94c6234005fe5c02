#include "extractor/text/chat_message.h"

#include "extractor/base/json.h"
#include "extractor/text/python_text.h"

namespace statetap {
namespace {

absl::Status FieldError(std::string_view field, std::string_view what) {
  return absl::InvalidArgumentError(fmt::format("{} {}", field, what));
}

// A scalar member as the vendor's template prints it; empty where it is missing or null.
absl::StatusOr<std::string> ReadScalar(const Json& object, std::string_view key) {
  const Json* value = FindMember(object, key);
  if (value == nullptr) return "";
  const std::optional<std::string> text = PythonStr(*value);
  if (!text)
    return FieldError(key, fmt::format("has type {}; it must be a string", value->type_name()));
  return *text;
}

ContentPart::Kind KindOf(const Json& part) {
  const Json* type = FindMember(part, "type");
  if (type == nullptr || *type == "text") return ContentPart::Kind::kText;
  if (*type == "image" || *type == "image_url") return ContentPart::Kind::kImage;
  if (*type == "video" || *type == "video_url") return ContentPart::Kind::kVideo;
  return ContentPart::Kind::kUnknown;
}

absl::StatusOr<std::vector<ContentPart>> ReadContent(const Json& message) {
  std::vector<ContentPart> parts;
  const Json* content = FindMember(message, "content");
  if (content == nullptr) return parts;
  if (content->is_string()) {
    parts.push_back({.text = content->get<std::string>()});
    return parts;
  }
  if (!content->is_array())
    return FieldError("content",
                      fmt::format("has type {}; it must be a string, a list of parts or null",
                                  content->type_name()));
  for (size_t i = 0; i < content->size(); ++i) {
    const Json& part = (*content)[i];
    const std::string field = fmt::format("content[{}]", i);
    if (!part.is_object())
      return FieldError(field, fmt::format("has type {}; a part is an object like "
                                           "{{\"type\": \"text\", \"text\": \"…\"}}",
                                           part.type_name()));
    absl::StatusOr<std::string> text = ReadScalar(part, "text");
    if (!text.ok()) return WithContext(text.status(), field);
    const Json* type = FindMember(part, "type");
    parts.push_back({.kind = KindOf(part),
                     .type = type != nullptr ? PythonStr(*type).value_or("") : "",
                     .text = *std::move(text),
                     .has_image_key = part.contains("image") || part.contains("image_url")});
  }
  return parts;
}

absl::StatusOr<ToolCall> ReadToolCall(const Json& call) {
  const Json* function = FindMember(call, "function");
  if (function == nullptr || !function->is_object())
    return FieldError("function", "is missing or no object");
  // Null arguments are printed as JSON's null, as the vendor does: they are a value.
  const auto arguments = function->find("arguments");
  if (arguments == function->end())
    return FieldError("function.arguments", "is missing; give {} for a call without any");
  ToolCall read;
  STATETAP_ASSIGN_OR_RETURN(read.id, ReadScalar(call, "id"));
  // Nothing renders the name: whatever it is, it is no fault.
  if (const Json* name = FindMember(*function, "name"); name != nullptr && name->is_string())
    read.name = name->get<std::string>();
  read.arguments = arguments->is_string() ? arguments->get<std::string>() : PythonJson(*arguments);
  return read;
}

absl::StatusOr<std::vector<ToolCall>> ReadToolCalls(const Json& message) {
  std::vector<ToolCall> calls;
  const Json* list = FindMember(message, "tool_calls");
  if (list == nullptr || !PythonTruth(*list)) return calls;
  if (!list->is_array())
    return FieldError("tool_calls",
                      fmt::format("has type {}; it must be a list", list->type_name()));
  for (size_t i = 0; i < list->size(); ++i) {
    absl::StatusOr<ToolCall> call = ReadToolCall((*list)[i]);
    if (!call.ok()) return WithContext(call.status(), fmt::format("tool_calls[{}]", i));
    calls.push_back(*std::move(call));
  }
  return calls;
}

absl::StatusOr<ChatMessage> ReadMessage(const Json& message) {
  if (!message.is_object())
    return absl::InvalidArgumentError(
        fmt::format("has type {}; a message is an object", message.type_name()));
  ChatMessage read;
  const Json* role = FindMember(message, "role");
  if (role == nullptr || !role->is_string() || role->get_ref<const std::string&>().empty())
    return FieldError("role", "is missing or no string; give user, assistant, system or tool");
  read.role = role->get<std::string>();
  STATETAP_ASSIGN_OR_RETURN(read.name, ReadScalar(message, "name"));
  if (read.name.empty()) read.name = read.role;
  STATETAP_ASSIGN_OR_RETURN(read.content, ReadContent(message));
  STATETAP_ASSIGN_OR_RETURN(read.tool_call_id, ReadScalar(message, "tool_call_id"));
  if (!read.IsAssistant()) return read;
  STATETAP_ASSIGN_OR_RETURN(read.reasoning, ReadScalar(message, "reasoning_content"));
  STATETAP_ASSIGN_OR_RETURN(read.tool_calls, ReadToolCalls(message));
  return read;
}

}  // namespace

absl::StatusOr<std::vector<ChatMessage>> ReadMessages(const Json& messages) {
  if (!messages.is_array())
    return absl::InvalidArgumentError(
        fmt::format("messages has type {}; it must be a list", messages.type_name()));
  std::vector<ChatMessage> read;
  read.reserve(messages.size());
  for (size_t i = 0; i < messages.size(); ++i) {
    absl::StatusOr<ChatMessage> message = ReadMessage(messages[i]);
    if (!message.ok()) return WithContext(message.status(), fmt::format("messages[{}]", i));
    read.push_back(*std::move(message));
  }
  return read;
}

}  // namespace statetap
