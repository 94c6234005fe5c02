// The engine on tiny-kimi: what a sample gives depends on nothing but the sample.
#include "extractor/engine/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <future>
#include <random>
#include <stdexcept>
#include <thread>

#include "extractor/model/weights.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_kimi.h"

namespace statetap {
namespace {

using testing::Captured;
using testing::Harness;
using testing::RunTasks;

using testing::GenerateTask;
using testing::GreedyLines;
using testing::kHidden;
using testing::kImEnd;
using testing::kLayers;
using testing::SomeTasks;
using testing::Tiny;

std::unique_ptr<Engine> Open(const EngineOptions& options = {}) {
  return testing::OpenTiny(options);
}

std::vector<int32_t> RandomIds(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids;
  for (size_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(random() % 2048));
  return ids;
}

SampleTask PrefillTask(std::vector<int32_t> ids, std::vector<int> boundaries = {0, 2, kLayers}) {
  SampleTask task;
  task.input_ids = std::move(ids);
  task.max_length = static_cast<int>(task.input_ids.size());
  task.boundaries = std::move(boundaries);
  return task;
}

void ExpectSame(const Captured& a, const Captured& b) {
  EXPECT_EQ(a.sampled, b.sampled);
  EXPECT_EQ(a.states, b.states);  // every bit
  EXPECT_EQ(a.finished, b.finished);
  ASSERT_EQ(a.sampled_scores.size(), b.sampled_scores.size());
  for (size_t i = 0; i < a.sampled_scores.size(); ++i)
    EXPECT_EQ(a.sampled_scores[i].logprob, b.sampled_scores[i].logprob);
}

// The vendor-format prompts of the fixture, answered greedily: equal to transformers' wherever no
// two tokens were nearly tied.
TEST(EngineTest, GreedyContinuationsEqualTheReference) {
  const auto engine = Open();
  const auto lines = GreedyLines();
  ASSERT_EQ(lines.size(), 64u);
  const auto tasks = SomeTasks(64, /*temperature=*/0);
  const auto captured = RunTasks(*engine, tasks, kHidden);
  int compared = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(captured[i].states.at(kLayers).size(),
              (tasks[i].input_ids.size() + captured[i].sampled.size()) * kHidden);
    if (lines[i]["min_margin"].get<double>() < 1e-2)
      continue;  // fp32 in another order decides there
    ++compared;
    EXPECT_EQ(captured[i].sampled, lines[i]["continuation_ids"].get<std::vector<int32_t>>())
        << lines[i]["id"];
    EXPECT_EQ(captured[i].finished,
              captured[i].sampled.back() == kImEnd ? FinishReason::kStop : FinishReason::kLength);
  }
  EXPECT_GE(compared, 60);
}

TEST(EngineTest, ZeroMeansWhatSuitsTheBackend) {
  EngineOptions options;
  options.max_batch_tokens = 0;
  options.kv_cache_bytes = 0;
  for (const int ranks : {1, 2}) {
    options.ranks = ranks;
    const auto engine = Open(options);
    EXPECT_EQ(engine->options().max_batch_tokens, 512);
    // 1 GiB, in pages of 64 tokens of 80 floats in 8 layers on each rank.
    EXPECT_EQ(engine->info().kv_tokens, (int64_t{1} << 30) / ranks / (64 * 80 * 4 * 8) * 64);
  }
}

// Alone, in a batch of 24, in small chunks, with so few pages that sequences are pushed out, and
// again.
TEST(EngineTest, ASampleAloneAndInABatchIsTheSameBits) {
  const auto tasks = SomeTasks(24, /*temperature=*/1);
  const auto engine = Open();
  const auto together = RunTasks(*engine, tasks, kHidden);
  const auto again = RunTasks(*engine, tasks, kHidden);
  EngineOptions small;
  small.max_batch_tokens = 19;
  small.kv_cache_bytes = int64_t{17} * 64 * 80 * 4 * 8;  // 17 pages
  const auto chunked = RunTasks(*Open(small), tasks, kHidden);
  for (size_t i = 0; i < tasks.size(); ++i) {
    ASSERT_TRUE(together[i].finished) << i;
    ExpectSame(together[i], again[i]);
    ExpectSame(together[i], chunked[i]);
    ExpectSame(together[i], RunTasks(*engine, {tasks[i]}, kHidden)[0]);
  }
}

TEST(EngineTest, PrefillOfAGeneratedTextGivesTheSameStatesAndScores) {
  const auto engine = Open();
  const auto generated = RunTasks(*engine, SomeTasks(8, /*temperature=*/1), kHidden);
  auto tasks = SomeTasks(8, 1);
  std::vector<size_t> prompts;
  for (size_t i = 0; i < tasks.size(); ++i) {
    SampleTask& task = tasks[i];
    prompts.push_back(task.input_ids.size());
    task.input_ids.insert(task.input_ids.end(), generated[i].sampled.begin(),
                          generated[i].sampled.end());
    task.generate = false;
  }
  const auto prefilled = RunTasks(*engine, tasks, kHidden);
  EngineOptions small;
  small.max_batch_tokens = 19;
  const auto chunked = RunTasks(*Open(small), tasks, kHidden);
  for (size_t i = 0; i < tasks.size(); ++i) {
    ASSERT_EQ(chunked[i].scores.size(), prefilled[i].scores.size());
    for (const auto& [token, score] : prefilled[i].scores)
      EXPECT_EQ(score.logprob, chunked[i].scores.at(token).logprob) << token;
    EXPECT_EQ(prefilled[i].finished, FinishReason::kPrefill);
    EXPECT_EQ(prefilled[i].states, generated[i].states);
    ASSERT_EQ(prefilled[i].scores.size(), tasks[i].input_ids.size() - 1);
    for (size_t k = 0; k < generated[i].sampled.size(); ++k) {
      const TokenScore& score = prefilled[i].scores.at(static_cast<int64_t>(prompts[i] + k));
      EXPECT_EQ(score.logprob, generated[i].sampled_scores[k].logprob);
      EXPECT_EQ(score.entropy, generated[i].sampled_scores[k].entropy);
    }
  }
}

// What an API's "echo" asks for, in one pass: the prompt's scores as in prefill, in chunks and with
// sequences pushed out too, and the answer as without them.
TEST(EngineTest, ScoresOfAPromptComeWithItsAnswer) {
  auto tasks = SomeTasks(12, /*temperature=*/1);
  const auto plain = RunTasks(*Open(), tasks, kHidden);
  auto prefill = tasks;
  for (SampleTask& task : prefill) task.generate = false;
  const auto scored = RunTasks(*Open(), prefill, kHidden);
  for (SampleTask& task : tasks) task.prompt_scores = true;
  EngineOptions small;
  small.max_batch_tokens = 19;
  small.kv_cache_bytes = int64_t{17} * 64 * 80 * 4 * 8;  // 17 pages
  for (const EngineOptions& options : {EngineOptions{}, small}) {
    const auto both = RunTasks(*Open(options), tasks, kHidden);
    for (size_t i = 0; i < tasks.size(); ++i) {
      ExpectSame(both[i], plain[i]);
      ASSERT_EQ(both[i].scores.size(), tasks[i].input_ids.size() - 1);
      for (const auto& [token, score] : scored[i].scores) {
        EXPECT_EQ(both[i].scores.at(token).logprob, score.logprob);
        EXPECT_EQ(both[i].scores.at(token).best, score.best);
        EXPECT_LE(score.logprob, score.best_logprob);
      }
    }
  }
}

// Fault class 1: equal lengths in one batch. Fault class 2: a shared prefix of 600 tokens.
TEST(EngineTest, NeighboursOfEqualLengthOrEqualPrefixKeepTheirRows) {
  const auto engine = Open();
  std::vector<SampleTask> tasks;
  for (uint32_t i = 0; i < 4; ++i) tasks.push_back(PrefillTask(RandomIds(50, i)));
  for (uint32_t i = 0; i < 3; ++i) {
    auto ids = RandomIds(600, 99);
    for (const int32_t id : RandomIds(40, i)) ids.push_back(id);
    tasks.push_back(PrefillTask(ids));
  }
  const auto together = RunTasks(*engine, tasks, kHidden);
  for (size_t i = 0; i < tasks.size(); ++i) {
    const auto cold = RunTasks(*Open(), {tasks[i]}, kHidden)[0];
    EXPECT_EQ(cold.states, together[i].states);
    for (size_t j = 0; j < i; ++j) EXPECT_NE(together[i].states, together[j].states);
  }
}

// Fault classes 3, 4, 11: lengths around chunk and page borders, and a long one.
TEST(EngineTest, RowsEqualTokensAtEveryLength) {
  EngineOptions options;
  options.max_batch_tokens = 100;
  options.max_seq_len = 8200;
  const auto engine = Open(options);
  std::vector<SampleTask> tasks;
  for (const size_t length : {1, 2, 63, 64, 65, 99, 100, 101, 199, 200, 201})
    tasks.push_back(PrefillTask(RandomIds(length, 5)));
  const auto captured = RunTasks(*engine, tasks, kHidden);
  for (size_t i = 0; i < tasks.size(); ++i) {
    for (const int boundary : tasks[i].boundaries) {
      const auto& states = captured[i].states.at(boundary);
      ASSERT_EQ(states.size(), tasks[i].input_ids.size() * kHidden);
      // The same ids: a prefix of the longest sample's rows.
      EXPECT_TRUE(
          std::equal(states.begin(), states.end(), captured.back().states.at(boundary).begin()));
    }
  }
}

TEST(EngineTest, RanksAgreeInTextAndStayWithinRoundingInStates) {
  const auto tasks = SomeTasks(6, /*temperature=*/0);
  const auto one = RunTasks(*Open(), tasks, kHidden);
  for (const int ranks : {2, 4, 8}) {
    for (const auto experts : {EngineOptions::Experts::kExpert, EngineOptions::Experts::kTensor}) {
      EngineOptions options;
      options.ranks = ranks;
      options.experts = experts;
      options.residual = EngineOptions::Residual::kSharded;
      const auto many = RunTasks(*Open(options), tasks, kHidden);
      for (size_t i = 0; i < tasks.size(); ++i) {
        EXPECT_EQ(many[i].sampled, one[i].sampled) << ranks << " ranks";
        EXPECT_EQ(many[i].states.at(kLayers).size(), one[i].states.at(kLayers).size());
      }
    }
  }
}

// Fault class 5: the stored final state is what the next token came from.
TEST(EngineTest, BoundaryZeroIsTheEmbeddingAndTheTapsAreInOrder) {
  const auto engine = Open();
  const auto all =
      RunTasks(*engine, {PrefillTask(RandomIds(20, 1), {0, 1, 2, 3, 4, 5, 6, 7, 8})}, kHidden)[0];
  const auto again = RunTasks(*engine, {PrefillTask({5, 5, 7}, {0})}, kHidden)[0].states.at(0);
  EXPECT_TRUE(std::equal(again.begin(), again.begin() + kHidden, again.begin() + kHidden))
      << "the embedding knows no position";
  for (int boundary = 1; boundary <= kLayers; ++boundary)
    EXPECT_NE(all.states.at(boundary), all.states.at(boundary - 1));
  const auto some = RunTasks(*engine, {PrefillTask(RandomIds(20, 1), {3, 8})}, kHidden)[0];
  EXPECT_EQ(some.states.size(), 2u);
  EXPECT_EQ(some.states.at(3), all.states.at(3));
  EXPECT_EQ(some.states.at(8), all.states.at(8));
}

TEST(EngineTest, LimitsEndAnAnswer) {
  auto task = SomeTasks(1, 0)[0];
  task.stop_ids.clear();
  const auto prompt = static_cast<int>(task.input_ids.size());
  task.max_new_tokens = 3;
  auto longer = task;
  longer.max_new_tokens = 100;
  longer.max_length = prompt + 1;
  const auto captured = RunTasks(*Open(), {task, longer}, kHidden);
  EXPECT_EQ(captured[0].finished, FinishReason::kLength);
  EXPECT_EQ(captured[0].sampled.size(), 3u);
  EXPECT_EQ(captured[1].sampled.size(), 1u);
  EXPECT_EQ(captured[1].states.at(kLayers).size(), static_cast<size_t>(prompt + 1) * kHidden);
}

TEST(EngineTest, WhatCanNeverRunFailsAloneAndSaysWhy) {
  EngineOptions options;
  options.max_seq_len = 128;
  const auto engine = Open(options);
  auto full = SomeTasks(1, 0)[0];
  full.max_length = static_cast<int>(full.input_ids.size());
  auto boundary = PrefillTask({1}, {9});
  const auto captured =
      RunTasks(*engine,
               {PrefillTask({}), PrefillTask({1, 2304}), PrefillTask(RandomIds(129, 1)), full,
                boundary, PrefillTask({1, 2})},
               kHidden);
  EXPECT_THAT(captured[0].failed->status,
              testing::StatusIs(absl::StatusCode::kInvalidArgument, "no tokens"));
  EXPECT_THAT(captured[1].failed->status,
              testing::StatusIs(absl::StatusCode::kInvalidArgument, "token 1 is 2304"));
  EXPECT_THAT(captured[2].failed->status,
              testing::StatusIs(absl::StatusCode::kResourceExhausted, "129"));
  EXPECT_THAT(captured[3].failed->status,
              testing::StatusIs(absl::StatusCode::kInvalidArgument, "no room"));
  EXPECT_THAT(captured[4].failed->status,
              testing::StatusIs(absl::StatusCode::kInvalidArgument, "boundary 9"));
  EXPECT_EQ(captured[5].finished, FinishReason::kPrefill);
}

TEST(EngineTest, WhatTheCacheCanNeverHoldIsRefusedAndTheNextOneRuns) {
  EngineOptions options;
  options.kv_cache_bytes = int64_t{2} * 64 * 80 * 4 * 8;  // 2 pages: 128 tokens
  const auto engine = Open(options);
  ASSERT_EQ(engine->info().kv_tokens, 128);
  const auto captured = RunTasks(
      *engine,
      {PrefillTask(RandomIds(129, 1)), PrefillTask(RandomIds(128, 2)), PrefillTask({1, 2})},
      kHidden);
  ASSERT_TRUE(captured[0].failed);
  EXPECT_THAT(captured[0].failed->status,
              testing::StatusIs(absl::StatusCode::kResourceExhausted, "--kv-cache-gib"));
  EXPECT_EQ(captured[1].finished, FinishReason::kPrefill);
  EXPECT_EQ(captured[2].finished, FinishReason::kPrefill);
}

TEST(EngineTest, CancelGivesUpOneAndStoppingAll) {
  auto tasks = SomeTasks(3, 1);
  for (auto& task : tasks) task.stop_ids.clear();
  const auto engine = Open();
  Harness harness(tasks, kHidden);
  harness.on_token = [&](uint64_t ticket) {
    if (ticket == 1 && harness.results()[1].sampled.size() == 3) harness.cancel = {1};
    if (ticket == 0 && harness.results()[0].sampled.size() == 10) harness.stop = true;
  };
  EXPECT_OK(engine->Run(harness, harness));
  EXPECT_EQ(harness.results()[1].sampled.size(), 3u);
  for (const Captured& result : harness.results()) {
    ASSERT_TRUE(result.failed);
    EXPECT_EQ(result.failed->status.code(), absl::StatusCode::kCancelled);
  }
  EXPECT_EQ(RunTasks(*engine, {PrefillTask({1, 2, 3})}, kHidden)[0].finished,
            FinishReason::kPrefill)
      << "the engine goes on";
}

TEST(EngineTest, StepsAreFullOfShortSamples) {
  std::atomic<int64_t> steps = 0;
  EngineOptions options;
  options.max_batch_tokens = 100;
  options.before_step = [&](int, int64_t) { ++steps; };
  std::vector<SampleTask> tasks;
  for (uint32_t i = 0; i < 60; ++i) tasks.push_back(PrefillTask(RandomIds(5, i)));
  RunTasks(*Open(options), tasks, kHidden);
  EXPECT_EQ(steps, 3);
}

TEST(EngineTest, HowManyThreadsHandOutChangesNothing) {
  EngineOptions options;
  options.max_batch_tokens = 48;
  std::vector<SampleTask> tasks = SomeTasks(12, /*temperature=*/1);
  for (uint32_t i = 0; i < 6; ++i) tasks.push_back(PrefillTask(RandomIds(1 + 37 * i, i)));
  options.hand_out_threads = 1;
  const auto alone = RunTasks(*Open(options), tasks, kHidden);
  options.hand_out_threads = 5;
  const auto together = RunTasks(*Open(options), tasks, kHidden);
  for (size_t i = 0; i < tasks.size(); ++i) ExpectSame(together[i], alone[i]);
}

// Samples of all kinds, pushed out of the cache, given up at any time (before they start and after
// they end too), with all there is room for and with a source that waits for endings.
TEST(EngineTest, EverySampleEndsOnceWhateverIsGivenUp) {
  std::vector<SampleTask> tasks;
  for (SampleTask& task : SomeTasks(8, /*temperature=*/1)) {
    const auto number = static_cast<uint32_t>(tasks.size());
    task.max_new_tokens = 12;
    if (number % 4 == 0) task.boundaries.clear();
    tasks.push_back(std::move(task));
    tasks.push_back(PrefillTask(RandomIds(1 + 9 * number, number)));
  }
  const auto clean = RunTasks(*Open(), tasks, kHidden);
  EngineOptions small;
  small.max_batch_tokens = 19;
  small.kv_cache_bytes = int64_t{9} * 64 * 80 * 4 * 8;  // 9 pages
  small.hand_out_threads = 3;
  const auto engine = Open(small);
  for (const size_t at_once : {tasks.size(), size_t{5}, size_t{1}}) {
    Harness harness(tasks, kHidden);
    harness.at_once = at_once;
    std::mt19937 random(7);
    harness.on_token = [&](uint64_t ticket) {  // it, or one near it
      if (random() % 8 == 0)
        harness.cancel.push_back((ticket + tasks.size() - 2 + random() % 5) % tasks.size());
    };
    ASSERT_OK(engine->Run(harness, harness));
    int finished = 0;
    for (size_t i = 0; i < tasks.size(); ++i) {
      const Captured& result = harness.results()[i];
      if (result.finished) {
        ++finished;
        ExpectSame(result, clean[i]);
        continue;
      }
      ASSERT_TRUE(result.failed) << "sample " << i << " of " << at_once << " never ended";
      EXPECT_THAT(result.failed->status, testing::StatusIs(absl::StatusCode::kCancelled, ""));
      for (const auto& [boundary, states] : result.states) {
        const auto& whole = clean[i].states.at(boundary);
        ASSERT_LE(states.size(), whole.size());
        EXPECT_TRUE(std::equal(states.begin(), states.end(), whole.begin()));
      }
    }
    EXPECT_GT(finished, 0);
    EXPECT_LT(finished, static_cast<int>(tasks.size()));
  }
}

// It is found while the next step runs, which has rows of the sample too.
TEST(EngineFaultTest, AStateThatIsNotFiniteEndsItsSampleAlone) {
  constexpr int32_t kBad = 1999;
  constexpr size_t kAt = 20;
  const testing::TempDir folder;
  std::filesystem::copy(testing::Root() / "models/tiny-kimi", folder.path(),
                        std::filesystem::copy_options::recursive);
  const TensorInfo* embedding = Tiny().Find("model.embed_tokens.weight");
  ASSERT_NE(embedding, nullptr);
  {
    std::fstream file(
        folder.path() / Tiny().files()[static_cast<size_t>(embedding->file)].filename(),
        std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(embedding->offset + int64_t{kBad} * kHidden * 2);
    const uint16_t nan = 0x7fc0;
    file.write(reinterpret_cast<const char*>(&nan), sizeof(nan));
    ASSERT_TRUE(file.good());
  }
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex broken, CheckpointIndex::Open(folder.path()));
  EngineOptions options;
  options.max_batch_tokens = 16;
  std::vector<SampleTask> tasks;
  for (uint32_t i = 0; i < 6; ++i) {
    std::vector<int32_t> ids = RandomIds(i % 2 == 0 ? 90 : 22, i);
    std::replace(ids.begin(), ids.end(), kBad, kBad + 1);
    tasks.push_back(PrefillTask(std::move(ids)));
  }
  tasks[4].token_scores = true;
  tasks[5].generate = true;
  tasks[5].max_new_tokens = 4;
  tasks[5].max_length = 100;
  const auto clean = RunTasks(*Open(options), tasks, kHidden);
  for (const size_t i : {2u, 3u})
    tasks[i].input_ids[kAt] = kBad;  // with chunks to come; the last one
  for (const size_t i : {4u, 5u})
    tasks[i].input_ids[kAt] = kBad;  // whose logits are not finite either
  ASSERT_OK_AND_ASSIGN(const auto engine, Engine::Open(broken, options));
  const auto results = RunTasks(*engine, tasks, kHidden);
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (i < 2) {
      ExpectSame(results[i], clean[i]);
      continue;
    }
    EXPECT_FALSE(results[i].finished);
    ASSERT_TRUE(results[i].failed);
    EXPECT_THAT(results[i].failed->status,
                testing::StatusIs(absl::StatusCode::kDataLoss, "boundary 0 of token 20"));
    EXPECT_EQ(results[i].failed->boundary, 0);
    EXPECT_EQ(results[i].failed->token, static_cast<int64_t>(kAt));
  }
}

// Fault class 31: a rank dies in the middle of a job. What was handed out stays; the rest neither
// ends nor fails, so that it runs again.
TEST(EngineFaultTest, ADeadRankEndsTheRunAsUnavailable) {
  EngineOptions options;
  options.ranks = 2;
  options.before_step = [](int rank, int64_t step) {
    if (rank == 1 && step == 20) throw std::runtime_error("the power went");
  };
  const auto engine = Open(options);
  Harness harness(SomeTasks(8, 1), kHidden);
  EXPECT_THAT(engine->Run(harness, harness),
              testing::StatusIs(absl::StatusCode::kUnavailable, "rank 1 failed: the power went"));
  for (const Captured& result : harness.results()) {
    EXPECT_FALSE(result.failed);
    EXPECT_GT(result.sampled.size(), 0u);
  }
  Harness again(SomeTasks(1, 1), kHidden);
  EXPECT_THAT(engine->Run(again, again),
              testing::StatusIs(absl::StatusCode::kUnavailable, "the power went"));
}

TEST(EngineTest, WeightsThatAreMadeAreMadeForEveryRank) {
  EngineOptions options;
  options.ranks = 2;
  options.load_progress = [](const EngineOptions::LoadState&) { FAIL() << "weights were read"; };
  options.make_weights = [](Backend&, const ModelConfig& config, const ParallelLayout& layout,
                            int rank) -> ModelWeights {
    EXPECT_EQ(config.num_layers, kLayers);
    EXPECT_EQ(layout.world(), 2);
    if (rank == 1) throw std::runtime_error("no memory for weights");
    return {};
  };
  EXPECT_THAT(
      Engine::Open(Tiny(), options),
      testing::StatusIs(absl::StatusCode::kUnavailable, "rank 1 failed: no memory for weights"));
}

TEST(EngineFaultTest, AStuckRankEndsTheRunAsUnavailableWithinTheStepTimeout) {
  std::promise<void> wake;
  EngineOptions options;
  options.ranks = 4;
  options.step_timeout = std::chrono::seconds(4);  // of a busy machine
  options.before_step = [woken = wake.get_future().share()](int rank, int64_t step) {
    if (rank == 2 && step == 5) woken.wait();
  };
  auto engine = Open(options);
  Harness harness({GenerateTask({1, 2, 3}, 1, 0)}, kHidden);  // steps of a few tokens
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(engine->Run(harness, harness),
              testing::StatusIs(absl::StatusCode::kUnavailable, "stuck: rank 2"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  engine = nullptr;  // does not wait for the stuck rank,
  wake.set_value();  // which finds that it is too late, and nothing gone that it works on
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
}

TEST(EngineTest, BadLayoutsAreRefusedWithTheSizeNamed) {
  EngineOptions options;
  options.ranks = 3;
  EXPECT_THAT(Engine::Open(Tiny(), options),
              testing::StatusIs(absl::StatusCode::kInvalidArgument, "num_attention_heads = 8"));
  options.ranks = 1;
  options.backend = "tpu";
  EXPECT_THAT(Engine::Open(Tiny(), options),
              testing::StatusIs(absl::StatusCode::kInvalidArgument, "tpu"));
  options.backend = "cpu";
  options.kv_cache_bytes = 10;
  EXPECT_THAT(Engine::Open(Tiny(), options),
              testing::StatusIs(absl::StatusCode::kInvalidArgument, "--kv-cache-gib"));
}

}  // namespace
}  // namespace statetap
