// The tool calls in an answer, token by token. The model's special tokens alone make one: text that
// spells them stays text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "extractor/base/json.h"
#include "extractor/text/tokenizer.h"

namespace statetap {

class ToolCallReader {
 public:
  explicit ToolCallReader(const Tokenizer& tokenizer);

  // False: the token is none of a section of calls, and its text is the answer's.
  bool Take(int32_t id, std::string_view text);
  // The answer has ended.
  void Finish();
  // Calls of sections that were read since, as OpenAI's tool_calls; empty: none.
  Json TakeCalls();
  // Sections that hold something else than whole calls, or were cut: as they were written.
  std::string TakeBroken() { return std::exchange(broken_, {}); }

 private:
  enum class Part { kOutside, kBetween, kId, kArguments };
  bool Move(int32_t id, std::string_view text);
  void EndSection(bool whole);

  const int32_t begin_, end_, call_, arguments_, call_end_;  // −1 where the tokenizer has none
  Part part_ = Part::kOutside;
  bool sound_ = true;  // the section so far
  std::string section_, id_text_, arguments_text_, broken_;
  Json section_calls_ = Json::array(), calls_ = Json::array();
};

}  // namespace statetap
