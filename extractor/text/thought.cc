#include "extractor/text/thought.h"

#include <algorithm>

namespace statetap {
namespace {

constexpr std::string_view kOpen = "<think>", kClose = "</think>";
constexpr std::string_view kToolSection = "<|tool_calls_section_begin|>";

}  // namespace

absl::StatusOr<ThoughtAndAnswer> SplitThought(std::string_view content) {
  const size_t start = std::min(content.find_first_not_of(" \t\r\n"), content.size());
  const bool opened = content.substr(start).starts_with(kOpen);
  const size_t begin = opened ? start + kOpen.size() : 0;
  const size_t end = content.find(kClose, begin);
  if (end != std::string_view::npos)
    return ThoughtAndAnswer{true, content.substr(begin, end - begin),
                            content.substr(end + kClose.size())};
  if (opened && content.find(kToolSection) != std::string_view::npos)
    return absl::InvalidArgumentError(
        "content opens <think>, calls a tool inside the thought and never closes it; give the "
        "thought as reasoning_content and the calls as tool_calls, or the answer as ids");
  if (opened)
    return absl::InvalidArgumentError(
        "content opens <think> and never closes it: a thought that was cut off; leave the turn out "
        "or close it");
  return ThoughtAndAnswer{false, {}, content};
}

}  // namespace statetap
