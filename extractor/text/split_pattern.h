// Kimi's pre-tokenisation pattern: where ordinary text is cut before byte pairs are merged.
//
//   1  [\p{Han}]+
//   2  [^\r\n\p{L}\p{N}]? HEAD* TAIL+ (?i:'s|'t|'re|'ve|'m|'ll|'d)?
//   3  [^\r\n\p{L}\p{N}]? HEAD+ TAIL* (?i:'s|'t|'re|'ve|'m|'ll|'d)?
//   4  \p{N}{1,3}
//   5  \x20?[^\s\p{L}\p{N}]+[\r\n]*
//   6  \s*[\r\n]+
//   7  \s+(?!\S)
//   8  \s+
//   HEAD = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]], TAIL =
//   [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
//
// Written out by hand rather than for a regex engine: the tables are then Unicode 16's, as
// tiktoken's are (the PCRE2 of our distributions knows Unicode 14), every input takes linear time,
// and no match needs memory of its own. A test holds it to PCRE2 on random text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace statetap {

// Immutable; safe from many threads. 1.1 MB: a class byte for every code point.
class SplitPattern {
 public:
  // Part of a tokenizer's digest; changes when a cut may change.
  static constexpr std::string_view kVersion = "kimi-split unicode-16.0";

  SplitPattern();
  // The end of the piece that starts at `begin`. REQUIRES: valid UTF-8, begin < text.size().
  size_t PieceEnd(std::string_view text, size_t begin) const;
  // Python's str.isspace, which the vendor's chunking of long text uses: \s and U+001C to U+001F.
  bool IsPythonSpace(char32_t code) const;

 private:
  struct Char;
  Char At(std::string_view text, size_t at) const;
  size_t RunEnd(std::string_view text, size_t at, uint8_t classes) const;
  size_t WordEnd(std::string_view text, size_t begin, const Char& first) const;
  size_t MixedCaseEnd(std::string_view text, size_t begin) const;
  size_t NumberEnd(std::string_view text, size_t begin) const;
  size_t PunctuationEnd(std::string_view text, size_t begin) const;
  size_t SpaceEnd(std::string_view text, size_t begin) const;

  std::vector<uint8_t> class_of_;  // [0x110000]
};

}  // namespace statetap
