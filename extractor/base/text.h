// Text for people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace statetap {

// `text` where it has at most `most` bytes, else its beginning and its end with "…" and the number
// of bytes left out between them. Never half a character of UTF-8. What a caller sent may be
// megabytes; a message that quotes it must not be. Beginning and end stay: a message of ours begins
// with the field and ends with the remedy.
std::string CutMiddle(std::string_view text, size_t most);

std::string FormatBytes(int64_t bytes);  // "812 B", "3.4 MiB"

// Characters (code points) of UTF-8.
size_t CountCharacters(std::string_view text);

}  // namespace statetap
