#include "extractor/base/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace statetap {
namespace {

bool Continues(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

}  // namespace

std::string CutMiddle(std::string_view text, size_t most) {
  if (text.size() <= most) return std::string(text);
  size_t begin = most * 2 / 3, end = text.size() - most / 3;
  while (begin > 0 && Continues(text[begin])) --begin;
  while (end < text.size() && Continues(text[end])) ++end;
  return fmt::format("{}… ({} bytes left out) …{}", text.substr(0, begin), end - begin,
                     text.substr(end));
}

size_t CountCharacters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return !Continues(byte); }));
}

}  // namespace statetap
