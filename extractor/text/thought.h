// A thought that stands inside an answer's text, as engines without a reasoning parser leave it.
#pragma once

#include <string_view>

#include "extractor/base/status.h"

namespace statetap {

struct ThoughtAndAnswer {
  bool has_thought = false;
  std::string_view thought, answer;  // into the content
};

// "<think>thought</think>answer" (white space in front is dropped) or "thought</think>answer".
// A tool section that stands between the tags is part of the thought. INVALID_ARGUMENT for a
// thought that is opened and never closed.
absl::StatusOr<ThoughtAndAnswer> SplitThought(std::string_view content);

}  // namespace statetap
