// The engine on GPUs: the text of tiny-kimi, and what a sample gives depends on nothing but the
// sample.
#include <cmath>

#include "tests/support/gpu.h"
#include "tests/support/tiny_kimi.h"

namespace statetap {
namespace {

using testing::Captured;
using testing::kHidden;
using testing::kLayers;
using testing::RunTasks;
using testing::SomeTasks;

// A choice of token that was closer than this in logits may go another way in bf16.
constexpr double kClearMargin = 0.75;

EngineOptions OnGpu(int ranks = 1) {
  EngineOptions options;
  options.backend = "cuda";
  options.ranks = ranks;
  return options;
}

void ExpectSame(const Captured& a, const Captured& b) {
  EXPECT_EQ(a.sampled, b.sampled);
  EXPECT_TRUE(a.states == b.states);  // every bit
  EXPECT_EQ(a.finished, b.finished);
  ASSERT_EQ(a.sampled_scores.size(), b.sampled_scores.size());
  for (size_t i = 0; i < a.sampled_scores.size(); ++i)
    EXPECT_EQ(a.sampled_scores[i].logprob, b.sampled_scores[i].logprob);
}

class CudaEngineTest : public ::testing::TestWithParam<std::tuple<int, EngineOptions::Experts>> {};

TEST_P(CudaEngineTest, GreedyContinuationsEqualTheReference) {
  SKIP_WITHOUT_GPU();
  EngineOptions options = OnGpu(std::get<0>(GetParam()));
  options.experts = std::get<1>(GetParam());
  const auto engine = testing::OpenTiny(options);
  const auto lines = testing::GreedyLines();
  const auto captured = RunTasks(*engine, SomeTasks(64, /*temperature=*/0), kHidden);
  int compared = 0, equal = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const bool same =
        captured[i].sampled == lines[i]["continuation_ids"].get<std::vector<int32_t>>();
    equal += same;
    if (lines[i]["min_margin"].get<double>() < kClearMargin) continue;
    ++compared;
    EXPECT_TRUE(same) << lines[i]["id"];
  }
  fmt::print("{} ranks: {} of 64 answers equal; of {} with a clear margin all\n", options.ranks,
             equal, compared);
  EXPECT_GE(compared, 40);
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaEngineTest,
                         ::testing::Combine(::testing::Values(1, 2, 4, 8),
                                            ::testing::Values(EngineOptions::Experts::kExpert,
                                                              EngineOptions::Experts::kTensor)));

// Alone, in a batch of 24, in small chunks, and again. (A sequence that was pushed out would read
// its own answer again as a prompt: other rounding.)
TEST(CudaEngineBitsTest, ASampleAloneAndInABatchIsTheSameBits) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 2}) {
    const auto tasks = SomeTasks(24, /*temperature=*/1);
    EngineOptions options = OnGpu(ranks);
    const auto engine = testing::OpenTiny(options);
    const auto together = RunTasks(*engine, tasks, kHidden);
    const auto again = RunTasks(*engine, tasks, kHidden);
    options.max_batch_tokens = 19;
    const auto chunked = RunTasks(*testing::OpenTiny(options), tasks, kHidden);
    for (size_t i = 0; i < tasks.size(); ++i) {
      ASSERT_TRUE(together[i].finished) << i;
      ExpectSame(together[i], again[i]);
      ExpectSame(together[i], chunked[i]);
      if (i % 6 == 0) ExpectSame(together[i], RunTasks(*engine, {tasks[i]}, kHidden)[0]);
    }
  }
}

TEST(CudaEngineBitsTest, AShardedResidualIsTheSameBits) {
  SKIP_WITHOUT_GPU();
  const auto tasks = SomeTasks(8, /*temperature=*/1);
  for (const int ranks : {2, 8}) {
    EngineOptions options = OnGpu(ranks);
    options.residual = EngineOptions::Residual::kSharded;
    const auto sharded = RunTasks(*testing::OpenTiny(options), tasks, kHidden);
    options.residual = EngineOptions::Residual::kReplicated;
    const auto replicated = RunTasks(*testing::OpenTiny(options), tasks, kHidden);
    for (size_t i = 0; i < tasks.size(); ++i) ExpectSame(sharded[i], replicated[i]);
  }
}

TEST(CudaEngineMemoryTest, StaysFlatOverManyJobs) {
  SKIP_WITHOUT_GPU();
  const auto engine = testing::OpenTiny(OnGpu());
  const auto tasks = SomeTasks(4, 1);
  size_t before = 0, after = 0, total = 0;
  for (int job = 0; job < 200; ++job) {
    RunTasks(*engine, tasks, kHidden);
    if (job == 5) testing::ExpectCuda(cudaMemGetInfo(&before, &total));
  }
  testing::ExpectCuda(cudaMemGetInfo(&after, &total));
  EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace statetap
