// What became of a chat's thoughts, tool calls and spelled special tokens as it was rendered. Sums
// over samples are a job's report.
#pragma once

#include <cstdint>

namespace statetap {

struct TextCounts {
  int64_t thoughts = 0;  // that answers came with, rendered or not
  // Of them not rendered: of earlier answers, of earlier turns that call tools, of the last
  // assistant message.
  int64_t dropped_earlier = 0, dropped_tool_turns = 0, dropped_last = 0;
  int64_t tool_calls = 0;
  // Of them with an id that is not "functions.NAME:N", N counting the chat's calls from 0: what the
  // model itself writes.
  int64_t odd_tool_ids = 0;
  int64_t spelled_specials = 0;  // in what assistants wrote

  TextCounts& operator+=(const TextCounts& other) {
    thoughts += other.thoughts;
    dropped_earlier += other.dropped_earlier;
    dropped_tool_turns += other.dropped_tool_turns;
    dropped_last += other.dropped_last;
    tool_calls += other.tool_calls;
    odd_tool_ids += other.odd_tool_ids;
    spelled_specials += other.spelled_specials;
    return *this;
  }
};

}  // namespace statetap
