// Columns that text takes on a terminal, and text made safe to print there.
#pragma once

#include <string>
#include <string_view>

namespace statetap {

// Columns of UTF-8 text: two for East Asian wide and emoji, none for combining marks.
int DisplayWidth(std::string_view text);

// At most `width` columns; what does not fit is replaced by "…".
std::string Shorten(std::string_view text, int width);

// Control characters as \n, \t, \x1b …: text of samples must not steer the terminal.
std::string Printable(std::string_view text);

}  // namespace statetap
