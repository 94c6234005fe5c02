// Columns that text takes on a terminal, and text made safe to print there.
#pragma once

#include <string>
#include <string_view>

namespace statetap {

// Columns of UTF-8 text: two for East Asian wide and emoji, none for combining marks.
int DisplayWidth(std::string_view text);

// A character of `text` and the columns it takes; an invalid byte counts as one.
struct Character {
  std::string_view bytes;
  int width;
};
// The one at `at`, which moves behind it. REQUIRES: at < text.size().
Character NextCharacter(std::string_view text, size_t& at);

// At most `width` columns; what does not fit is replaced by "…".
std::string Shorten(std::string_view text, int width);

// Control characters as \n, \t, \x1b …: text of samples must not steer the terminal.
std::string Printable(std::string_view text);

// The same with a space as ·, a tab as → and what else has no ink (no-break and zero-width spaces,
// direction marks) as \u00a0 ….
std::string VisibleSpace(std::string_view text);

}  // namespace statetap
