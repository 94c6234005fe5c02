#include "extractor/engine/scheduler.h"

#include <algorithm>
#include <map>
#include <set>

#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

SampleTask Task(uint64_t ticket, int prompt, int max_new = 0) {
  SampleTask task;
  task.ticket = ticket;
  task.input_ids.assign(static_cast<size_t>(prompt), 7);
  task.generate = max_new > 0;
  task.max_new_tokens = max_new;
  task.max_length = prompt + max_new;
  return task;
}

// Plays the engine: appends a token where one is drawn, ends at max_new. Counts how often each row
// of each sample was computed and checks what holds for every step.
struct Player {
  Scheduler scheduler;
  Scheduler::Limits limits;
  std::map<uint64_t, std::vector<int>> rows;  // by ticket: rows handed out, in order
  int steps = 0, recomputed = 0;

  explicit Player(Scheduler::Limits l) : scheduler(l), limits(l) {}

  void Step() {
    ++steps;
    const ScheduledStep step = scheduler.Next();
    ASSERT_GT(step.plan.num_tokens(), 0) << "a scheduler that is not idle must make progress";
    ASSERT_LE(step.plan.num_tokens(), limits.max_batch_tokens);
    CheckPages(step);
    for (const ScheduledRows& r : step.rows) Play(r);
    scheduler.TakeComplete();
  }
  void CheckPages(const ScheduledStep& step) {
    std::set<int32_t> used;
    for (const ScheduledRows& r : step.rows) {
      ASSERT_GE(static_cast<int>(r.sequence->pages.size()) * kPageTokens, r.first_token + r.count);
      for (const int32_t page : r.sequence->pages) {
        EXPECT_TRUE(used.insert(page).second) << "a page belongs to one sequence";
        EXPECT_LT(page, limits.num_pages);
      }
    }
  }
  void Play(const ScheduledRows& r) {
    Sequence& s = *r.sequence;
    EXPECT_EQ(r.first_token, s.computed);
    s.computed += r.count;
    for (int t = r.first_token; t < s.computed; ++t) {
      if (t >= s.handed_out) {
        rows[s.task.ticket].push_back(t);
      } else {
        ++recomputed;
      }
    }
    s.handed_out = std::max(s.handed_out, s.computed);
    EXPECT_EQ(r.samples,
              s.task.generate && !s.end && s.computed == static_cast<int>(s.tokens.size()));
    if (!r.samples) return;
    s.tokens.push_back(1);
    if (static_cast<int>(s.tokens.size()) == s.task.max_length) s.end = FinishReason::kLength;
  }
  void PlayAll() {
    while (!scheduler.Idle() && !::testing::Test::HasFatalFailure() && steps < 100000) Step();
    EXPECT_TRUE(scheduler.Idle());
  }
  void ExpectWhole(uint64_t ticket, int length) {
    const auto& handed = rows[ticket];
    ASSERT_EQ(static_cast<int>(handed.size()), length) << "sample " << ticket;
    for (int i = 0; i < length; ++i) EXPECT_EQ(handed[static_cast<size_t>(i)], i);
  }
};

TEST(SchedulerTest, EveryRowOnceWhateverTheBudget) {
  for (const int budget : {1, 3, 64, 1000}) {
    Player player({budget, 100, 100});
    const std::vector<std::pair<int, int>> samples = {{1, 0},  {1, 1},   {2, 5},  {63, 2},
                                                      {64, 1}, {65, 64}, {200, 0}};
    for (size_t i = 0; i < samples.size(); ++i)
      player.scheduler.Admit(Task(i, samples[i].first, samples[i].second));
    player.PlayAll();
    for (size_t i = 0; i < samples.size(); ++i)
      player.ExpectWhole(i, samples[i].first + samples[i].second);
    EXPECT_EQ(player.recomputed, 0);
  }
}

TEST(SchedulerTest, RunsOutOfPagesAndRecomputesTheYoungest) {
  Player player({64, 100, 6});  // 384 tokens; the samples want 5 · 150 at their ends
  for (uint64_t i = 0; i < 5; ++i) player.scheduler.Admit(Task(i, 50, 100));
  player.PlayAll();
  for (uint64_t i = 0; i < 5; ++i) player.ExpectWhole(i, 150);
  EXPECT_GT(player.recomputed, 0);
}

TEST(SchedulerTest, OneSampleMayFillTheCache) {
  Player player({16, 8, 4});
  for (uint64_t i = 0; i < 3; ++i) player.scheduler.Admit(Task(i, 200, 56));
  player.PlayAll();
  for (uint64_t i = 0; i < 3; ++i) player.ExpectWhole(i, 256);
}

TEST(SchedulerTest, AStepTakesAsManySamplesAsFillIt) {
  const auto admitted = [](Scheduler::Limits limits, int prompt) {
    Player player(limits);
    uint64_t count = 0;
    while (player.scheduler.HasRoom()) player.scheduler.Admit(Task(count++, prompt));
    const ScheduledStep step = player.scheduler.Next();
    EXPECT_EQ(step.plan.num_tokens(),
              std::min<int>(limits.max_batch_tokens, static_cast<int>(step.rows.size()) * prompt));
    player.PlayAll();
    for (uint64_t i = 0; i < count; ++i) player.ExpectWhole(i, prompt);
    EXPECT_EQ(player.recomputed, 0);
    return std::pair(count, step.rows.size());
  };
  EXPECT_EQ(admitted({64, 100, 100}, 5), std::pair(uint64_t{13}, size_t{13}));
  EXPECT_EQ(admitted({64, 100, 100}, 200), std::pair(uint64_t{1}, size_t{1}));
  EXPECT_EQ(admitted({64, 8, 100}, 5), std::pair(uint64_t{8}, size_t{8}));
  EXPECT_EQ(admitted({1000, 100, 5}, 100), std::pair(uint64_t{3}, size_t{2})) << "the third waits";
}

TEST(SchedulerTest, DecodingGoesBeforePrompts) {
  Player player({8, 10, 100});
  player.scheduler.Admit(Task(0, 4, 50));
  player.Step();
  player.scheduler.Admit(Task(1, 1000));
  const ScheduledStep step = player.scheduler.Next();
  ASSERT_EQ(step.rows.size(), 2u);
  EXPECT_EQ(step.rows[0].sequence->task.ticket, 0u);
  EXPECT_EQ(step.rows[0].count, 1);
  EXPECT_EQ(step.rows[1].count, 7);
}

TEST(SchedulerTest, RemoveGivesPagesBack) {
  Player player({64, 10, 4});
  player.scheduler.Admit(Task(0, 200, 50));
  player.scheduler.Admit(Task(1, 200, 50));
  player.Step();
  EXPECT_TRUE(player.scheduler.Remove(0));
  EXPECT_FALSE(player.scheduler.Remove(0));
  EXPECT_EQ(player.scheduler.Tickets(), std::vector<uint64_t>{1});
  player.PlayAll();
  player.ExpectWhole(1, 250);
}

TEST(SchedulerTest, BoundariesAreTheUnion) {
  Scheduler scheduler({64, 10, 10});
  for (uint64_t i = 0; i < 2; ++i) {
    SampleTask task = Task(i, 3);
    task.boundaries = i == 0 ? std::vector<int>{2, 8} : std::vector<int>{0, 2};
    scheduler.Admit(std::move(task));
  }
  EXPECT_EQ(scheduler.Next().plan.boundaries, (std::vector<int>{0, 2, 8}));
}

}  // namespace
}  // namespace statetap
