#include "client/lib/sharegpt.h"

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "extractor/base/json.h"

namespace statetap {
namespace {

constexpr std::array<std::pair<std::string_view, std::string_view>, 14> kRoles = {{
    {"human", "user"},
    {"user", "user"},
    {"gpt", "assistant"},
    {"assistant", "assistant"},
    {"chatgpt", "assistant"},
    {"bot", "assistant"},
    {"model", "assistant"},
    {"system", "system"},
    {"tool", "tool"},
    {"function", "tool"},
    {"observation", "tool"},
    {"function_response", "tool"},
    {"tool_response", "tool"},
    {"function_call", "call"},
}};

absl::Status Bad(size_t turn, std::string_view what) {
  return absl::InvalidArgumentError(fmt::format("conversations[{}]{}", turn, what));
}

// Tool calls get ids in Kimi's form, "functions.NAME:N" with N counted through the chat.
absl::StatusOr<Json> CallMessage(size_t turn, const Json& value, int& calls_so_far) {
  constexpr std::string_view kRemedy =
      ".value of a function_call must be JSON with name and arguments, or a list of such";
  if (!value.is_string()) return Bad(turn, kRemedy);
  absl::StatusOr<Json> parsed = ParseJson(value.get_ref<const std::string&>());
  if (!parsed.ok()) return Bad(turn, kRemedy);
  if (parsed->is_object()) parsed = Json::array({*std::move(parsed)});
  Json calls = Json::array();
  for (const Json& call : *parsed) {
    const Json* name = FindMember(call, "name");
    const Json* arguments = FindMember(call, "arguments");
    if (name == nullptr || !name->is_string() || arguments == nullptr) return Bad(turn, kRemedy);
    calls.push_back({{"id", fmt::format("functions.{}:{}", name->get<std::string>(), calls_so_far)},
                     {"type", "function"},
                     {"function", {{"name", *name}, {"arguments", *arguments}}}});
    ++calls_so_far;
  }
  return Json{{"role", "assistant"}, {"content", ""}, {"tool_calls", std::move(calls)}};
}

absl::StatusOr<Json> MessageOfTurn(size_t index, const Json& turn, int& calls_so_far) {
  if (!turn.is_object()) return Bad(index, " must be an object with from and value");
  if (turn.contains("role")) return turn;
  const Json* from = FindMember(turn, "from");
  if (from == nullptr || !from->is_string())
    return Bad(index, ".from is missing; give human, gpt, system, tool, …");
  const auto value = turn.find("value");
  const Json content = value == turn.end() ? Json("") : *value;
  const auto& name = from->get_ref<const std::string&>();
  for (const auto& [known, role] : kRoles) {
    if (name != known) continue;
    if (role == "call") return CallMessage(index, content, calls_so_far);
    return Json{{"role", std::string(role)}, {"content", content}};
  }
  return Bad(index, fmt::format(".from is \"{}\"; known are human, user, gpt, assistant, system, "
                                "tool, function, observation, function_call",
                                name.substr(0, 40)));
}

absl::StatusOr<Json> ToolsOfLine(const Json& line) {
  const Json* tools = FindMember(line, "tools");
  if (tools == nullptr) return Json(nullptr);
  if (!tools->is_string()) return *tools;
  if (tools->get_ref<const std::string&>().empty()) return Json(nullptr);
  absl::StatusOr<Json> parsed = ParseJson(tools->get_ref<const std::string&>());
  if (!parsed.ok() || !parsed->is_array())
    return absl::InvalidArgumentError(
        "tools is a text that is no JSON list; give a list of tool declarations");
  return parsed;
}

// A tool's answer needs the id of the call it answers where the calls were given ids here.
void LinkAnswers(Json& messages) {
  Json ids = Json::array();
  size_t next = 0;
  for (Json& message : messages) {
    if (const Json* calls = FindMember(message, "tool_calls"); calls != nullptr) {
      if (!calls->is_array()) return;
      ids = Json::array();
      next = 0;
      for (const Json& call : *calls) ids.push_back(call.value("id", Json()));
    } else if (message.is_object() && message.value("role", Json()) == "tool" &&
               next < ids.size() && !message.contains("tool_call_id")) {
      message["tool_call_id"] = ids[next++];
    }
  }
}

}  // namespace

absl::StatusOr<ChatJson> ChatOfShareGpt(const Json& line, const Json& conversations) {
  if (!conversations.is_array())
    return absl::InvalidArgumentError(
        "conversations is no list; give a list of {\"from\", \"value\"} objects");
  ChatJson chat{.messages = Json::array()};
  if (const Json* system = FindMember(line, "system")) {
    if (!system->is_string()) return absl::InvalidArgumentError("system is no text; give a text");
    if (!system->get_ref<const std::string&>().empty())
      chat.messages.push_back({{"role", "system"}, {"content", *system}});
  }
  int calls_made = 0;
  for (size_t i = 0; i < conversations.size(); ++i) {
    STATETAP_ASSIGN_OR_RETURN(Json message, MessageOfTurn(i, conversations[i], calls_made));
    chat.messages.push_back(std::move(message));
  }
  if (calls_made > 0) LinkAnswers(chat.messages);
  STATETAP_ASSIGN_OR_RETURN(chat.tools, ToolsOfLine(line));
  return chat;
}

}  // namespace statetap
