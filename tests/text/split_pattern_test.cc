#include "extractor/text/split_pattern.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace statetap {
namespace {

// The pattern as a regex engine reads it. In PCRE2 \p{Han} would mean script extensions and \s
// takes U+180E; the intersection with "not Han" is a lookahead.
constexpr char kPattern[] =
    R"(\p{sc:Han}+)"
    R"(|[^\r\n\p{L}\p{N}]?(?:(?!\p{sc:Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])*)"
    R"((?:(?!\p{sc:Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?(?:(?!\p{sc:Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])+)"
    R"((?:(?!\p{sc:Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*|\p{White_Space}*[\r\n]+)"
    R"(|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+)";

class Pcre {
 public:
  explicit Pcre(const char* pattern) {
    int error = 0;
    size_t offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern), PCRE2_ZERO_TERMINATED,
                              PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr));
    if (code_ == nullptr) throw std::runtime_error("pattern refused at " + std::to_string(offset));
    match_.reset(pcre2_match_data_create_from_pattern(code_.get(), nullptr));
  }
  // The end of the match that starts exactly at `begin`; 0 if there is none.
  size_t EndOfMatchAt(const std::string& text, size_t begin) {
    const int count = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                  text.size(), begin, PCRE2_ANCHORED, match_.get(), nullptr);
    return count < 1 ? 0 : pcre2_get_ovector_pointer(match_.get())[1];
  }

 private:
  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
  };
  std::unique_ptr<pcre2_code, Free> code_;
  std::unique_ptr<pcre2_match_data, Free> match_;
};

std::string Utf8Of(char32_t code) {
  std::string text;
  if (code < 0x80) return {static_cast<char>(code)};
  if (code < 0x800) {
    text += static_cast<char>(0xc0 | code >> 6);
  } else {
    if (code < 0x10000) {
      text += static_cast<char>(0xe0 | code >> 12);
    } else {
      text += static_cast<char>(0xf0 | code >> 18);
      text += static_cast<char>(0x80 | (code >> 12 & 0x3f));
    }
    text += static_cast<char>(0x80 | (code >> 6 & 0x3f));
  }
  text += static_cast<char>(0x80 | (code & 0x3f));
  return text;
}

// Characters that the distribution's PCRE2 knows: those it calls unassigned may be letters by now.
std::vector<std::string> KnownCharacters() {
  Pcre assigned(R"(\P{Cn})");
  std::vector<std::string> characters;
  for (char32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xd800 && code < 0xe000) continue;
    std::string text = Utf8Of(code);
    if (assigned.EndOfMatchAt(text, 0) != 0) characters.push_back(std::move(text));
  }
  return characters;
}

// Characters at which the alternatives meet.
const std::vector<std::string> kSeams = {
    "a",      "B",      "c",      "'",      "s",      "S",      "\u017f",    "t",
    "r",      "e",      "V",      "l",      "L",      "m",      "D",         "1",
    "2",      "\u00bd", "\u2167", " ",      " ",      "\n",     "\r",        "\t",
    "\u00a0", "\u2028", "\u180e", "\x1c",   "\u0085", "!",      ".",         "\u4e00",
    "\u3005", "\u3007", "\u2e80", "\u3001", "\u0301", "\u0488", "\u01c5",    "\u02b0",
    "_",      "\u00aa", "\u3042", "\uac00", "\u0e01", "\u0e31", "\U0001f389"};

class SplitPatternTest : public ::testing::Test {
 protected:
  void ExpectSamePieces(const std::string& text) {
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = pattern_.PieceEnd(text, begin);
      ASSERT_GT(end, begin);
      ASSERT_EQ(end, pcre_.EndOfMatchAt(text, begin)) << "at " << begin << " of " << text;
      begin = end;
    }
  }
  void ExpectSamePiecesOfRandomText(const std::vector<std::string>& characters, int texts) {
    std::mt19937 random(1);
    for (int i = 0; i < texts; ++i) {
      std::string text;
      for (size_t n = random() % 40; n > 0; --n) text += characters[random() % characters.size()];
      ExpectSamePieces(text);
    }
  }

  SplitPattern pattern_;
  Pcre pcre_{kPattern};
};

TEST_F(SplitPatternTest, CutsRandomTextOfSeamsAsTheRegexDoes) {
  ExpectSamePiecesOfRandomText(kSeams, 20'000);
}

TEST_F(SplitPatternTest, CutsRandomTextOfAllCharactersAsTheRegexDoes) {
  ExpectSamePiecesOfRandomText(KnownCharacters(), 20'000);
}

TEST_F(SplitPatternTest, CutsEveryPairOfSeamsAsTheRegexDoes) {
  for (const std::string& a : kSeams) {
    for (const std::string& b : kSeams) {
      for (const std::string& c : kSeams) ExpectSamePieces(a + b + c);
    }
  }
}

TEST_F(SplitPatternTest, KnowsHanOfUnicode15) {
  // U+31350, the first of extension H; an older table takes it for punctuation.
  const std::string text = "a\U00031350\u4e00";
  EXPECT_EQ(pattern_.PieceEnd(text, 0), 1u);
  EXPECT_EQ(pattern_.PieceEnd(text, 1), text.size());
}

}  // namespace
}  // namespace statetap
