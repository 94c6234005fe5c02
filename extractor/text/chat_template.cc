#include "extractor/text/chat_template.h"

#include <algorithm>

#include "extractor/base/json.h"
#include "extractor/text/chat_message.h"
#include "extractor/text/python_text.h"
#include "extractor/text/thought.h"
#include "extractor/text/tool_declaration.h"

namespace statetap {
namespace {

constexpr std::string_view kDefaultSystem = "You are Kimi, an AI assistant created by Moonshot AI.";

// What differs from template to template.
struct TemplateRules {
  bool default_system = false;           // where the first message is no system message
  bool default_system_if_empty = false;  // and where there is no message at all
  bool think_blocks = false;             // assistant turns have one, empty or not
  bool prompt_opens_thought = false;  // the generation prompt ends in <think>, else the model does
  bool media_by_type = false;         // image and video by type; else images only, by key as well
  std::string_view result_indent;     // in front of a tool's result
};

TemplateRules RulesOf(TemplateKind kind) {
  switch (kind) {
    case TemplateKind::kKimiK25:
      return {.think_blocks = true, .prompt_opens_thought = true, .media_by_type = true};
    case TemplateKind::kKimiK2Thinking:
      return {.default_system = true, .default_system_if_empty = true, .think_blocks = true};
    case TemplateKind::kKimiK2Instruct: return {.default_system = true, .result_indent = "    "};
    case TemplateKind::kNone: break;
  }
  return {};
}

// Where reasoning starts to be kept: the index behind the last plain answer among the first `count`
// messages.
size_t LoopStart(const std::vector<ChatMessage>& messages, size_t count) {
  while (count > 0 && !messages[count - 1].IsPlainAnswer()) --count;
  return count;
}

size_t LastAssistant(const std::vector<ChatMessage>& messages) {
  size_t at = messages.size();
  while (at > 0 && !messages[at - 1].IsAssistant()) --at;
  return at == 0 ? messages.size() : at - 1;
}

class Renderer {
 public:
  Renderer(const RenderOptions& options, TextCounts* counts)
      : options_(options), rules_(RulesOf(options.kind)), counts_(*counts) {}

  std::vector<Segment> Render(const std::vector<ChatMessage>& messages, const Json* tools) {
    if (tools != nullptr && !tools->empty()) DeclareTools(SortedByKey(*tools));
    const bool add_system = messages.empty()
                                ? rules_.default_system_if_empty
                                : messages[0].role != "system" && rules_.default_system;
    if (add_system) Turn("<|im_system|>", "system", kDefaultSystem);
    const size_t last = LastAssistant(messages);
    const size_t keep_from = KeepReasoningFrom(messages, last);
    for (size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].IsAssistant()) {
        const bool keep = rules_.think_blocks && i >= keep_from;
        CountThought(messages[i], keep, i == last);
        Assistant(messages[i], keep, IsSupervised(i == last));
      } else {
        Other(messages[i]);
      }
    }
    if (options_.generation_prompt) GenerationPrompt();
    return std::move(segments_);
  }

 private:
  size_t KeepReasoningFrom(const std::vector<ChatMessage>& messages, size_t last) const {
    // K2-Thinking knows no `thinking` switch.
    const bool instant = rules_.prompt_opens_thought && !options_.thinking;
    if (options_.keep_reasoning == KeepReasoning::kAll) return 0;
    if (options_.keep_reasoning == KeepReasoning::kNone || instant) return messages.size();
    return LoopStart(messages,
                     options_.keep_reasoning == KeepReasoning::kLast ? last : messages.size());
  }

  bool IsSupervised(bool is_last) const {
    return options_.supervision.answers == Supervision::Answers::kAll ||
           (options_.supervision.answers == Supervision::Answers::kLast && is_last);
  }

  void CountThought(const ChatMessage& message, bool kept, bool is_last) {
    if (message.reasoning.empty()) return;
    ++counts_.thoughts;
    if (kept) return;
    ++(is_last                   ? counts_.dropped_last
       : message.IsPlainAnswer() ? counts_.dropped_earlier
                                 : counts_.dropped_tool_turns);
  }

  void Special(std::string_view name) {
    segments_.push_back({Segment::Kind::kSpecial, std::string(name), supervising_});
  }

  void Text(std::string_view text) {
    if (text.empty()) return;
    if (!segments_.empty() && segments_.back().kind == text_kind_ &&
        segments_.back().supervised == supervising_) {
      segments_.back().text += text;
    } else {
      segments_.push_back({text_kind_, std::string(text), supervising_});
    }
  }

  void Open(std::string_view tag, std::string_view name) {
    Special(tag);
    Text(name);
    Special("<|im_middle|>");
  }

  void Turn(std::string_view tag, std::string_view name, std::string_view body) {
    Open(tag, name);
    Text(body);
    Special("<|im_end|>");
  }

  void DeclareTools(const Json& tools) {
    std::string body;
    if (options_.kind == TemplateKind::kKimiK2Instruct) {
      body = "\n  # Tools\n  " + PythonJson(tools);
    } else if (options_.kind == TemplateKind::kKimiK25 &&
               options_.tool_declaration == ToolDeclarationStyle::kTypeScript) {
      body = ToolDeclarationText(tools);
    } else {
      body = PythonJson(tools, kCompactSeparators);
    }
    Turn("<|im_system|>", "tool_declare", body);
  }

  void Other(const ChatMessage& message) {
    Open(message.role == "user" ? "<|im_user|>" : "<|im_system|>", message.name);
    if (message.role == "tool")
      Text(fmt::format("## Return of {}\n{}", message.tool_call_id, rules_.result_indent));
    Content(message);
    Special("<|im_end|>");
  }

  void Assistant(const ChatMessage& message, bool keep_reasoning, bool supervise) {
    Open("<|im_assistant|>", message.name);
    text_kind_ = Segment::Kind::kAnswer;
    if (rules_.think_blocks) ThinkBlock(message, keep_reasoning, supervise);
    supervising_ = supervise;
    Content(message);
    ToolCalls(message.tool_calls);
    text_kind_ = Segment::Kind::kText;
    supervising_ = supervise && options_.supervision.stop;
    Special("<|im_end|>");
    supervising_ = false;
  }

  // Supervised is what the model writes itself: not what its generation prompt ended in, and not an
  // empty block where it thought.
  void ThinkBlock(const ChatMessage& message, bool keep_reasoning, bool supervise) {
    const bool empty = message.reasoning.empty() || !keep_reasoning;
    const bool dropped = empty && !message.reasoning.empty();
    const bool prompt_closes = rules_.prompt_opens_thought && !options_.thinking;
    supervise = supervise && options_.supervision.thought && !dropped;
    supervising_ = supervise && !rules_.prompt_opens_thought;
    Special("<think>");
    supervising_ = supervise && !(prompt_closes && empty);
    if (!empty) Text(message.reasoning);
    Special("</think>");
  }

  void ToolCalls(const std::vector<ToolCall>& calls) {
    if (calls.empty()) return;
    Special("<|tool_calls_section_begin|>");
    for (const ToolCall& call : calls) {
      if (call.id != fmt::format("functions.{}:{}", call.name, calls_so_far_++))
        ++counts_.odd_tool_ids;
      ++counts_.tool_calls;
      Special("<|tool_call_begin|>");
      Text(call.id);
      Special("<|tool_call_argument_begin|>");
      Text(call.arguments);
      Special("<|tool_call_end|>");
    }
    Special("<|tool_calls_section_end|>");
  }

  void Content(const ChatMessage& message) {
    for (const ContentPart& part : message.content) {
      if (IsImage(part)) {
        Image();
      } else if (part.kind == ContentPart::Kind::kVideo && rules_.media_by_type) {
        Text("<|kimi_k25_video_placeholder|>\n");  // text for the vendor's tokenizer too
      } else {
        Text(part.text);
      }
    }
  }

  bool IsImage(const ContentPart& part) const {
    return part.kind == ContentPart::Kind::kImage || (!rules_.media_by_type && part.has_image_key);
  }

  // <|media_start|> is no token of any of the tokenizers; K2-Instruct's names none of the others.
  void Image() {
    if (options_.kind == TemplateKind::kKimiK2Instruct) {
      Text("<|media_start|>image<|media_content|><|media_pad|><|media_end|>\n");
      return;
    }
    if (options_.kind == TemplateKind::kKimiK25) {
      Special("<|media_begin|>");
      Text("image");
    } else {
      Text("<|media_start|>image");
    }
    Special("<|media_content|>");
    Special("<|media_pad|>");
    Special("<|media_end|>");
    Text("\n");
  }

  void GenerationPrompt() {
    Open("<|im_assistant|>", "assistant");
    if (!rules_.prompt_opens_thought) return;
    Special("<think>");
    if (!options_.thinking) Special("</think>");
  }

  const RenderOptions& options_;
  const TemplateRules rules_;
  TextCounts& counts_;
  std::vector<Segment> segments_;
  Segment::Kind text_kind_ = Segment::Kind::kText;
  bool supervising_ = false;
  int calls_so_far_ = 0;
};

// Moves thoughts that stand in an answer's content to its reasoning.
absl::Status MoveThoughts(std::vector<ChatMessage>& messages) {
  for (size_t i = 0; i < messages.size(); ++i) {
    ChatMessage& message = messages[i];
    if (!message.IsAssistant() || !message.reasoning.empty() || message.content.empty()) continue;
    std::string& content = message.content[0].text;
    const absl::StatusOr<ThoughtAndAnswer> split = SplitThought(content);
    if (!split.ok()) return WithContext(split.status(), fmt::format("messages[{}]", i));
    if (!split->has_thought) continue;
    message.reasoning = split->thought;
    content = std::string(split->answer);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Segment>> RenderChat(const Json& messages, const Json* tools,
                                                const RenderOptions& options, TextCounts* counts) {
  if (options.kind == TemplateKind::kNone)
    return absl::InvalidArgumentError(
        "template none cannot render a chat; choose kimi-k2.5, kimi-k2-thinking or "
        "kimi-k2-instruct, or give a prompt or ids");
  if (tools != nullptr && !tools->is_null() && !tools->is_array())
    return absl::InvalidArgumentError(
        fmt::format("tools has type {}; it must be a list of declarations", tools->type_name()));
  STATETAP_ASSIGN_OR_RETURN(std::vector<ChatMessage> read, ReadMessages(messages));
  if (RulesOf(options.kind).think_blocks && options.keep_reasoning != KeepReasoning::kToolLoop)
    STATETAP_RETURN_IF_ERROR(MoveThoughts(read));
  TextCounts unwanted;
  return Renderer(options, counts != nullptr ? counts : &unwanted).Render(read, tools);
}

absl::Status CheckTextOnly(const Json& messages) {
  const absl::StatusOr<std::vector<ChatMessage>> read = ReadMessages(messages);
  if (!read.ok()) return absl::OkStatus();
  for (size_t i = 0; i < read->size(); ++i) {
    const std::vector<ContentPart>& parts = (*read)[i].content;
    const auto found = std::find_if(parts.begin(), parts.end(), [](const ContentPart& part) {
      return part.kind != ContentPart::Kind::kText || part.has_image_key;
    });
    if (found != parts.end())
      return absl::InvalidArgumentError(
          fmt::format("messages[{}].content[{}] is {}; only text can be captured", i,
                      found - parts.begin(), found->type.empty() ? "an image" : found->type));
  }
  return absl::OkStatus();
}

std::string TextOf(std::span<const Segment> segments) {
  std::string text;
  for (const Segment& segment : segments) text += segment.text;
  return text;
}

}  // namespace statetap
