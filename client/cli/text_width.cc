#include "client/cli/text_width.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace statetap {
namespace {

struct Range {
  uint32_t first, last;
};

constexpr std::array<Range, 28> kZeroWidth = {{
    {0x0300, 0x036f}, {0x0483, 0x0489}, {0x0591, 0x05bd}, {0x05bf, 0x05bf}, {0x05c1, 0x05c2},
    {0x0610, 0x061a}, {0x064b, 0x065f}, {0x0670, 0x0670}, {0x06d6, 0x06dc}, {0x0900, 0x0902},
    {0x093a, 0x093a}, {0x093c, 0x093c}, {0x0941, 0x0948}, {0x094d, 0x094d}, {0x0e31, 0x0e31},
    {0x0e34, 0x0e3a}, {0x0e47, 0x0e4e}, {0x1ab0, 0x1aff}, {0x1dc0, 0x1dff}, {0x200b, 0x200f},
    {0x202a, 0x202e}, {0x2060, 0x2064}, {0x20d0, 0x20ff}, {0x302a, 0x302d}, {0x3099, 0x309a},
    {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}, {0xfeff, 0xfeff},
}};

constexpr std::array<Range, 19> kWide = {{
    {0x1100, 0x115f}, {0x231a, 0x231b}, {0x23e9, 0x23ec},   {0x2614, 0x2615},   {0x26a1, 0x26a1},
    {0x2705, 0x2705}, {0x274c, 0x274c}, {0x2e80, 0x303e},   {0x3041, 0x33ff},   {0x3400, 0x4dbf},
    {0x4e00, 0xa4cf}, {0xa960, 0xa97c}, {0xac00, 0xd7a3},   {0xf900, 0xfaff},   {0xfe30, 0xfe6f},
    {0xff00, 0xff60}, {0xffe0, 0xffe6}, {0x1f300, 0x1faff}, {0x20000, 0x3fffd},
}};

constexpr std::array<Range, 9> kNoInk = {{
    {0x00a0, 0x00a0},
    {0x00ad, 0x00ad},
    {0x061c, 0x061c},
    {0x1680, 0x1680},
    {0x180e, 0x180e},
    {0x2000, 0x200f},
    {0x2028, 0x202f},
    {0x205f, 0x206f},
    {0xfeff, 0xfeff},
}};

template <size_t N>
bool Contains(const std::array<Range, N>& ranges, uint32_t point) {
  return std::any_of(ranges.begin(), ranges.end(), [&](const Range& range) {
    return range.first <= point && point <= range.last;
  });
}

int WidthOf(uint32_t point) {
  if (point < 0x300) return 1;
  if (Contains(kZeroWidth, point)) return 0;
  return Contains(kWide, point) ? 2 : 1;
}

// The character at `at`, and moves behind it. An invalid byte counts as one character.
uint32_t NextPoint(std::string_view text, size_t& at) {
  const auto lead = static_cast<unsigned char>(text[at++]);
  const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : lead >= 0xc0 ? 1 : 0;
  uint32_t point = more == 0 ? lead : lead & (0x3fu >> more);
  for (int i = 0; i < more && at < text.size() && (text[at] & 0xc0) == 0x80; ++i)
    point = (point << 6) | (static_cast<unsigned char>(text[at++]) & 0x3f);
  return point;
}

}  // namespace

Character NextCharacter(std::string_view text, size_t& at) {
  const size_t begin = at;
  const uint32_t point = NextPoint(text, at);
  return {text.substr(begin, at - begin), WidthOf(point)};
}

int DisplayWidth(std::string_view text) {
  int width = 0;
  for (size_t at = 0; at < text.size();) width += WidthOf(NextPoint(text, at));
  return width;
}

std::string Shorten(std::string_view text, int width) {
  if (DisplayWidth(text) <= width) return std::string(text);
  if (width <= 0) return "";
  int used = 1;  // the ellipsis
  size_t end = 0;
  for (size_t at = 0; at < text.size(); end = at) {
    used += WidthOf(NextPoint(text, at));
    if (used > width) break;
  }
  return std::string(text.substr(0, end)) + "…";
}

std::string Printable(std::string_view text) {
  std::string safe;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const uint32_t point = NextPoint(text, at);
    if (point == '\n') {
      safe += "\\n";
    } else if (point == '\t') {
      safe += "\\t";
    } else if (point < 0x20 || (point >= 0x7f && point < 0xa0)) {
      safe += fmt::format("\\x{:02x}", point);
    } else {
      safe.append(text.substr(begin, at - begin));
    }
  }
  return safe;
}

std::string VisibleSpace(std::string_view text) {
  std::string visible;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const uint32_t point = NextPoint(text, at);
    if (point == ' ') {
      visible += "·";
    } else if (point == '\t') {
      visible += "→";
    } else if (point == 0x3000 || Contains(kNoInk, point)) {
      visible += fmt::format("\\u{:04x}", point);
    } else {
      visible += Printable(text.substr(begin, at - begin));
    }
  }
  return visible;
}

}  // namespace statetap
