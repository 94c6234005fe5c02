#include "server/web/api_request.h"

#include "extractor/base/text.h"
#include "proto/messages/sample_text.h"
#include "server/web/json_fields.h"

namespace statetap {
namespace {

constexpr size_t kMostPrompts = 2048, kMostStops = 64;
constexpr int kDefaultNewTokens = 16;  // of /v1/completions, as everywhere

absl::Status CheckModel(JsonFields& fields, const ServedModel& model) {
  STATETAP_ASSIGN_OR_RETURN(const auto name, fields.Text("model"));
  if (!name || *name == model.name || *name == model.path) return absl::OkStatus();
  return absl::NotFoundError(
      fmt::format("model: \"{}\" is not served here; give \"{}\", or leave it out",
                  CutMiddle(*name, 200), model.name));
}

absl::StatusOr<std::vector<std::string>> TakeStops(JsonFields& fields) {
  std::vector<std::string> stops;
  const Json* given = fields.Take("stop");
  if (given == nullptr) return stops;
  const Json list = given->is_array() ? *given : Json::array({*given});
  for (const Json& one : list) {
    if (!one.is_string() || one.get_ref<const std::string&>().empty() || list.size() > kMostStops)
      return fields.Refuse("stop", fmt::format("give a text that is not empty, or a list of at "
                                               "most {} of them",
                                               kMostStops));
    stops.push_back(one.get<std::string>());
  }
  return stops;
}

absl::Status TakeStreaming(JsonFields& fields, ApiRequest& request) {
  STATETAP_ASSIGN_OR_RETURN(request.stream, fields.Flag("stream", false));
  const Json* given = fields.Take("stream_options");
  if (given == nullptr) return absl::OkStatus();
  if (!given->is_object() || !request.stream)
    return fields.Refuse("stream_options", "give an object beside stream true, or leave it out");
  JsonFields options(*given, "stream_options.");
  STATETAP_ASSIGN_OR_RETURN(request.stream_usage, options.Flag("include_usage", false));
  return options.NoOthers();
}

// What both kinds have, `prompts`, scores and lengths left out.
absl::Status TakeCommon(JsonFields& fields, const ApiDefaults& defaults, ApiRequest& request) {
  STATETAP_RETURN_IF_ERROR(CheckModel(fields, defaults.model));
  v1::JobOptions& options = request.options;
  STATETAP_ASSIGN_OR_RETURN(const auto temperature, fields.Number("temperature", 0, 100));
  if (temperature) options.set_temperature(*temperature);
  STATETAP_ASSIGN_OR_RETURN(const auto top_p, fields.Number("top_p", 1e-9, 1));
  if (top_p) options.set_top_p(*top_p);
  STATETAP_ASSIGN_OR_RETURN(const auto seed, fields.Integer("seed", INT64_MIN, INT64_MAX));
  options.set_seed(seed ? static_cast<uint64_t>(*seed) : defaults.seed);
  options.set_max_length(defaults.most_tokens);
  STATETAP_ASSIGN_OR_RETURN(request.stop, TakeStops(fields));
  STATETAP_RETURN_IF_ERROR(TakeStreaming(fields, request));
  STATETAP_RETURN_IF_ERROR(fields.Integer("n", 1, 1).status());
  for (const char* penalty : {"presence_penalty", "frequency_penalty"})
    STATETAP_RETURN_IF_ERROR(fields.Only(penalty, {0}, "give 0, or leave it out"));
  STATETAP_RETURN_IF_ERROR(fields.Only("logit_bias", {Json::object()}, "leave it out"));
  fields.Ignore("user");
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> IdsOf(const JsonFields& fields, std::string_view name,
                                           const Json& list, const ServedModel& model) {
  std::vector<int32_t> ids;
  for (const Json& id : list) {
    const bool known =
        id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(model.config.vocab);
    if (!known)
      return fields.Refuse(
          name, fmt::format("token ids of this model are 0 to {}", model.config.vocab - 1));
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

// A text, ids, or a list of either.
absl::StatusOr<std::vector<v1::SampleInput>> TakePrompts(JsonFields& fields,
                                                         const ServedModel& model) {
  const Json* given = fields.Take("prompt");
  const auto refuse = [&] {
    return fields.Refuse("prompt",
                         fmt::format("give a text, a list of token ids, or a list of at most {} "
                                     "texts or lists of ids, none of them empty",
                                     kMostPrompts));
  };
  if (given == nullptr || given->empty()) return refuse();
  const bool one = !given->is_array() || given->front().is_number();
  const Json list = one ? Json::array({*given}) : *given;
  if (list.size() > kMostPrompts) return refuse();
  std::vector<v1::SampleInput> prompts;
  for (const Json& prompt : list) {
    if (prompt.is_string()) {
      prompts.emplace_back().set_prompt(prompt.get<std::string>());
    } else if (prompt.is_array()) {
      STATETAP_ASSIGN_OR_RETURN(const auto ids, IdsOf(fields, "prompt", prompt, model));
      prompts.emplace_back().mutable_tokens()->mutable_ids()->Assign(ids.begin(), ids.end());
    } else {
      return refuse();
    }
  }
  return prompts;
}

absl::Status TakeThinking(JsonFields& fields, v1::JobOptions& options) {
  const Json* given = fields.Take("chat_template_kwargs");
  if (given == nullptr) return absl::OkStatus();
  if (!given->is_object())
    return fields.Refuse("chat_template_kwargs", "give an object, as {\"thinking\": false}");
  JsonFields inner(*given, "chat_template_kwargs.");
  STATETAP_ASSIGN_OR_RETURN(const bool thinking, inner.Flag("thinking", true));
  options.set_thinking(thinking);
  return inner.NoOthers();
}

// messages, tools and how they are rendered.
absl::StatusOr<v1::SampleInput> TakeChat(JsonFields& fields, v1::JobOptions& options) {
  const Json* messages = fields.Take("messages");
  if (messages == nullptr || !messages->is_array())
    return fields.Refuse("messages", "give a list of messages, the user's last");
  v1::SampleInput sample;
  sample.mutable_chat()->set_messages_json(DumpJson(*messages));
  const Json* tools = fields.Take("tools");
  if (tools != nullptr && !tools->is_array())
    return fields.Refuse("tools", "give a list of declarations, or leave it out");
  if (tools != nullptr) sample.mutable_chat()->set_tools_json(DumpJson(*tools));
  STATETAP_RETURN_IF_ERROR(TakeThinking(fields, options));
  return sample;
}

}  // namespace

absl::StatusOr<ApiRequest> ParseCompletionRequest(std::string_view body,
                                                  const ApiDefaults& defaults) {
  STATETAP_ASSIGN_OR_RETURN(JsonFields fields, JsonFields::Parse(body, "the request"));
  ApiRequest request;
  STATETAP_RETURN_IF_ERROR(TakeCommon(fields, defaults, request));
  STATETAP_ASSIGN_OR_RETURN(request.prompts, TakePrompts(fields, defaults.model));
  request.options.set_parse_special(true);
  STATETAP_ASSIGN_OR_RETURN(request.echo, fields.Flag("echo", false));
  STATETAP_ASSIGN_OR_RETURN(const auto new_tokens,
                            fields.Integer("max_tokens", request.echo ? 0 : 1, INT32_MAX));
  const auto most = static_cast<int32_t>(new_tokens.value_or(kDefaultNewTokens));
  request.generate = most > 0;
  request.options.set_max_new_tokens(most);
  // More would take a sort of the vocabulary, which no backend does.
  STATETAP_ASSIGN_OR_RETURN(const auto alternatives, fields.Integer("logprobs", 0, 1));
  request.scores = alternatives.has_value();
  request.alternatives = static_cast<int>(alternatives.value_or(0));
  request.options.set_logprobs(request.scores);
  if (request.echo && request.stream)
    return fields.Refuse("echo", "a stream has the answer alone; leave out echo, or stream");
  STATETAP_RETURN_IF_ERROR(fields.Integer("best_of", 1, 1).status());
  STATETAP_RETURN_IF_ERROR(fields.Only("suffix", {""}, "leave it out: the model continues a text"));
  STATETAP_RETURN_IF_ERROR(fields.NoOthers());
  return request;
}

absl::StatusOr<ApiRequest> ParseChatRequest(std::string_view body, const ApiDefaults& defaults) {
  STATETAP_ASSIGN_OR_RETURN(JsonFields fields, JsonFields::Parse(body, "the request"));
  ApiRequest request{.chat = true};
  STATETAP_RETURN_IF_ERROR(TakeCommon(fields, defaults, request));
  STATETAP_ASSIGN_OR_RETURN(const v1::SampleInput chat, TakeChat(fields, request.options));
  request.prompts = {chat};
  STATETAP_ASSIGN_OR_RETURN(const auto old_name, fields.Integer("max_tokens", 1, INT32_MAX));
  STATETAP_ASSIGN_OR_RETURN(const auto new_name,
                            fields.Integer("max_completion_tokens", 1, INT32_MAX));
  if (old_name && new_name && *old_name != *new_name)
    return fields.Refuse("max_tokens", "max_completion_tokens says something else; give one");
  const auto new_tokens = new_name ? new_name : old_name;
  if (new_tokens) request.options.set_max_new_tokens(static_cast<int32_t>(*new_tokens));
  STATETAP_ASSIGN_OR_RETURN(request.scores, fields.Flag("logprobs", false));
  STATETAP_ASSIGN_OR_RETURN(const auto alternatives, fields.Integer("top_logprobs", 0, 1));
  if (alternatives && !request.scores)
    return fields.Refuse("top_logprobs", "give logprobs true beside it, or leave it out");
  request.alternatives = static_cast<int>(alternatives.value_or(0));
  request.options.set_logprobs(request.scores);
  STATETAP_RETURN_IF_ERROR(
      fields.Only("tool_choice", {"auto"}, "the model alone decides; give auto, or leave it out"));
  STATETAP_RETURN_IF_ERROR(fields.Only("parallel_tool_calls", {true}, "leave it out"));
  STATETAP_RETURN_IF_ERROR(fields.Only("response_format", {{{"type", "text"}}},
                                       "give {\"type\": \"text\"}, or leave it out"));
  STATETAP_RETURN_IF_ERROR(fields.NoOthers());
  return request;
}

absl::StatusOr<std::vector<int32_t>> ParseTokenizeRequest(std::string_view body,
                                                          const ServedModel& model) {
  STATETAP_ASSIGN_OR_RETURN(JsonFields fields, JsonFields::Parse(body, "the request"));
  STATETAP_RETURN_IF_ERROR(CheckModel(fields, model));
  v1::JobOptions options;
  v1::SampleInput sample;
  bool generate = true;
  if (fields.Take("messages") != nullptr) {
    STATETAP_ASSIGN_OR_RETURN(sample, TakeChat(fields, options));
    STATETAP_ASSIGN_OR_RETURN(generate, fields.Flag("add_generation_prompt", true));
  } else {
    STATETAP_ASSIGN_OR_RETURN(const auto prompt, fields.Text("prompt"));
    if (!prompt) return fields.Refuse("prompt", "give a text, or messages");
    if (prompt->empty()) return std::vector<int32_t>();
    sample.set_prompt(*prompt);
    options.set_parse_special(true);
  }
  // The templates of this family write all that is special themselves; a text has nothing added.
  fields.Ignore("add_special_tokens");
  STATETAP_RETURN_IF_ERROR(fields.NoOthers());
  STATETAP_ASSIGN_OR_RETURN(const TextPlan plan, PlanText(options, generate, model.template_kind));
  const SampleText text = TextsOf(sample, plan, model.text(), TextPurpose::kShow)[0];
  if (text.refusal) return absl::InvalidArgumentError(text.refusal->message);
  return text.ids;
}

absl::StatusOr<std::vector<int32_t>> ParseDetokenizeRequest(std::string_view body,
                                                            const ServedModel& model) {
  STATETAP_ASSIGN_OR_RETURN(JsonFields fields, JsonFields::Parse(body, "the request"));
  STATETAP_RETURN_IF_ERROR(CheckModel(fields, model));
  const Json* tokens = fields.Take("tokens");
  if (tokens == nullptr || !tokens->is_array())
    return fields.Refuse("tokens", "give a list of token ids");
  STATETAP_RETURN_IF_ERROR(fields.NoOthers());
  return IdsOf(fields, "tokens", *tokens, model);
}

}  // namespace statetap
