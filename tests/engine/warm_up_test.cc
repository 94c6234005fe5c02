#include "extractor/engine/warm_up.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

namespace statetap {
namespace {

bool Decodes(const StepPlan& plan) {
  return std::all_of(plan.decodes.begin(), plan.decodes.end(), [](uint8_t d) { return d != 0; });
}

// The sizes of the steps, after a look at what every step must keep to.
struct Sizes {
  std::vector<int> prompts, decoding;  // tokens of the steps, in order
};
Sizes SizesOf(const std::vector<StepPlan>& plans, const Scheduler::Limits& limits, int longest,
              int vocab) {
  Sizes sizes;
  for (const StepPlan& plan : plans) {
    EXPECT_GT(plan.num_tokens(), 0);
    EXPECT_LE(plan.num_tokens(), limits.max_batch_tokens);
    EXPECT_LE(plan.num_seqs, limits.max_running);
    EXPECT_EQ(plan.boundaries, (std::vector<int>{0, 1}));
    std::set<int32_t> pages;
    for (const int32_t page : plan.page_table) {
      EXPECT_LT(page, limits.num_pages);
      EXPECT_TRUE(page < 0 || pages.insert(page).second) << "a page belongs to one sequence";
    }
    for (size_t t = 0; t < plan.ids.size(); ++t) {
      EXPECT_GE(plan.ids[t], 0);
      EXPECT_LT(plan.ids[t], vocab);
      EXPECT_LT(plan.positions[t], longest);
      const auto at = static_cast<size_t>(plan.sequence[t] * plan.pages_per_seq +
                                          plan.positions[t] / kPageTokens);
      EXPECT_GE(plan.page_table[at], 0);
    }
    if (Decodes(plan)) {
      EXPECT_EQ(plan.logit_rows.size(), plan.ids.size());
      EXPECT_EQ(plan.num_seqs, plan.num_tokens());
      sizes.decoding.push_back(plan.num_tokens());
    } else {
      sizes.prompts.push_back(plan.num_tokens());
    }
  }
  return sizes;
}

Sizes Steps(const Scheduler::Limits& limits, int longest, int vocab = 1000) {
  return SizesOf(WarmUpSteps(limits, longest, vocab, {0, 1}), limits, longest, vocab);
}

TEST(WarmUpTest, StepsGoFromTheLargestPossibleToOneTokenByHalves) {
  const Sizes sizes = Steps({8192, 256, 4096}, 4096);
  EXPECT_EQ(sizes.prompts,
            (std::vector<int>{8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1}));
  // Of one row thrice and more: a graph is recorded, and launched again.
  EXPECT_EQ(sizes.decoding, (std::vector<int>{256, 128, 64, 32, 16, 8, 4, 2, 1, 1, 1, 1, 1, 1}));
}

TEST(WarmUpTest, NoTokenOfTheLargestStepIsLostToASizeThatDoesNotDivide) {
  const Sizes sizes = Steps({1000, 7, 1000}, 600);
  EXPECT_EQ(sizes.prompts.front(), 1000);
  EXPECT_EQ(sizes.decoding.front(), 7);
  EXPECT_EQ(sizes.prompts.back(), 1);
}

TEST(WarmUpTest, ASmallCacheAndShortSequencesCutTheSteps) {
  // Three pages: three sequences of a page each, of which one token is drawn.
  const Sizes few = Steps({512, 256, 3}, 192);
  EXPECT_EQ(few.prompts.front(), 3 * (kPageTokens - 1));
  EXPECT_EQ(few.decoding.front(), 3);
  // Eleven tokens at most: ten are read.
  EXPECT_EQ(Steps({512, 4, 100}, 11).prompts.front(), 40);
  // One sequence at a time.
  const Sizes alone = Steps({512, 1, 100}, 6400);
  EXPECT_EQ(alone.prompts.front(), 512);
  EXPECT_EQ(*std::max_element(alone.decoding.begin(), alone.decoding.end()), 1);
  // Nothing can be drawn.
  const Sizes single = Steps({4, 2, 100}, 1);
  EXPECT_EQ(single.prompts, (std::vector<int>{2, 1, 1}));
  EXPECT_TRUE(single.decoding.empty());
}

TEST(WarmUpTest, IdsOfASmallVocabularyStartAgain) {
  for (const StepPlan& plan : WarmUpSteps({64, 4, 16}, 64, /*vocab=*/3, {})) {
    for (const int32_t id : plan.ids) EXPECT_LT(id, 3);
  }
}

}  // namespace
}  // namespace statetap
