#include "extractor/text/split_pattern.h"

#include <algorithm>
#include <iterator>

#include "extractor/text/utf8.h"

namespace statetap {
namespace {

// The same bits as in make_unicode_classes.py. Lm, Lo and M are head and tail at once.
constexpr uint8_t kHan = 1, kHead = 2, kTail = 4, kLetter = 8, kNumber = 16, kSpace = 32;
// Above the table's bits: no character, for the end of the text.
constexpr uint8_t kEnd = 128;
constexpr size_t kNoMatch = 0;

struct ClassRun {
  uint32_t first;
  uint8_t classes;
};
constexpr ClassRun kClassRuns[] = {
#include "extractor/text/unicode_classes.inc"
};

bool IsNewline(char32_t code) { return code == '\r' || code == '\n'; }

// (?i:'s|'t|'re|'ve|'m|'ll|'d)? at `at`; U+017F is an s in lower case.
size_t ContractionEnd(std::string_view text, size_t at) {
  if (at + 1 >= text.size() || text[at] != '\'') return at;
  const auto lower = [&](size_t i) {
    return i < text.size() ? static_cast<char>(text[i] | 0x20) : '\0';
  };
  const char first = lower(at + 1), second = lower(at + 2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
  if ((first == 'r' || first == 'v') && second == 'e') return at + 3;
  if (first == 'l' && second == 'l') return at + 3;
  if (text.substr(at + 1, 2) == "\u017f") return at + 3;
  return at;
}

}  // namespace

struct SplitPattern::Char {
  char32_t code;
  uint8_t classes;
  size_t next;
  bool Is(uint8_t any_of) const { return (classes & any_of) != 0; }
  bool IsPunctuation() const { return !Is(kSpace | kLetter | kNumber | kEnd); }
};

SplitPattern::SplitPattern() : class_of_(0x110000) {
  for (size_t i = 0; i < std::size(kClassRuns); ++i) {
    const size_t end = i + 1 < std::size(kClassRuns) ? kClassRuns[i + 1].first : class_of_.size();
    std::fill(class_of_.begin() + kClassRuns[i].first, class_of_.begin() + end,
              kClassRuns[i].classes);
  }
}

SplitPattern::Char SplitPattern::At(std::string_view text, size_t at) const {
  if (at >= text.size()) return {0, kEnd, at};
  const char32_t code = DecodeUtf8(text, at);
  return {code, class_of_[code], at};
}

bool SplitPattern::IsPythonSpace(char32_t code) const {
  return (class_of_[code] & kSpace) != 0 || (code >= 0x1c && code <= 0x1f);
}

size_t SplitPattern::RunEnd(std::string_view text, size_t at, uint8_t classes) const {
  for (Char c = At(text, at); c.Is(classes); c = At(text, at)) at = c.next;
  return at;
}

size_t SplitPattern::PieceEnd(std::string_view text, size_t begin) const {
  const Char first = At(text, begin);
  if (first.Is(kHan)) return RunEnd(text, first.next, kHan);
  if (const size_t end = WordEnd(text, begin, first); end != kNoMatch) return end;
  if (first.Is(kNumber)) return NumberEnd(text, begin);
  if (const size_t end = PunctuationEnd(text, begin); end != kNoMatch) return end;
  return SpaceEnd(text, begin);
}

// Alternatives 2 and 3. Each tries with the optional first character before it tries without; only
// a mark (no letter, yet head and tail) can be that character and the start of the word as well.
size_t SplitPattern::WordEnd(std::string_view text, size_t begin, const Char& first) const {
  const bool may_skip = !first.Is(kLetter | kNumber) && !IsNewline(first.code);
  if (may_skip) {
    if (const size_t end = MixedCaseEnd(text, first.next); end != kNoMatch)
      return ContractionEnd(text, end);
  }
  if (first.Is(kHead | kTail)) {
    if (const size_t end = MixedCaseEnd(text, begin); end != kNoMatch)
      return ContractionEnd(text, end);
  }
  // Where alternative 2 fails, no tail follows a run of heads: alternative 3 is that run.
  const size_t head = may_skip ? first.next : begin;
  const size_t end = RunEnd(text, head, kHead);
  return end > head ? ContractionEnd(text, end) : kNoMatch;
}

// HEAD* TAIL+ at `begin`. If no tail follows the greedy heads, the heads are given back up to the
// last one that is a tail too.
size_t SplitPattern::MixedCaseEnd(std::string_view text, size_t begin) const {
  size_t last_tail_end = kNoMatch;
  Char c = At(text, begin);
  while (c.Is(kHead)) {
    if (c.Is(kTail)) last_tail_end = c.next;
    c = At(text, c.next);
  }
  return c.Is(kTail) ? RunEnd(text, c.next, kTail) : last_tail_end;
}

size_t SplitPattern::NumberEnd(std::string_view text, size_t begin) const {
  size_t end = begin;
  for (int digits = 0; digits < 3; ++digits) {
    const Char c = At(text, end);
    if (!c.Is(kNumber)) break;
    end = c.next;
  }
  return end;
}

size_t SplitPattern::PunctuationEnd(std::string_view text, size_t begin) const {
  Char c = At(text, begin);
  if (c.code == ' ') c = At(text, c.next);
  if (!c.IsPunctuation()) return kNoMatch;
  size_t end = begin;
  for (; c.IsPunctuation(); c = At(text, c.next)) end = c.next;
  while (end < text.size() && IsNewline(static_cast<uint8_t>(text[end]))) ++end;
  return end;
}

// Alternatives 6, 7 and 8.
size_t SplitPattern::SpaceEnd(std::string_view text, size_t begin) const {
  size_t end = begin, last = begin, newline_end = kNoMatch;
  for (Char c = At(text, begin); c.Is(kSpace); c = At(text, end)) {
    last = end;
    end = c.next;
    if (IsNewline(c.code)) newline_end = end;
  }
  if (newline_end != kNoMatch) return newline_end;
  return end == text.size() || last == begin ? end : last;
}

}  // namespace statetap
