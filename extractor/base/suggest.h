// "did you mean …?"
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace statetap {

// Insertions, deletions, replacements and swaps of neighbours between the two.
int EditDistance(std::string_view a, std::string_view b);

// The known word nearest to `word`, or nothing where none is near: at most a third of its letters
// (at least one) differ, or it begins with `word`.
std::string Nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace statetap
