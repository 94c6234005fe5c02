// Sums over the tokens of samples, by source, against what is plain to see.
#include "extractor/shard/token_report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

namespace statetap {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<int32_t> Counting(int count, int from = 0) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), from);
  return ids;
}

std::vector<int32_t> Repeated(const std::vector<int32_t>& part, int times) {
  std::vector<int32_t> ids;
  for (int i = 0; i < times; ++i) ids.insert(ids.end(), part.begin(), part.end());
  return ids;
}

TEST(EndsInLoopTest, OnlyLongRepetitionsAtTheEnd) {
  EXPECT_FALSE(EndsInLoop({}));
  EXPECT_FALSE(EndsInLoop(Counting(500)));
  EXPECT_TRUE(EndsInLoop(Repeated({5}, 48)));
  EXPECT_FALSE(EndsInLoop(Repeated({5}, 47)));
  EXPECT_TRUE(EndsInLoop(Repeated(Counting(12), 4)));
  EXPECT_FALSE(EndsInLoop(Repeated(Counting(12), 3)));
  EXPECT_TRUE(EndsInLoop(Repeated(Counting(64), 4)));
  EXPECT_FALSE(EndsInLoop(Repeated(Counting(65), 4)));
  std::vector<int32_t> ended = Repeated(Counting(20), 10);
  for (const int32_t id : Counting(30, 100)) ended.push_back(id);
  EXPECT_FALSE(EndsInLoop(ended));
  std::vector<int32_t> began = Counting(30, 100);
  for (const int32_t id : Repeated(Counting(20), 4)) began.push_back(id);
  began.push_back(0);  // in the middle of the next time
  EXPECT_TRUE(EndsInLoop(began));
}

SampleRecord Answer(const std::vector<int32_t>& answer, std::string finish) {
  SampleRecord sample{.source = "a", .input_ids = {1, 2}};
  sample.input_ids.insert(sample.input_ids.end(), answer.begin(), answer.end());
  sample.prompt_tokens = 2;
  sample.loss_mask.assign(sample.input_ids.size(), 1);
  sample.loss_mask[0] = sample.loss_mask[1] = 0;
  sample.finish_reason = std::move(finish);
  return sample;
}

TEST(TokenReportTest, AnswersThatWentWrong) {
  TokenReport report;
  report.Add(Answer({9}, "stop"), {});
  report.Add(Answer({}, "length"), {});
  report.Add(Answer(Repeated({5, 6}, 30), "length"), {});
  std::vector<int32_t> stopped = Repeated({5, 6}, 30);
  stopped.push_back(9);
  report.Add(Answer(stopped, "stop"), {});
  report.Add(Answer(Counting(80), "stop"), {});
  report.Add(Answer(Repeated({5, 6}, 30), "prefill"), {});  // somebody else's
  const SourceReport& found = report.sources().at("a");
  EXPECT_EQ(found.samples, 6);
  EXPECT_EQ(found.generated, 5);
  EXPECT_EQ(found.empty, 2);
  EXPECT_EQ(found.hit_limit, 2);
  EXPECT_EQ(found.looping, 2);
  EXPECT_EQ(found.supervised, 1 + 0 + 60 + 61 + 80 + 60);
}

TEST(TokenReportTest, ThoughtsWithoutAnEnd) {
  ShardConfig config;
  config.think_token = 70;
  config.think_end_token = 71;
  SampleRecord opened_by_prompt = Answer({5, 71, 6}, "stop");
  opened_by_prompt.input_ids[1] = 70;
  SampleRecord cut = opened_by_prompt;
  cut.input_ids[3] = 5;
  TokenReport report, unknown;
  for (const SampleRecord& sample :
       {opened_by_prompt, cut, Answer({70, 5, 5}, "length"), Answer({70, 5, 71}, "stop"),
        Answer({5, 5}, "stop"), Answer({}, "length"), Answer({70, 5}, "prefill")}) {
    report.Add(sample, config);
    unknown.Add(sample, {});
  }
  EXPECT_EQ(report.sources().at("a").thinking, 4);
  EXPECT_EQ(report.sources().at("a").unclosed, 2);
  EXPECT_EQ(unknown.sources().at("a").thinking, 0) << "the shard does not say which token it is";
}

TEST(TokenReportTest, LengthsFallIntoHalfOctaves) {
  TokenReport report;
  for (const int tokens : {0, 1, 2, 3, 4, 1000}) {
    SampleRecord sample = Answer(Counting(tokens), "stop");
    sample.input_ids.insert(sample.input_ids.begin(), 30, 1);
    sample.loss_mask.insert(sample.loss_mask.begin(), 30, 0);
    sample.prompt_tokens = 32;
    report.Add(sample, {});
  }
  const SourceReport& found = report.sources().at("a");
  EXPECT_EQ(found.prompt_lengths[10], 6);  // 2^(10/2)
  EXPECT_EQ(found.prompt_tokens, 6 * 32);
  EXPECT_EQ(found.answer_lengths[0], 2);
  EXPECT_EQ(found.answer_lengths[2], 1);  // 2 to 2.83
  EXPECT_EQ(found.answer_lengths[3], 1);  // to 4
  EXPECT_EQ(found.answer_lengths[4], 1);
  EXPECT_EQ(found.answer_lengths[19], 1);  // 724 to 1024
}

TEST(TokenReportTest, OnlySupervisedScoredTokensCountForTheGap) {
  SampleRecord sample = Answer(Counting(3), "stop");
  sample.logprobs = {-100, kNan, -1, -3, kNan};
  sample.entropies = {1, kNan, 0.5, 1.5, 7};
  TokenReport report;
  report.Add(sample, {});
  const SourceReport& found = report.sources().at("a");
  EXPECT_EQ(found.scored, 2);
  EXPECT_DOUBLE_EQ(found.PolicyGap(), (1 + 3 - 0.5 - 1.5) / 2);
  // Gaps 0.5 and 1.5: standard deviation 0.5 over the root of n − 1.
  EXPECT_DOUBLE_EQ(found.PolicyGapError(), 0.5);
  EXPECT_TRUE(std::isnan(SourceReport().PolicyGap()));
}

TEST(TokenReportTest, MergedEqualsAddedOneByOne) {
  SampleRecord one = Answer(Counting(50), "stop"), other = Answer({9}, "length");
  one.logprobs.assign(one.input_ids.size(), -0.7f);
  one.entropies.assign(one.input_ids.size(), 0.9f);
  other.source = "b";
  TokenReport together, first, second;
  for (const SampleRecord& sample : {one, other, one}) together.Add(sample, {});
  first.Add(one, {});
  second.Add(other, {});
  second.Add(one, {});
  first.Merge(second);
  ASSERT_EQ(first.sources().size(), 2u);
  EXPECT_EQ(first.sources().at("a").scored, together.sources().at("a").scored);
  EXPECT_DOUBLE_EQ(first.sources().at("a").PolicyGap(), together.sources().at("a").PolicyGap());
  EXPECT_EQ(first.sources().at("b").hit_limit, 1);
  EXPECT_EQ(first.sources().at("a").answer_lengths, together.sources().at("a").answer_lengths);
  EXPECT_EQ(first.sources().at("a").prompt_tokens, together.sources().at("a").prompt_tokens);
}

}  // namespace
}  // namespace statetap
