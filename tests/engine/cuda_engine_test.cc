// The engine on GPUs: the text of tiny-kimi, and what a sample gives depends on nothing but the
// sample.
#include <cmath>
#include <fstream>
#include <future>

#include "extractor/backend/cuda/gemm.h"
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
  if (testing::CommHere(ranks) == CudaOptions::Comm::kNccl) options.comm = "nccl";
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

// Alone, in a batch of 64, in small chunks, and again. (A sequence that was pushed out would read
// its own answer again as a prompt: other rounding.)
TEST(CudaEngineBitsTest, ASampleAloneAndInABatchIsTheSameBits) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 2}) {
    const auto tasks = SomeTasks(64, /*temperature=*/1);
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
      if (i % 16 == 0) ExpectSame(together[i], RunTasks(*engine, {tasks[i]}, kHidden)[0]);
    }
  }
}

// Prompts and rows that decode round in other places: how far apart the states of the same tokens
// are, drawn one by one and read again as one prompt.
TEST(CudaEnginePhasesTest, AnAnswerReadAgainDiffersByRounding) {
  SKIP_WITHOUT_GPU();
  const auto tasks = SomeTasks(16, /*temperature=*/0);
  const auto engine = testing::OpenTiny(OnGpu());
  const auto drawn = RunTasks(*engine, tasks, kHidden);
  std::vector<SampleTask> again = tasks;
  for (size_t i = 0; i < tasks.size(); ++i) {
    again[i].generate = false;
    again[i].input_ids.insert(again[i].input_ids.end(), drawn[i].sampled.begin(),
                              drawn[i].sampled.end());
  }
  const auto read = RunTasks(*engine, again, kHidden);
  for (const int boundary : tasks[0].boundaries) {
    std::vector<double> errors;  // of the rows of answers, relative
    for (size_t i = 0; i < tasks.size(); ++i) {
      const auto &ours = read[i].states.at(boundary), &first = drawn[i].states.at(boundary);
      ASSERT_EQ(ours.size(), first.size());
      for (size_t at = tasks[i].input_ids.size() * kHidden; at < ours.size(); at += kHidden) {
        double error = 0, norm = 0;
        for (size_t c = at; c < at + kHidden; ++c) {
          const double value = Bf16ToFloat(first[c]), difference = Bf16ToFloat(ours[c]) - value;
          error += difference * difference;
          norm += value * value;
        }
        errors.push_back(std::sqrt(error / norm));
      }
    }
    std::sort(errors.begin(), errors.end());
    const double median = errors[errors.size() / 2];
    fmt::print(
        "1 ranks: {} rows drawn and read again, boundary {}: relative difference {:.1e} in "
        "the median, {:.1e} at 99 %\n",
        errors.size(), boundary, median, errors[errors.size() * 99 / 100]);
    EXPECT_GT(median, 0);
    EXPECT_LT(median, 2e-2);
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

SampleTask LongPrompt(int length) {
  SampleTask task;
  uint32_t draw = 1;
  for (int i = 0; i < length; ++i) {
    draw = draw * 1664525 + 1013904223;
    task.input_ids.push_back(static_cast<int32_t>((draw >> 8) % 2048));
  }
  task.max_length = length;
  task.boundaries = {2, kLayers};
  return task;
}

TEST(CudaEngineCacheTest, ZeroIsACacheOfWhatIsLeft) {
  SKIP_WITHOUT_GPU();
  EngineOptions options = OnGpu(2);
  options.max_batch_tokens = 0;
  options.kv_cache_bytes = 0;
  const auto engine = testing::OpenTiny(options);
  EXPECT_EQ(engine->options().max_batch_tokens, 16'384);
  // More than a GiB, and no more than all samples in flight use: a GPU has room for that.
  EXPECT_EQ(engine->info().kv_tokens, int64_t{options.max_running} * engine->info().max_seq_len);
  EXPECT_TRUE(RunTasks(*engine, SomeTasks(1, 1), kHidden)[0].finished);
}

// Halves of a step in turns, cut within the sequence, against steps too small for that.
TEST(CudaEngineBitsTest, ALargeStepInHalvesIsTheBitsOfSmallOnes) {
  SKIP_WITHOUT_GPU();
  const SampleTask task = LongPrompt(13'001);
  for (const int ranks : {2, 8}) {
    EngineOptions options = OnGpu(ranks);
    options.max_seq_len = 13'024;
    std::vector<Captured> runs;
    for (const int batch : {13'024, 1'024}) {
      options.max_batch_tokens = batch;
      runs.push_back(RunTasks(*testing::OpenTiny(options), {task}, kHidden)[0]);
      ASSERT_EQ(runs.back().finished, FinishReason::kPrefill);
    }
    ExpectSame(runs[0], runs[1]);
  }
}

// The same of many samples, scored and answered, in steps that also decode.
TEST(CudaEngineBitsTest, SamplesInHalvesAreTheBitsOfSmallSteps) {
  SKIP_WITHOUT_GPU();
  std::vector<SampleTask> tasks = SomeTasks(48, /*temperature=*/1);
  for (size_t i = 0; i < tasks.size(); ++i) {
    tasks[i].input_ids = LongPrompt(500 + 13 * static_cast<int>(i)).input_ids;
    tasks[i].max_length = 2'048;
    tasks[i].max_new_tokens = 3;
    tasks[i].token_scores = true;
  }
  for (const int ranks : {2, 8}) {
    EngineOptions options = OnGpu(ranks);
    std::vector<std::vector<Captured>> runs;
    for (const int batch : {16'384, 1'024}) {
      options.max_batch_tokens = batch;
      runs.push_back(RunTasks(*testing::OpenTiny(options), tasks, kHidden));
    }
    for (size_t i = 0; i < tasks.size(); ++i) {
      ASSERT_TRUE(runs[0][i].finished) << i;
      ExpectSame(runs[0][i], runs[1][i]);
    }
  }
}

// Algorithms are chosen while loading: no job meets a product that the warm-up has not met on that
// rank, whatever its steps are.
TEST(CudaEngineWarmUpTest, NoJobChoosesAnAlgorithm) {
  SKIP_WITHOUT_GPU();
  using Residual = EngineOptions::Residual;
  for (const int ranks : {1, 2, 8}) {
    for (const auto& [batch, residual] : {std::pair(512, Residual::kAuto),
                                          {512, Residual::kSharded},
                                          {19, Residual::kReplicated}}) {
      EngineOptions options = OnGpu(ranks);
      options.max_batch_tokens = batch;
      options.residual = residual;
      const int64_t before = cuda::Gemm::NumMet();
      const auto engine = testing::OpenTiny(options);
      const int64_t loaded = cuda::Gemm::NumMet();
      EXPECT_GT(loaded, before);
      // Prompts of all lengths with answers, few and many at once, one that fills steps alone, and
      // a prompt's scores.
      RunTasks(*engine, SomeTasks(64, /*temperature=*/1), kHidden);
      RunTasks(*engine, SomeTasks(1, /*temperature=*/0), kHidden);
      SampleTask scored = LongPrompt(700);
      scored.token_scores = true;
      EXPECT_EQ(RunTasks(*engine, {scored}, kHidden)[0].finished, FinishReason::kPrefill);
      EXPECT_EQ(cuda::Gemm::NumMet(), loaded) << ranks << " ranks, steps of " << batch << " tokens";
    }
  }
}

// Fault classes 4 and 12: a step of more than 65,535 rows, against chunks of 4,096.
TEST(CudaEngineLargeTest, SixtySixThousandTokensInOneStepAreTheBitsOfManySteps) {
  SKIP_WITHOUT_GPU();
  const SampleTask task = LongPrompt(66'000);
  std::vector<Captured> runs;
  for (const int batch : {66'048, 4'096}) {
    EngineOptions options = OnGpu();
    options.max_seq_len = 66'048;
    options.max_batch_tokens = batch;
    options.kv_cache_bytes = int64_t{2} << 30;
    runs.push_back(RunTasks(*testing::OpenTiny(options), {task}, kHidden)[0]);
    ASSERT_EQ(runs.back().finished, FinishReason::kPrefill);
  }
  ASSERT_EQ(runs[0].states.at(kLayers).size(), size_t{66'000} * kHidden);
  ExpectSame(runs[0], runs[1]);
}

// The same samples over every carrier of rows that this machine has.
TEST(CudaEngineCommTest, NcclAndPeerMemoryGiveTheSameBits) {
  SKIP_WITHOUT_GPU();
  EngineOptions options = OnGpu(2);
  options.comm = "nccl";
  if (!HasNccl() || NumGpus() < 2) {
    // No two ranks share a GPU over NCCL: said with the flag and what to do.
    const auto refused = Engine::Open(testing::Tiny(), options);
    EXPECT_THAT(refused, testing::StatusIs(absl::StatusCode::kInvalidArgument, "--comm nccl"));
    EXPECT_THAT(refused, testing::StatusIs(absl::StatusCode::kInvalidArgument, "--comm peer"));
    options.ranks = 1;
    if (HasNccl()) {
      EXPECT_TRUE(RunTasks(*testing::OpenTiny(options), SomeTasks(1, 1), kHidden)[0].finished);
    }
    GTEST_SKIP() << "two ranks over NCCL need two GPUs and NCCL; one rank was tested";
  }
  const auto tasks = SomeTasks(8, /*temperature=*/1);
  for (const auto residual :
       {EngineOptions::Residual::kSharded, EngineOptions::Residual::kReplicated}) {
    options.residual = residual;
    options.comm = "nccl";
    const auto nccl = RunTasks(*testing::OpenTiny(options), tasks, kHidden);
    options.comm = "peer";
    const auto peer = RunTasks(*testing::OpenTiny(options), tasks, kHidden);
    for (size_t i = 0; i < tasks.size(); ++i) {
      EXPECT_TRUE(nccl[i].finished);
      ExpectSame(nccl[i], peer[i]);
    }
  }
}

// Fault class 31.
class CudaEngineFaultTest : public ::testing::TestWithParam<int> {};

TEST_P(CudaEngineFaultTest, ADeadOrStuckRankEndsTheRunAsUnavailableInTime) {
  SKIP_WITHOUT_GPU();
  const int ranks = GetParam();
  std::vector<std::string> comms = {"peer"};
  if (HasNccl() && NumGpus() >= ranks) comms.push_back("nccl");
  for (const std::string& comm : comms) {
    for (const bool stuck : {false, true}) {
      // Never kept: a rank that wakes later ends its communicator then, beside whatever the process
      // does next.
      auto& wake = *new std::promise<void>;  // NOLINT: on purpose
      EngineOptions options = OnGpu(ranks);
      options.comm = comm;
      options.step_timeout = std::chrono::seconds(5);  // of 20, so that the test is short
      options.before_step = [stuck, woken = wake.get_future().share()](int rank, int64_t step) {
        if (rank != 1 || step != 30) return;
        if (!stuck) throw std::runtime_error("the power went");
        woken.wait();
      };
      auto engine = testing::OpenTiny(options);
      testing::Harness harness(SomeTasks(8, 1), kHidden);
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_THAT(engine->Run(harness, harness),
                  testing::StatusIs(absl::StatusCode::kUnavailable,
                                    stuck ? "stuck: rank 1" : "the power went"));
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      EXPECT_LT(took.count(), 30);
      fmt::print("{} ranks over {}: a {} rank is UNAVAILABLE after {:.1f} s\n", ranks, comm,
                 stuck ? "stuck" : "dead", took.count());
      for (const Captured& result : harness.results()) EXPECT_FALSE(result.failed);
      engine = nullptr;
      // Another engine of the process is none the worse.
      const auto next = RunTasks(*testing::OpenTiny(OnGpu(ranks)), SomeTasks(1, 1), kHidden);
      EXPECT_TRUE(next[0].finished);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaEngineFaultTest, ::testing::Values(2, 8));

// Kilobytes of this process in memory.
int64_t ResidentKb() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("VmRSS:")) return std::stoll(line.substr(6));
  }
  return 0;
}

TEST(CudaEngineMemoryTest, StaysFlatOverManyJobs) {
  SKIP_WITHOUT_GPU();
  const auto engine = testing::OpenTiny(OnGpu());
  const auto tasks = SomeTasks(4, 1);
  size_t before = 0, after = 0, total = 0;
  int64_t host = 0;
  for (int job = 0; job < 200; ++job) {
    RunTasks(*engine, tasks, kHidden);
    if (job != 20) continue;
    testing::ExpectCuda(cudaMemGetInfo(&before, &total));
    host = ResidentKb();
  }
  testing::ExpectCuda(cudaMemGetInfo(&after, &total));
  EXPECT_EQ(after, before);
  EXPECT_LT(ResidentKb(), host + 8 * 1024);
  fmt::print("200 jobs on 1 ranks: {} KiB more of the GPU, {} KiB more of the host since job 20\n",
             (static_cast<int64_t>(before) - static_cast<int64_t>(after)) / 1024,
             ResidentKb() - host);
}

}  // namespace
}  // namespace statetap
