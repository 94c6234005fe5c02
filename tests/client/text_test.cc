// Tables, plots, progress, numbers and suggestions.
#include <cmath>
#include <sstream>

#include "client/cli/format.h"
#include "client/cli/marked_text.h"
#include "client/cli/plot.h"
#include "client/cli/progress.h"
#include "client/cli/table.h"
#include "client/cli/text_width.h"
#include "extractor/base/suggest.h"
#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using testing::StatusIs;

std::vector<std::string> LinesOf(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(TextWidthTest, WideAndCombiningCharacters) {
  EXPECT_EQ(DisplayWidth("abc"), 3);
  EXPECT_EQ(DisplayWidth("日本"), 4);
  EXPECT_EQ(DisplayWidth("e\u0301"), 1);
  EXPECT_EQ(DisplayWidth("😀"), 2);
  EXPECT_EQ(DisplayWidth("ß█"), 2);
  EXPECT_EQ(DisplayWidth("\x80\xff"), 2) << "an invalid byte takes one column";
}

TEST(TextWidthTest, ShortenNeverExceedsAndNeverCutsCharacters) {
  EXPECT_EQ(Shorten("hello", 5), "hello");
  EXPECT_EQ(Shorten("hello!", 5), "hell…");
  EXPECT_EQ(Shorten("日本語", 4), "日…");
  EXPECT_EQ(Shorten("日本語", 5), "日本…");
  EXPECT_EQ(Shorten("x", 0), "");
  for (int width = 0; width < 12; ++width)
    EXPECT_LE(DisplayWidth(Shorten("a日b本c語😀e\u0301z", width)), width);
}

TEST(TextWidthTest, ControlCharactersAreVisible) {
  EXPECT_EQ(Printable("a\x1b[31m\nb\tc\x7f"), "a\\x1b[31m\\nb\\tc\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "x"),
            "\\x9bx")
      << "C1 controls steer terminals too";
  EXPECT_EQ(Printable("日本 é"), "日本 é");
}

TEST(TableTest, AlignsWideCharacters) {
  Table table({Left("name"), Right("n")});
  table.Add({"日本", "1"});
  table.Add({"ab", "1,234"});
  EXPECT_EQ(table.Format(0), "name      n\n日本      1\nab    1,234\n");
}

TEST(TableTest, TextGivesWayToTheTerminalNumbersDoNot) {
  Table table({Left("name"), Right("count"), Left("path")});
  table.Add({std::string(40, 'n'), "1234567", std::string(60, 'p')});
  for (const int width : {40, 60, 80}) {
    const std::string text = table.Format(width);
    for (const std::string& line : LinesOf(text)) EXPECT_LE(DisplayWidth(line), width) << line;
    EXPECT_NE(text.find("1234567"), std::string::npos);
  }
  EXPECT_NE(table.Format(0).find(std::string(60, 'p')), std::string::npos);
}

TEST(TableTest, WhatPeopleCopyStaysWhole) {
  Table table({Whole("job"), Left("name")});
  table.Add({"job-12345678", std::string(40, 'n')});
  EXPECT_NE(table.Format(24).find("job-12345678  nnnnnnnnn…\n"), std::string::npos)
      << table.Format(24);
}

TEST(FormatTest, Numbers) {
  EXPECT_EQ(FormatBytes(812), "812 B");
  EXPECT_EQ(FormatBytes(1024 * 1024 - 1), "1.0 MiB");
  EXPECT_EQ(FormatBytes(int64_t{3} << 30), "3.0 GiB");
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(-1234567), "-1,234,567");
  EXPECT_EQ(FormatSeconds(7.4), "0:07");
  EXPECT_EQ(FormatSeconds(3725), "1:02:05");
  EXPECT_EQ(FormatSeconds(2 * 86400 + 3), "2 d 00:00:03");
  EXPECT_EQ(FormatSeconds(-1), "-");
  EXPECT_EQ(FormatRate(0.44), "0.4");
  EXPECT_EQ(FormatRate(12345.6), "12,346");
  EXPECT_EQ(FormatNumber(NAN), "-");
}

TEST(FormatTest, SizesAsTyped) {
  EXPECT_EQ(*ParseBytes("4GiB"), uint64_t{4} << 30);
  EXPECT_EQ(*ParseBytes("1.5 MiB"), 3u << 19);
  EXPECT_EQ(*ParseBytes("100MB"), 100'000'000u);
  EXPECT_EQ(*ParseBytes("4096"), 4096u);
  for (const char* text : {"", "GiB", "4XB", "-1", "1e400", "nan", "99999999999999TiB"})
    EXPECT_THAT(ParseBytes(text), StatusIs(absl::StatusCode::kInvalidArgument, "no size")) << text;
}

TEST(FormatTest, Allowances) {
  EXPECT_TRUE(ParseAllowance("0")->Allows(0, 10));
  EXPECT_FALSE(ParseAllowance("0")->Allows(1, 10));
  EXPECT_TRUE(ParseAllowance("10%")->Allows(1, 10));
  EXPECT_FALSE(ParseAllowance("9.9%")->Allows(1, 10));
  for (const char* text : {"", "-1", "101%", "1.5", "x", "5 %%"})
    EXPECT_THAT(ParseAllowance(text), StatusIs(absl::StatusCode::kInvalidArgument, "allowance"))
        << text;
}

TEST(SuggestTest, DistanceCountsSwapsOnce) {
  EXPECT_EQ(EditDistance("submit", "submit"), 0);
  EXPECT_EQ(EditDistance("sumbit", "submit"), 1);
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
}

TEST(SuggestTest, OnlyWhatIsNear) {
  const std::vector<std::string> known = {"submit", "list", "show", "samples", "make-checkpoint"};
  EXPECT_EQ(Nearest("sumbit", known), "submit");
  EXPECT_EQ(Nearest("lst", known), "list");
  EXPECT_EQ(Nearest("make", known), "make-checkpoint");
  EXPECT_EQ(Nearest("frobnicate", known), "");
}

v1::Job RunningJob() {
  v1::Job job;
  job.set_state(v1::JOB_STATE_RUNNING);
  job.mutable_counts()->set_submitted(64);
  job.mutable_counts()->set_stored(31);
  job.mutable_counts()->set_rejected(1);
  job.mutable_counts()->set_to_do(32);
  job.mutable_counts()->set_running(8);
  job.set_tokens_per_second(87.3);
  job.set_eta_seconds(35);
  return job;
}

TEST(ProgressTest, BarFillsByEighths) {
  EXPECT_EQ(Bar(0, 4), "    ");
  EXPECT_EQ(Bar(0.5, 4), "██  ");
  EXPECT_EQ(Bar(0.5 + 1.0 / 32, 4), "██▏ ");
  EXPECT_EQ(Bar(1, 4), "████");
  EXPECT_EQ(Bar(7, 4), "████");
}

TEST(ProgressTest, DescribesCountsRateAndEta) {
  EXPECT_EQ(DescribeProgress(RunningJob()),
            "31/64 stored · 1 rejected · 8 running · 87 tok/s · ETA 0:35");
}

TEST(ProgressTest, FitsTheTerminal) {
  for (int width = 10; width < 120; width += 7)
    EXPECT_LE(DisplayWidth(FormatProgress(RunningJob(), width)), width);
  EXPECT_NE(FormatProgress(RunningJob(), 100).find("█"), std::string::npos);
}

TEST(ProgressTest, APauseIsToldAtOnceWithItsReason) {
  std::ostringstream lines;
  v1::Job job = RunningJob();
  {
    Progress progress(lines, Progress::Style::kLines, 80);
    progress.Show(job);
    job.set_state(v1::JOB_STATE_PAUSED);
    job.set_message("paused at its gate: zero_boundary");
    progress.Show(job);
  }
  EXPECT_THAT(lines.str(), ::testing::HasSubstr("paused at its gate: zero_boundary"));
}

TEST(ProgressTest, PlainLinesHaveNoControlCharactersAndQuietSaysNothing) {
  std::ostringstream lines, quiet, bar;
  Progress(lines, Progress::Style::kLines, 80).Show(RunningJob());
  Progress(quiet, Progress::Style::kQuiet, 80).Show(RunningJob());
  Progress(bar, Progress::Style::kBar, 80).Show(RunningJob());
  EXPECT_EQ(lines.str(), "31/64 stored · 1 rejected · 8 running · 87 tok/s · ETA 0:35\n");
  EXPECT_EQ(quiet.str(), "");
  EXPECT_TRUE(bar.str().ends_with("\r\x1b[K")) << "the bar is cleared at the end";
}

v1::Statistics TwoBoundaries() {
  v1::Statistics statistics;
  for (const int boundary : {2, 61}) {
    v1::BoundaryStatistics& one = *statistics.add_boundaries();
    one.set_boundary(boundary);
    one.set_count(100);
    const int middle = boundary == 2 ? 100 : 140;
    for (int bin = 0; bin < 256; ++bin)
      one.add_row_rms_bins(bin == middle ? 98 : bin == middle - 8 || bin == middle + 8 ? 1 : 0);
    const auto rms = [&](int bin) { return std::exp2((bin + 0.5) / 8 - 16); };
    one.set_row_rms_p01(rms(middle - 8));
    one.set_row_rms_p50(rms(middle));
    one.set_row_rms_p99(rms(middle + 8));
  }
  return statistics;
}

TEST(PlotTest, KeepsToTheWidthAndOrdersBoundaries) {
  for (const int width : {40, 80, 200}) {
    const std::string rms = PlotRms(TwoBoundaries(), width);
    const std::string histograms = PlotHistograms(TwoBoundaries(), width);
    for (const std::string& line : LinesOf(rms + histograms)) {
      if (line.find("boundary") != std::string::npos) continue;  // the title
      EXPECT_LE(DisplayWidth(line), width) << line;
    }
    const std::vector<std::string> lines = LinesOf(rms);
    ASSERT_EQ(lines.size(), 4u);
    EXPECT_LT(DisplayWidth(lines[1].substr(0, lines[1].find("█"))),
              DisplayWidth(lines[2].substr(0, lines[2].find("█"))))
        << "the larger median lies further right";
    EXPECT_NE(histograms.find("▁"), std::string::npos) << "a single row is seen";
  }
}

TEST(PlotTest, LengthsKeepToTheWidthAndTellPromptFromAnswer) {
  v1::Statistics statistics;
  v1::SourceReport& source = *statistics.add_sources();
  source.set_source(std::string(300, 's'));
  for (int bin = 0; bin < 44; ++bin) {
    source.add_prompt_length_bins(bin == 10 ? 5 : 0);
    source.add_answer_length_bins(bin == 20 || bin == 21 ? 2 : 0);
  }
  for (const int width : {40, 100}) {
    const std::string lengths = PlotLengths(statistics, width);
    const std::vector<std::string> lines = LinesOf(lengths.substr(lengths.find('\n') + 1));
    ASSERT_EQ(lines.size(), 4u);
    for (const std::string& line : lines) EXPECT_LE(DisplayWidth(line), width) << line;
    EXPECT_LT(DisplayWidth(lines[1]), DisplayWidth(lines[2])) << "answers are longer";
    EXPECT_NE(lines[3].find("32"), std::string::npos) << "2^(10/2) tokens";
  }
  EXPECT_NE(PlotLengths(v1::Statistics(), 80).find("tokens"), std::string::npos);
}

TEST(PlotTest, NoRowsIsNoCrash) {
  v1::Statistics statistics;
  statistics.add_boundaries()->set_boundary(2);
  EXPECT_NE(PlotRms(statistics, 80).find("2"), std::string::npos);
  EXPECT_NE(PlotHistograms(statistics, 80).find("2"), std::string::npos);
}

TEST(TextWidthTest, WhatHasNoInkIsVisible) {
  EXPECT_EQ(VisibleSpace("a b\t"), "a·b→");
  EXPECT_EQ(VisibleSpace("a\u00a0\u200b\u3000\u202e"), "a\\u00a0\\u200b\\u3000\\u202e");
  EXPECT_EQ(VisibleSpace("日\n\x1b"), "日\\n\\x1b");
}

// Id i is the i-th of these texts.
class FixedText : public TokenText {
 public:
  explicit FixedText(std::vector<std::string> texts, std::vector<int32_t> special = {})
      : texts_(std::move(texts)), special_(std::move(special)) {}
  absl::StatusOr<std::vector<std::string>> TextOf(
      const std::vector<std::vector<int32_t>>& runs) override {
    std::vector<std::string> joined;
    for (const auto& run : runs) {
      joined.emplace_back();
      for (const int32_t id : run) joined.back() += texts_[static_cast<size_t>(id)];
    }
    return joined;
  }
  absl::StatusOr<std::string> SpecialsOf(const std::vector<int32_t>& ids) override {
    std::string specials;
    for (const int32_t id : ids) specials += std::ranges::count(special_, id) > 0 ? '\1' : '\0';
    return specials;
  }

 private:
  std::vector<std::string> texts_;
  std::vector<int32_t> special_;
};

TEST(MarkedTextTest, MarksIdsAndSpace) {
  FixedText text({"ab", " c\n", "日本", "\x1b"});
  const std::vector<int32_t> ids = {0, 1, 2, 3};
  const std::string mask("\0\1\1\0", 4);
  const auto marked = [&](const MarkedTextStyle& style) {
    return MarkedText(text, ids, mask, {}, style).value();
  };
  EXPECT_EQ(marked({}), "ab⟦ c\n日本⟧\\x1b");
  EXPECT_EQ(marked({.ids = true}), "ab‹0›⟦ c\n‹1›日本‹2›⟧\\x1b‹3›");
  EXPECT_EQ(marked({.whitespace = true}), "ab⟦·c↵\n日本⟧\\x1b");
  EXPECT_EQ(marked({.colour = true}), "ab\x1b[32m c\n日本\x1b[39m\x1b[2m\\x1b\x1b[22m");
  EXPECT_EQ(marked({.colour = true, .whitespace = true}).find('\x07'), std::string::npos);
}

TEST(MarkedTextTest, SpecialTokensHaveAColourThatTextSpellingThemHasNot) {
  FixedText text({"<|end|>", "<|end|>", "a b"}, {0});
  const std::vector<int32_t> ids = {0, 1, 2, 0, 0};
  const std::string mask("\0\0\1\1\1", 5);
  const auto marked = [&](const MarkedTextStyle& style) {
    return MarkedText(text, ids, mask, {}, style).value();
  };
  const std::string supervised = "\x1b[35;4m<|end|>\x1b[24m\x1b[32m";
  EXPECT_EQ(marked({.colour = true}),
            "\x1b[35m<|end|>\x1b[39m<|end|>\x1b[32ma b" + supervised + supervised + "\x1b[39m");
  EXPECT_NE(marked({.colour = true, .whitespace = true}).find("a\x1b[2m·\x1b[22mb"),
            std::string::npos);
  EXPECT_EQ(marked({}), "<|end|><|end|>⟦a b<|end|><|end|>⟧") << "none where it is piped";
}

TEST(MarkedTextTest, BackgroundsTellProbabilities) {
  FixedText text({"a", "b", "c", "d", "e"});
  const std::vector<int32_t> ids = {0, 1, 2, 3, 4};
  const std::string mask("\0\1\1\1\1", 5);
  const auto log_of = [](double p) { return static_cast<float>(std::log(p)); };
  const std::vector<float> logprobs = {std::nanf(""), log_of(0.9), log_of(0.001), log_of(0.002),
                                       log_of(0.3)};
  const auto marked = [&](const MarkedTextStyle& style) {
    return MarkedText(text, ids, mask, logprobs, style).value();
  };
  EXPECT_EQ(
      marked({.colour = true, .logprobs = true}),
      "a\x1b[32mb\x1b[48;5;88;38;5;231;4mcd\x1b[48;5;58;38;5;231;4me\x1b[49;24m\x1b[32m\x1b[39m");
  EXPECT_EQ(marked({.colour = true}), "a\x1b[32mbcde\x1b[39m");
  EXPECT_EQ(marked({.logprobs = true}), "a⟦bcde⟧") << "no colour without a terminal";
}

TEST(MarkedTextTest, LinesKeepToTheTerminal) {
  FixedText text({"words and 日本語 of\nmany ", "columns"});
  for (int width = 8; width < 40; ++width) {
    const std::string marked = MarkedText(text, {0, 1, 0}, std::string("\0\1\0", 3), {},
                                          {.ids = true, .whitespace = true, .width = width})
                                   .value();
    for (const std::string& line : LinesOf(marked)) EXPECT_LE(DisplayWidth(line), width) << line;
  }
}

TEST(MaskRunsTest, CoverEveryToken) {
  const std::vector<MaskRun> runs = RunsOf(std::string("\0\0\1\1\0", 5));
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[1].begin, 2u);
  EXPECT_EQ(runs[1].end, 4u);
  EXPECT_TRUE(runs[1].supervised);
  EXPECT_TRUE(RunsOf("").empty());
}

}  // namespace
}  // namespace statetap
