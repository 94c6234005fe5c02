// Names, choice and identity of the chat templates.
#include "extractor/base/digest.h"
#include "extractor/base/json.h"
#include "extractor/base/named_value.h"
#include "extractor/text/chat_template.h"

namespace statetap {
namespace {

constexpr NamedValue<TemplateKind> kTemplates[] = {
    {TemplateKind::kKimiK25, "kimi-k2.5"},
    {TemplateKind::kKimiK2Thinking, "kimi-k2-thinking"},
    {TemplateKind::kKimiK2Instruct, "kimi-k2-instruct"},
    {TemplateKind::kNone, "none"}};

constexpr NamedValue<KeepReasoning> kKeepReasoning[] = {{KeepReasoning::kNone, "none"},
                                                        {KeepReasoning::kToolLoop, "tool_loop"},
                                                        {KeepReasoning::kLast, "last"},
                                                        {KeepReasoning::kAll, "all"}};

// A chat that meets every rule of the templates.
constexpr std::string_view kProbe = R"([
  {"role": "system", "content": "s"},
  {"role": "user", "name": "n", "content": [{"type": "text", "text": "t"},
    {"type": "image_url", "image_url": {}}, {"type": "video_url", "video_url": {}}]},
  {"role": "assistant", "content": "a", "reasoning_content": "r"},
  {"role": "user", "content": "u"},
  {"role": "assistant", "content": "b", "reasoning_content": "q", "tool_calls": [
    {"id": "functions.f:0", "function": {"name": "f", "arguments": {"x": 1.0, "y": [1, "é"]}}},
    {"id": "functions.f:1", "function": {"name": "f", "arguments": "{}"}}]},
  {"role": "tool", "tool_call_id": "functions.f:0", "content": "0"},
  {"role": "tool", "tool_call_id": "functions.f:1", "content": null},
  {"role": "assistant", "content": "<think>p</think>c"},
  {"role": "developer", "content": "d"}])";

constexpr std::string_view kProbeTools = R"([
  {"type": "function", "function": {"name": "f", "description": "d\ne", "parameters": {
    "type": "object", "required": ["y"], "additionalProperties": false,
    "$defs": {"D": {"type": "object", "properties": {}}},
    "properties": {"x": {"type": "number", "minimum": 0, "default": 1.5},
      "y": {"type": "array", "items": {"type": "string", "description": "i"}},
      "z": {"anyOf": [{"enum": ["a", null]}, {"$ref": "#/$defs/D"}, {"type": ["null", "array"]}]}}}}}
])";

}  // namespace

absl::StatusOr<TemplateKind> ParseTemplateKind(std::string_view name) {
  return ValueOf(kTemplates, "template", name);
}

absl::StatusOr<KeepReasoning> ParseKeepReasoning(std::string_view name) {
  return ValueOf(kKeepReasoning, "keep_reasoning", name);
}

std::string_view NameOf(TemplateKind kind) { return NameIn(kTemplates, kind); }

std::string_view NameOf(KeepReasoning keep) { return NameIn(kKeepReasoning, keep); }

TemplateKind DetectTemplate(std::string_view outer_model_type, const Tokenizer& tokenizer) {
  if (outer_model_type == "kimi_k25") return TemplateKind::kKimiK25;
  if (tokenizer.SpecialId("<think>")) return TemplateKind::kKimiK2Thinking;
  if (tokenizer.SpecialId("<|im_middle|>")) return TemplateKind::kKimiK2Instruct;
  return TemplateKind::kNone;
}

// Rendering a probe makes the digest follow the code: no version number to forget.
std::string TemplateDigest(TemplateKind kind) {
  std::string content(NameOf(kind));
  if (kind == TemplateKind::kNone) return Sha256Hex(content);
  const Json probe = ParseJson(kProbe).value(), tools = ParseJson(kProbeTools).value();
  for (const auto& [keep, name] : kKeepReasoning) {
    for (const bool thinking : {false, true}) {
      const RenderOptions options{.kind = kind,
                                  .thinking = thinking,
                                  .keep_reasoning = keep,
                                  .supervision = {.answers = Supervision::Answers::kAll}};
      for (const Json* declared : {static_cast<const Json*>(nullptr), &tools}) {
        const std::vector<Segment> segments = RenderChat(probe, declared, options).value();
        for (const Segment& segment : segments)
          content += fmt::format("\n{}{} {}", segment.kind == Segment::Kind::kSpecial ? 's' : 't',
                                 segment.supervised ? '+' : '-', segment.text);
      }
    }
  }
  return Sha256Hex(content);
}

}  // namespace statetap
