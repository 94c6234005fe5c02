#include "proto/messages/sample_text.h"

#include <algorithm>
#include <span>
#include <utility>

#include "extractor/base/digest.h"
#include "extractor/base/json.h"
#include "extractor/base/named_value.h"

namespace statetap {
namespace {

using Answers = Supervision::Answers;

constexpr NamedValue<Turns> kTurns[] = {
    {Turns::kLast, "last"}, {Turns::kEach, "each"}, {Turns::kRegenerate, "regenerate"}};
constexpr NamedValue<Answers> kSupervise[] = {{Answers::kLast, "last"}, {Answers::kAll, "all"}};
constexpr NamedValue<SpelledSpecials> kAssistantSpecials[] = {
    {SpelledSpecials::kText, "text"},
    {SpelledSpecials::kParsed, "parsed"},
    {SpelledSpecials::kRefused, "refused"}};

// Overwrites `value` where a name is given.
template <typename Value, size_t size>
absl::Status Choose(const NamedValue<Value> (&table)[size], const std::string& name,
                    std::string_view field, Value* value) {
  if (name.empty()) return absl::OkStatus();
  STATETAP_ASSIGN_OR_RETURN(*value, ValueOf(table, fmt::format("options.{}", field), name));
  return absl::OkStatus();
}

absl::Status CheckForMode(const TextPlan& plan) {
  if (plan.generate && plan.render.supervision.answers == Answers::kAll)
    return absl::InvalidArgumentError(
        "options.supervise: all is for mode prefill; of a generated sample the new answer alone is "
        "supervised");
  if (plan.turns == Turns::kEach && plan.generate)
    return absl::InvalidArgumentError(
        "options.turns: each takes the answers that a chat holds, which mode generate does not; "
        "give mode prefill, or turns regenerate for a new last answer");
  if (plan.turns == Turns::kRegenerate && !plan.generate)
    return absl::InvalidArgumentError(
        "options.turns: regenerate writes answers, which mode prefill does not; give mode "
        "generate, or turns last or each for the answers that are there");
  return absl::OkStatus();
}

bool IsAssistant(const Json& message) {
  const Json* role = FindMember(message, "role");
  return role != nullptr && *role == "assistant";
}

bool EndsWithAnswer(const Json& messages) {
  return messages.is_array() && !messages.empty() && IsAssistant(messages.back());
}

bool HasAnswer(const Json& messages) {
  return std::any_of(messages.begin(), messages.end(), IsAssistant);
}

// Of text that is no chat the mask is given, or all of it: nothing in it could be taken out.
std::optional<std::string> IdleSupervision(const TextPlan& plan) {
  const Supervision& supervision = plan.render.supervision;
  std::string_view option;
  if (supervision.answers == Answers::kAll) option = "supervise all";
  if (!supervision.thought) option = "supervise_thought off";
  if (!supervision.stop) option = "supervise_stop off";
  if (plan.generate || option.empty()) return std::nullopt;
  return fmt::format(
      "option {} concerns chats, and this sample is none: its loss_mask is what is supervised; "
      "submit it apart, without that option",
      option);
}

// What can be rendered and yet gives no sample of a job.
absl::Status CheckForJob(const Json& messages, bool generate) {
  if (generate && EndsWithAnswer(messages))
    return absl::InvalidArgumentError(fmt::format(
        "messages[{}] is the assistant's, so there is nothing to answer; leave that turn out, have "
        "it written anew with turns regenerate, or capture the chat as it is with mode prefill",
        messages.size() - 1));
  if (!generate && messages.is_array() && !HasAnswer(messages))
    return absl::InvalidArgumentError(
        "no message is the assistant's, so no token would be supervised; use mode generate, or "
        "give the answer");
  return CheckTextOnly(messages);  // nothing here could look at an image
}

SampleText Refused(std::string reason, std::string message, int turn = 0) {
  SampleText refused{.turn = turn};
  refused.refusal = TextRefusal{std::move(reason), {}, std::move(message)};
  return refused;
}

SampleText TextOfChat(const Json& messages, const Json* tools, const RenderOptions& render,
                      const TextPlan& plan, const TextModel& model, TextPurpose purpose) {
  if (purpose == TextPurpose::kJob) {
    if (const absl::Status fits = CheckForJob(messages, plan.generate); !fits.ok())
      return Refused("template", std::string(MessageOf(fits)));
  }
  SampleText out;
  const auto segments = RenderChat(messages, tools, render, &out.counts);
  if (!segments.ok()) return Refused("template", std::string(MessageOf(segments.status())));
  if (purpose == TextPurpose::kShow) out.text = TextOf(*segments);
  absl::StatusOr<EncodedText> encoded =
      EncodeSegments(*model.tokenizer, *segments, plan.assistant_specials);
  if (!encoded.ok()) return Refused("template", std::string(MessageOf(encoded.status())));
  out.ids = std::move(encoded->ids);
  out.mask = std::move(encoded->loss_mask);
  out.counts.spelled_specials = encoded->spelled_specials;
  return out;
}

std::vector<SampleText> TextsOfChat(const v1::SampleInput& sample, const TextPlan& plan,
                                    const TextModel& model, TextPurpose purpose) {
  absl::StatusOr<Json> messages = ParseJson(sample.chat().messages_json());
  if (!messages.ok())
    return {Refused("input", fmt::format("messages: {}", MessageOf(messages.status())))};
  absl::StatusOr<Json> tools = Json();
  if (!sample.chat().tools_json().empty()) tools = ParseJson(sample.chat().tools_json());
  if (!tools.ok()) return {Refused("input", fmt::format("tools: {}", MessageOf(tools.status())))};
  RenderOptions render = plan.render;
  if (sample.has_thinking()) render.thinking = sample.thinking();
  const auto text_of = [&](const Json& chat) {
    return TextOfChat(chat, tools->is_null() ? nullptr : &*tools, render, plan, model, purpose);
  };
  if (plan.turns == Turns::kRegenerate && EndsWithAnswer(*messages))
    messages->erase(messages->size() - 1);
  if (plan.turns != Turns::kEach || !messages->is_array() || !HasAnswer(*messages))
    return {text_of(*messages)};
  std::vector<SampleText> texts;
  Json before = Json::array();
  for (Json& message : *messages) {
    before.push_back(std::move(message));
    if (!IsAssistant(before.back())) continue;
    texts.push_back(text_of(before));
    texts.back().turn = static_cast<int>(texts.size());
  }
  return texts;
}

SampleText TextOfPrompt(const v1::SampleInput& sample, const TextPlan& plan,
                        const TextModel& model) {
  absl::StatusOr<std::vector<int32_t>> ids =
      plan.parse_special ? model.tokenizer->EncodeWithSpecials(sample.prompt())
                         : model.tokenizer->Encode(sample.prompt());
  if (!ids.ok()) return Refused("input", fmt::format("prompt: {}", MessageOf(ids.status())));
  SampleText out{.text = sample.prompt(), .ids = *std::move(ids)};
  out.mask.assign(out.ids.size(), 1);
  return out;
}

SampleText TextOfIds(const v1::TokenIds& tokens, const TextModel& model, TextPurpose purpose) {
  SampleText out;
  out.ids.assign(tokens.ids().begin(), tokens.ids().end());
  out.mask.assign(tokens.loss_mask().begin(), tokens.loss_mask().end());
  if (out.mask.empty()) out.mask.assign(out.ids.size(), 1);
  if (out.mask.size() != out.ids.size())
    return Refused("input", fmt::format("loss_mask has {} values for {} input_ids", out.mask.size(),
                                        out.ids.size()));
  if (std::any_of(out.mask.begin(), out.mask.end(), [](uint8_t m) { return m > 1; }))
    return Refused("input", "loss_mask holds values other than 0 and 1");
  const auto bad = std::find_if(out.ids.begin(), out.ids.end(),
                                [&](int32_t id) { return id < 0 || id >= model.vocab; });
  if (bad != out.ids.end()) {
    const int64_t at = bad - out.ids.begin();
    SampleText refused =
        Refused("token_id", fmt::format("input_ids[{}] is {}, the vocabulary has ids 0 to {}", at,
                                        *bad, model.vocab - 1));
    refused.refusal->token = at;
    return refused;
  }
  if (purpose == TextPurpose::kShow) out.text = model.tokenizer->Decode(out.ids);
  return out;
}

}  // namespace

absl::StatusOr<TextPlan> PlanText(const v1::JobOptions& options, bool generate, TemplateKind kind) {
  if (!v1::JobMode_IsValid(options.mode()))
    return absl::InvalidArgumentError(
        fmt::format("options.mode: {} is not possible; give generate or prefill",
                    static_cast<int>(options.mode())));
  TextPlan plan;
  plan.generate = generate;
  RenderOptions& render = plan.render;
  render.kind = kind;
  render.generation_prompt = generate;
  render.thinking = options.has_thinking() ? options.thinking() : true;
  if (!options.template_().empty() && options.template_() != "auto") {
    const auto given = ParseTemplateKind(options.template_());
    if (!given.ok()) return WithContext(given.status(), "options.template");
    render.kind = *given;
  }
  render.keep_reasoning = generate ? KeepReasoning::kToolLoop : KeepReasoning::kLast;
  if (!options.keep_reasoning().empty()) {
    const auto keep = ParseKeepReasoning(options.keep_reasoning());
    if (!keep.ok()) return WithContext(keep.status(), "options.keep_reasoning");
    render.keep_reasoning = *keep;
  }
  STATETAP_RETURN_IF_ERROR(Choose(kTurns, options.turns(), "turns", &plan.turns));
  render.supervision.answers = Answers::kLast;
  STATETAP_RETURN_IF_ERROR(
      Choose(kSupervise, options.supervise(), "supervise", &render.supervision.answers));
  if (options.has_supervise_thought()) render.supervision.thought = options.supervise_thought();
  if (options.has_supervise_stop()) render.supervision.stop = options.supervise_stop();
  STATETAP_RETURN_IF_ERROR(Choose(kAssistantSpecials, options.assistant_specials(),
                                  "assistant_specials", &plan.assistant_specials));
  plan.parse_special = options.parse_special();
  STATETAP_RETURN_IF_ERROR(CheckForMode(plan));
  return plan;
}

void FillTextOptions(const TextPlan& plan, v1::JobOptions* options) {
  options->set_mode(plan.generate ? v1::JOB_MODE_GENERATE : v1::JOB_MODE_PREFILL);
  options->set_template_(std::string(NameOf(plan.render.kind)));
  options->set_thinking(plan.render.thinking);
  options->set_keep_reasoning(std::string(NameOf(plan.render.keep_reasoning)));
  options->set_turns(std::string(NameIn(kTurns, plan.turns)));
  options->set_supervise(std::string(NameIn(kSupervise, plan.render.supervision.answers)));
  options->set_supervise_thought(plan.render.supervision.thought);
  options->set_supervise_stop(plan.render.supervision.stop);
  options->set_assistant_specials(std::string(NameIn(kAssistantSpecials, plan.assistant_specials)));
}

bool DefaultsToGenerate(const v1::SampleInput& sample, const v1::JobOptions& options) {
  if (sample.has_tokens()) return false;
  if (!sample.has_chat()) return true;
  if (options.turns() == "each") return false;
  if (options.turns() == "regenerate") return true;
  const absl::StatusOr<Json> messages = ParseJson(sample.chat().messages_json());
  return !messages.ok() || !EndsWithAnswer(*messages);
}

bool MayGenerate(const v1::JobOptions& options) {
  if (options.mode() == v1::JOB_MODE_UNSPECIFIED) return options.turns() != "each";
  return options.mode() != v1::JOB_MODE_PREFILL;
}

uint64_t ContentHash(const v1::SampleInput& sample) {
  v1::SampleInput content = sample;
  content.clear_id();
  content.clear_source();
  content.clear_meta_json();
  content.clear_source_line();
  content.clear_split();
  const std::string bytes = content.SerializeAsString();
  return Xxh3Of(std::as_bytes(std::span(bytes)));
}

std::string ContentDigest(const v1::SampleInput& sample) { return HexOf(ContentHash(sample)); }

std::vector<SampleText> TextsOf(const v1::SampleInput& sample, const TextPlan& plan,
                                const TextModel& model, TextPurpose purpose) {
  if (!sample.has_chat()) {
    if (std::optional<std::string> idle = IdleSupervision(plan))
      return {Refused("input", *std::move(idle))};
  }
  std::vector<SampleText> texts;
  switch (sample.content_case()) {
    case v1::SampleInput::kChat: texts = TextsOfChat(sample, plan, model, purpose); break;
    case v1::SampleInput::kPrompt: texts = {TextOfPrompt(sample, plan, model)}; break;
    case v1::SampleInput::kTokens: texts = {TextOfIds(sample.tokens(), model, purpose)}; break;
    case v1::SampleInput::CONTENT_NOT_SET:
      return {Refused("input", "the sample has neither messages, prompt nor input_ids")};
  }
  for (SampleText& text : texts) {
    if (!text.refusal && text.ids.empty())
      text = Refused("input", "the sample has no token", text.turn);
    if (plan.generate) std::fill(text.mask.begin(), text.mask.end(), uint8_t{0});
  }
  return texts;
}

std::string IdOfTurn(const std::string& id, int turn) {
  return turn == 0 ? id : fmt::format("{}/{}", id, turn);
}

std::vector<v1::Rendered> RenderSample(const v1::SampleInput& sample, const v1::JobOptions& options,
                                       const TextModel& model) {
  const bool generate = options.mode() == v1::JOB_MODE_UNSPECIFIED
                            ? DefaultsToGenerate(sample, options)
                            : options.mode() == v1::JOB_MODE_GENERATE;
  const std::string id = sample.id().empty() ? ContentDigest(sample) : sample.id();
  const absl::StatusOr<TextPlan> plan = PlanText(options, generate, model.kind);
  std::vector<v1::Rendered> rendered;
  if (!plan.ok()) {
    rendered.emplace_back().set_id(id);
    rendered[0].set_error(std::string(MessageOf(plan.status())));
    return rendered;
  }
  for (const SampleText& text : TextsOf(sample, *plan, model, TextPurpose::kShow)) {
    v1::Rendered& one = rendered.emplace_back();
    one.set_id(IdOfTurn(id, text.turn));
    if (text.refusal) {
      one.set_error(text.refusal->message);
      continue;
    }
    one.set_text(text.text);
    one.mutable_input_ids()->Assign(text.ids.begin(), text.ids.end());
    one.set_loss_mask(text.mask.data(), text.mask.size());
    for (const int32_t id : text.ids)
      one.mutable_special()->push_back(model.tokenizer->IsSpecial(id) ? '\1' : '\0');
  }
  return rendered;
}

}  // namespace statetap
