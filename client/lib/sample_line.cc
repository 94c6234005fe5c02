#include "client/lib/sample_line.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "client/lib/sharegpt.h"
#include "extractor/base/json.h"

namespace statetap {
namespace {

constexpr size_t kMaxMessageBytes = 300;  // a parser's message may quote a line of megabytes

absl::Status Bad(std::string_view field, std::string_view found, std::string_view remedy) {
  return absl::InvalidArgumentError(fmt::format("{} {}; {}", field, found, remedy));
}

// "is a string", "is 3": short for whatever it is.
std::string Found(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return "is null";
    case Json::value_t::object: return "is an object";
    case Json::value_t::array: return "is a list";
    case Json::value_t::string:
      if (const auto& text = value.get_ref<const std::string&>(); text.size() <= 40)
        return fmt::format("is \"{}\"", text);
      return "is a string";
    default: return fmt::format("is {}", DumpJson(value));
  }
}

absl::Status ClarifyJsonError(const absl::Status& status, std::string_view line) {
  std::string message(MessageOf(status));
  if (message.find("UTF-8") != std::string::npos) {
    return absl::InvalidArgumentError(
        fmt::format("not UTF-8 text ({}); convert the file with iconv -t UTF-8",
                    message.substr(0, message.find(':'))));
  }
  if (line.find_first_not_of(" \t\r") != std::string_view::npos &&
      line[line.find_first_not_of(" \t\r")] == '[') {
    return absl::InvalidArgumentError(
        "a line must be one JSON object, and this one begins a list; "
        "make JSON lines of a list with jq -c '.[]' FILE");
  }
  if (message.size() > kMaxMessageBytes) message = message.substr(0, kMaxMessageBytes) + "…";
  return absl::InvalidArgumentError(message + "; a line must be one JSON object");
}

// Integers keep their form in JSON: 3.0 is refused, as it is no count.
absl::StatusOr<int32_t> Count(const Json& value, std::string_view field) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const bool fits = value.is_number_integer() &&
                    (value.is_number_unsigned() ? value.get<uint64_t>() <= uint64_t{kMost}
                                                : value.get<int64_t>() >= 1);
  if (!fits || value.get<int64_t>() < 1)
    return Bad(field, Found(value), fmt::format("give an integer from 1 to {}", kMost));
  return value.get<int32_t>();
}

absl::StatusOr<double> Number(const Json& value, std::string_view field) {
  if (!value.is_number() || !std::isfinite(value.get<double>()))
    return Bad(field, Found(value), "give a number");
  return value.get<double>();
}

absl::Status AppendIds(const Json& value, std::string_view field, v1::TokenIds& to) {
  if (!value.is_array()) return Bad(field, Found(value), "give a list of token ids");
  to.mutable_ids()->Reserve(to.ids_size() + static_cast<int>(value.size()));
  for (size_t i = 0; i < value.size(); ++i) {
    const Json& id = value[i];
    const bool fits = id.is_number_integer() &&
                      (id.is_number_unsigned()
                           ? id.get<uint64_t>() <= uint64_t{std::numeric_limits<int32_t>::max()}
                           : id.get<int64_t>() >= std::numeric_limits<int32_t>::min());
    if (!fits)
      return Bad(fmt::format("{}[{}]", field, i), Found(id), "a token id is an integer below 2^31");
    to.add_ids(id.get<int32_t>());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> MaskBytes(const Json& value, size_t num_tokens) {
  if (!value.is_array()) return Bad("loss_mask", Found(value), "give a list of 0 and 1");
  if (value.size() != num_tokens)
    return Bad("loss_mask", fmt::format("has {} values for {} input_ids", value.size(), num_tokens),
               "give one for each token, or none for a mask of ones");
  std::string mask;
  mask.reserve(value.size());
  for (size_t i = 0; i < value.size(); ++i) {
    const Json& bit = value[i];
    const bool one = bit == true || bit == 1, zero = bit == false || bit == 0;
    if (!one && !zero)
      return Bad(fmt::format("loss_mask[{}]", i), Found(bit), "only 0 and 1 are known");
    mask.push_back(one ? '\1' : '\0');
  }
  return mask;
}

bool HasRole(const Json& message, std::string_view role) {
  const Json* value = FindMember(message, "role");
  return value != nullptr && value->is_string() && value->get_ref<const std::string&>() == role;
}

LineKind KindOfChat(const Json& messages) {
  if (messages.empty()) return LineKind::kOtherChat;
  const Json& last = messages.back();
  if (HasRole(last, "assistant")) return LineKind::kFinishedChat;
  return HasRole(last, "user") || HasRole(last, "tool") ? LineKind::kOpenChat
                                                        : LineKind::kOtherChat;
}

absl::Status SetChat(const Json& messages, const Json* tools, std::string_view prefix,
                     ParsedLine& to) {
  if (!messages.is_array())
    return Bad(fmt::format("{}messages", prefix), Found(messages),
               "give a list of {\"role\", \"content\"} objects");
  if (tools != nullptr && !tools->is_array())
    return Bad(fmt::format("{}tools", prefix), Found(*tools), "give a list of tool declarations");
  v1::ChatText& chat = *to.sample.mutable_chat();
  chat.set_messages_json(DumpJson(messages));
  if (tools != nullptr) chat.set_tools_json(DumpJson(*tools));
  to.kind = KindOfChat(messages);
  to.answers =
      static_cast<int>(std::count_if(messages.begin(), messages.end(), [](const Json& message) {
        return HasRole(message, "assistant");
      }));
  return absl::OkStatus();
}

absl::Status SetPrompt(const Json& prompt, std::string_view field, ParsedLine& to) {
  if (!prompt.is_string())
    return Bad(
        field, Found(prompt),
        prompt.is_array() ? "give ids as input_ids, a chat as messages, or a text" : "give a text");
  to.sample.set_prompt(prompt.get<std::string>());
  to.kind = LineKind::kPrompt;
  return absl::OkStatus();
}

// Fields of an OpenAI request that change what is sampled and that a sample has no room for, with
// the values that change nothing.
absl::Status RefuseUnknownSampling(const Json& body) {
  static const std::array<std::pair<const char*, Json>, 12> kNeutral = {{
      {"n", 1},
      {"best_of", 1},
      {"stop", Json::array()},
      {"seed", nullptr},
      {"top_k", -1},
      {"min_p", 0},
      {"frequency_penalty", 0},
      {"presence_penalty", 0},
      {"repetition_penalty", 1},
      {"logit_bias", Json::object()},
      {"response_format", Json{{"type", "text"}}},
      {"tool_choice", "auto"},
  }};
  for (const auto& [name, neutral] : kNeutral) {
    const Json* value = FindMember(body, name);
    if (value == nullptr || *value == neutral) continue;
    const std::string_view remedy = std::string_view(name) == "seed"
                                        ? "remove it and give the job's --seed"
                                        : "sampling here knows temperature, top_p and max_tokens; "
                                          "remove the field";
    return Bad(fmt::format("body.{}", name), Found(*value), remedy);
  }
  return absl::OkStatus();
}

absl::Status SetSampling(const Json& body, v1::SampleInput& sample) {
  STATETAP_RETURN_IF_ERROR(RefuseUnknownSampling(body));
  if (const Json* value = FindMember(body, "temperature")) {
    STATETAP_ASSIGN_OR_RETURN(const double temperature, Number(*value, "body.temperature"));
    sample.set_temperature(temperature);
  }
  if (const Json* value = FindMember(body, "top_p")) {
    STATETAP_ASSIGN_OR_RETURN(const double top_p, Number(*value, "body.top_p"));
    sample.set_top_p(top_p);
  }
  // The newer name wins, as it does at OpenAI.
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {
    if (const Json* value = FindMember(body, name)) {
      STATETAP_ASSIGN_OR_RETURN(const int32_t count, Count(*value, fmt::format("body.{}", name)));
      sample.set_max_new_tokens(count);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Switch(const Json& value, std::string_view field) {
  if (!value.is_boolean()) return Bad(field, Found(value), "give true or false");
  return value.get<bool>();
}

absl::Status SetBatchLine(const Json& body, ParsedLine& to) {
  if (!body.is_object()) return Bad("body", Found(body), "give the request as an object");
  if (const Json* messages = FindMember(body, "messages")) {
    STATETAP_RETURN_IF_ERROR(SetChat(*messages, FindMember(body, "tools"), "body.", to));
  } else if (const Json* prompt = FindMember(body, "prompt")) {
    STATETAP_RETURN_IF_ERROR(SetPrompt(*prompt, "body.prompt", to));
  } else {
    return Bad("body", "has neither messages nor prompt", "give one of them");
  }
  if (const Json* arguments = FindMember(body, "chat_template_kwargs")) {
    if (const Json* thinking = FindMember(*arguments, "thinking")) {
      STATETAP_ASSIGN_OR_RETURN(const bool on,
                                Switch(*thinking, "body.chat_template_kwargs.thinking"));
      to.sample.set_thinking(on);
    }
  }
  return SetSampling(body, to.sample);
}

absl::Status SetTokens(const Json& line, const Json& ids, ParsedLine& to) {
  v1::TokenIds& tokens = *to.sample.mutable_tokens();
  STATETAP_RETURN_IF_ERROR(AppendIds(ids, "input_ids", tokens));
  if (const Json* mask = FindMember(line, "loss_mask")) {
    STATETAP_ASSIGN_OR_RETURN(*tokens.mutable_loss_mask(),
                              MaskBytes(*mask, static_cast<size_t>(tokens.ids_size())));
  }
  to.kind = LineKind::kTokens;
  return absl::OkStatus();
}

absl::Status SetAnswer(const Json& line, const Json& prompt, ParsedLine& to) {
  const Json* answer = FindMember(line, "token_ids");
  if (answer == nullptr)
    return Bad("token_ids", "is missing",
               "prompt_token_ids needs the answer's token_ids beside it; ids alone are input_ids");
  v1::TokenIds& tokens = *to.sample.mutable_tokens();
  STATETAP_RETURN_IF_ERROR(AppendIds(prompt, "prompt_token_ids", tokens));
  const auto prompt_tokens = static_cast<size_t>(tokens.ids_size());
  STATETAP_RETURN_IF_ERROR(AppendIds(*answer, "token_ids", tokens));
  std::string mask(prompt_tokens, '\0');
  mask.resize(static_cast<size_t>(tokens.ids_size()), '\1');
  tokens.set_loss_mask(std::move(mask));
  to.kind = LineKind::kTokens;
  return absl::OkStatus();
}

absl::Status SetContent(const Json& line, ParsedLine& to) {
  const Json* body = FindMember(line, "body");
  const Json* messages = FindMember(line, "messages");
  const Json* conversations = FindMember(line, "conversations");
  const Json* input_ids = FindMember(line, "input_ids");
  const Json* prompt_ids = FindMember(line, "prompt_token_ids");
  const Json* prompt = FindMember(line, "prompt");
  const int contents = (body != nullptr) + (messages != nullptr) + (conversations != nullptr) +
                       (input_ids != nullptr) + (prompt_ids != nullptr);
  if (contents > 1)
    return Bad("the line",
               "has more than one of messages, conversations, body, input_ids, "
               "prompt_token_ids",
               "keep the one that is meant");
  if (input_ids != nullptr && prompt != nullptr)
    return Bad("the line", "has both input_ids and prompt", "keep the one that is meant");
  if (body != nullptr) return SetBatchLine(*body, to);
  if (messages != nullptr) return SetChat(*messages, FindMember(line, "tools"), "", to);
  if (conversations != nullptr) {
    STATETAP_ASSIGN_OR_RETURN(const ChatJson chat, ChatOfShareGpt(line, *conversations));
    return SetChat(chat.messages, chat.tools.is_null() ? nullptr : &chat.tools, "", to);
  }
  if (input_ids != nullptr) return SetTokens(line, *input_ids, to);
  if (prompt_ids != nullptr) return SetAnswer(line, *prompt_ids, to);
  if (prompt != nullptr) return SetPrompt(*prompt, "prompt", to);
  return Bad("the line",
             "has none of messages, prompt, input_ids, prompt_token_ids with "
             "token_ids, conversations, body",
             "see `statetap submit --help` for the shapes that are read");
}

absl::Status SetId(const Json& line, v1::SampleInput& sample) {
  for (const char* name : {"custom_id", "id"}) {
    const Json* id = FindMember(line, name);
    if (id == nullptr) continue;
    if (id->is_number_integer() || BigInteger(*id)) {
      sample.set_id(DumpJson(*id));
    } else if (id->is_string()) {
      sample.set_id(id->get<std::string>());
    } else {
      return Bad(name, Found(*id), "give a text or an integer");
    }
  }
  return absl::OkStatus();
}

absl::Status SetMeta(const Json& meta, v1::SampleInput& sample) {
  if (!meta.is_object()) return Bad("meta", Found(meta), "give an object of scalars");
  for (const auto& [key, value] : meta.items()) {
    if (value.is_structured())
      return Bad(fmt::format("meta.{}", key), Found(value),
                 "give a text, a number, true, false or null");
  }
  sample.set_meta_json(DumpJson(meta));
  return absl::OkStatus();
}

absl::Status SetOptionalFields(const Json& line, std::string_view default_source,
                               v1::SampleInput& sample) {
  STATETAP_RETURN_IF_ERROR(SetId(line, sample));
  sample.set_source(std::string(default_source));
  if (const Json* source = FindMember(line, "source")) {
    if (!source->is_string()) return Bad("source", Found(*source), "give a text");
    sample.set_source(source->get<std::string>());
  }
  if (const Json* meta = FindMember(line, "meta")) STATETAP_RETURN_IF_ERROR(SetMeta(*meta, sample));
  if (const Json* thinking = FindMember(line, "thinking")) {
    STATETAP_ASSIGN_OR_RETURN(const bool on, Switch(*thinking, "thinking"));
    sample.set_thinking(on);
  }
  if (const Json* count = FindMember(line, "max_new_tokens")) {
    STATETAP_ASSIGN_OR_RETURN(const int32_t most, Count(*count, "max_new_tokens"));
    sample.set_max_new_tokens(most);
  }
  return absl::OkStatus();
}

// Members that a line of this shape has no use for.
std::vector<std::string> IgnoredFields(const Json& line) {
  using Names = std::vector<std::string_view>;
  static const Names kAlways = {"id", "custom_id", "source", "meta", "thinking", "max_new_tokens"};
  static const std::pair<std::string_view, Names> kShapes[] = {
      {"body", {"body", "method", "url"}},
      {"messages", {"messages", "tools"}},
      {"conversations", {"conversations", "system", "tools"}},
      {"input_ids", {"input_ids", "loss_mask"}},
      {"prompt_token_ids", {"prompt_token_ids", "token_ids"}},
      {"prompt", {"prompt"}}};
  const Names* shape = &kAlways;
  for (const auto& [content, names] : kShapes) {
    if (FindMember(line, content) == nullptr) continue;
    shape = &names;
    break;
  }
  const auto knows = [](const Names& names, std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  std::vector<std::string> ignored;
  for (const auto& [name, value] : line.items()) {
    if (!value.is_null() && !knows(kAlways, name) && !knows(*shape, name)) ignored.push_back(name);
  }
  return ignored;
}

}  // namespace

v1::JobMode ModeOf(LineKind kind, std::string_view turns) {
  if (kind == LineKind::kTokens) return v1::JOB_MODE_PREFILL;
  if (kind == LineKind::kPrompt || turns == "regenerate") return v1::JOB_MODE_GENERATE;
  if (kind == LineKind::kFinishedChat || turns == "each") return v1::JOB_MODE_PREFILL;
  return kind == LineKind::kOpenChat ? v1::JOB_MODE_GENERATE : v1::JOB_MODE_UNSPECIFIED;
}

absl::StatusOr<ParsedLine> ParseSampleLine(std::string_view line, std::string_view default_source) {
  absl::StatusOr<Json> json = ParseJson(line);
  if (!json.ok()) return ClarifyJsonError(json.status(), line);
  if (!json->is_object())
    return Bad("the line", Found(*json),
               json->is_array() ? "make JSON lines of a list with jq -c '.[]' FILE"
                                : "a line must be one JSON object");
  ParsedLine parsed;
  STATETAP_RETURN_IF_ERROR(SetContent(*json, parsed));
  STATETAP_RETURN_IF_ERROR(SetOptionalFields(*json, default_source, parsed.sample));
  parsed.ignored = IgnoredFields(*json);
  return parsed;
}

}  // namespace statetap
