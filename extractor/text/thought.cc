#include "extractor/text/thought.h"

#include <algorithm>

namespace statetap {
namespace {

constexpr std::string_view kOpen = "<think>", kClose = "</think>";

}  // namespace

absl::StatusOr<ThoughtAndAnswer> SplitThought(std::string_view content) {
  const size_t start = std::min(content.find_first_not_of(" \t\r\n"), content.size());
  const bool opened = content.substr(start).starts_with(kOpen);
  const size_t begin = opened ? start + kOpen.size() : 0;
  const size_t end = content.find(kClose, begin);
  if (end != std::string_view::npos)
    return ThoughtAndAnswer{true, content.substr(begin, end - begin),
                            content.substr(end + kClose.size())};
  if (opened)
    return absl::InvalidArgumentError(
        "content opens <think> and never closes it: a thought that was cut off; leave the turn out "
        "or close it");
  return ThoughtAndAnswer{false, {}, content};
}

}  // namespace statetap
