#include "server/web/tool_calls.h"

#include <utility>

namespace statetap {
namespace {

int32_t IdOf(const Tokenizer& tokenizer, std::string_view name) {
  return tokenizer.SpecialId(name).value_or(-1);
}

// Of "functions.lookup:0".
std::string NameOf(std::string_view id) {
  constexpr std::string_view kFunctions = "functions.";
  if (id.starts_with(kFunctions)) id.remove_prefix(kFunctions.size());
  return std::string(id.substr(0, id.rfind(':')));
}

bool IsBlank(std::string_view text) { return text.find_first_not_of(" \n\t") == text.npos; }

}  // namespace

ToolCallReader::ToolCallReader(const Tokenizer& tokenizer)
    : begin_(IdOf(tokenizer, "<|tool_calls_section_begin|>")),
      end_(IdOf(tokenizer, "<|tool_calls_section_end|>")),
      call_(IdOf(tokenizer, "<|tool_call_begin|>")),
      arguments_(IdOf(tokenizer, "<|tool_call_argument_begin|>")),
      call_end_(IdOf(tokenizer, "<|tool_call_end|>")) {}

bool ToolCallReader::Take(int32_t id, std::string_view text) {
  if (part_ == Part::kOutside && id != begin_) return false;
  section_ += text;
  if (part_ == Part::kOutside) {
    part_ = Part::kBetween;
  } else if (id == end_) {
    EndSection(part_ == Part::kBetween);
  } else {
    sound_ = sound_ && Move(id, text);
  }
  return true;
}

// False where the token has no place there.
bool ToolCallReader::Move(int32_t id, std::string_view text) {
  switch (part_) {
    case Part::kOutside: return false;
    case Part::kBetween:
      if (id == call_) part_ = Part::kId;
      return id == call_ || IsBlank(text);
    case Part::kId:
      if (id == arguments_) {
        part_ = Part::kArguments;
        return !NameOf(id_text_).empty();
      }
      id_text_ += text;
      return id != call_ && id != call_end_;
    case Part::kArguments:
      if (id == call_end_) {
        section_calls_.push_back(
            {{"id", id_text_},
             {"type", "function"},
             {"function",
              {{"name", NameOf(id_text_)}, {"arguments", std::exchange(arguments_text_, {})}}}});
        id_text_.clear();
        part_ = Part::kBetween;
        return true;
      }
      arguments_text_ += text;
      return id != call_ && id != arguments_;
  }
  return false;
}

void ToolCallReader::EndSection(bool whole) {
  if (whole && sound_) {
    for (Json& call : section_calls_) calls_.push_back(std::move(call));
  } else {
    broken_ += section_;
  }
  section_calls_ = Json::array();
  section_.clear();
  id_text_.clear();
  arguments_text_.clear();
  part_ = Part::kOutside;
  sound_ = true;
}

void ToolCallReader::Finish() {
  // The token that ends a section is often left out before the one that ends the answer.
  if (part_ != Part::kOutside) EndSection(part_ == Part::kBetween && !section_calls_.empty());
}

Json ToolCallReader::TakeCalls() { return std::exchange(calls_, Json::array()); }

}  // namespace statetap
