// UTF-8 as the Unicode standard's table 3-7 has it: no overlong forms, no surrogates, nothing above
// U+10FFFF. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "extractor/base/status.h"

namespace statetap {

// The sequence that starts at `bytes[0]`. Where it is not `complete`, `size` counts its maximal
// subpart: the longest start of a valid sequence, at least 1. REQUIRES: bytes is not empty.
struct Utf8Sequence {
  size_t size;
  bool complete;
  bool ends_early;  // not complete because `bytes` ends; more bytes could complete it
};
Utf8Sequence ScanUtf8(std::string_view bytes);

// Decodes the character at `at` and moves `at` behind it. REQUIRES: valid UTF-8, `at` inside.
inline char32_t DecodeUtf8(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
  const auto tail = [&](size_t i) { return char32_t{byte(i)} & 0x3f; };
  const char32_t lead = byte(0);
  if (lead < 0x80) return at += 1, lead;
  char32_t code = 0;
  if (lead < 0xe0) {
    code = (lead & 0x1f) << 6 | tail(1);
    at += 2;
  } else if (lead < 0xf0) {
    code = (lead & 0x0f) << 12 | tail(1) << 6 | tail(2);
    at += 3;
  } else {
    code = (lead & 0x07) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3);
    at += 4;
  }
  return code;
}

// INVALID_ARGUMENT with the byte and its offset.
absl::Status CheckUtf8(std::string_view text);
// U+FFFD in place of each maximal subpart that is invalid.
std::string ReplaceInvalidUtf8(std::string_view bytes);
// How many bytes at the end are the start of a character that more bytes could complete (0 to 3).
size_t IncompleteUtf8Tail(std::string_view bytes);

}  // namespace statetap
