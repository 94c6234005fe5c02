#include "extractor/base/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

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

std::string FormatBytes(int64_t bytes) {
  constexpr std::array<std::string_view, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  // 1023.96 would print as 1024.0.
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

size_t CountCharacters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return !Continues(byte); }));
}

}  // namespace statetap
