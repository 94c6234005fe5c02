#include "server/jobs/job_runner.h"

#include <cmath>
#include <fstream>
#include <set>

#include "tests/support/job_harness.h"

namespace statetap {
namespace {

using testing::ChatSample;
using ::testing::HasSubstr;
using testing::IdsSample;
using testing::JobHarness;
using testing::StatusIs;

std::vector<v1::SampleInput> Chats(int count) {
  std::vector<v1::SampleInput> samples;
  for (int i = 0; i < count; ++i)
    samples.push_back(ChatSample(fmt::format("chat-{}", i), fmt::format("Say {} words.", i)));
  return samples;
}

// "s0", "s1", …: each of one id of its own, over and over.
std::vector<v1::SampleInput> Texts(int count, size_t tokens, std::string_view prefix = "s") {
  std::vector<v1::SampleInput> samples;
  for (int i = 0; i < count; ++i)
    samples.push_back(
        IdsSample(fmt::format("{}{}", prefix, i), std::vector<int32_t>(tokens, i + 1)));
  return samples;
}

v1::JobOptions Options(uint64_t shard_bytes = 0) {
  v1::JobOptions options;
  options.set_max_length(256);
  options.set_shard_bytes(shard_bytes);
  return options;
}

TEST(JobRunnerTest, GeneratesAndStoresEverySample) {
  JobHarness harness;
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(Options(), Chats(64)));
  const JobRecord job = harness.WaitForEnd(submitted);
  EXPECT_EQ(NameOf(job.state), "succeeded");
  EXPECT_EQ(job.counts.stored, 64);
  EXPECT_GT(job.generated, 64);
  EXPECT_GT(harness.engine->most_running, 1);

  ASSERT_OK_AND_ASSIGN(const auto shards, harness.store->Shards(job.key));
  ASSERT_EQ(shards.size(), 1u);
  ASSERT_OK_AND_ASSIGN(const auto reader,
                       ShardReader::Open(harness.folders().FromStored(shards[0].path)));
  EXPECT_EQ(reader->config().boundaries, (std::vector<int>{2, 4, 5, 8}));
  EXPECT_EQ(reader->config().job, job.id);
  EXPECT_EQ(job.tokens, reader->rows());
  ASSERT_OK_AND_ASSIGN(const auto listed, harness.store->Stored(job.key, -1, 100));
  for (const SampleListing& listing : listed) {
    ASSERT_OK_AND_ASSIGN(const SampleRecord record, reader->ReadRecord(listing.stored.position));
    EXPECT_EQ(record.id, listing.sample.id);
    EXPECT_EQ(static_cast<int64_t>(record.input_ids.size()), listing.stored.rows);
    // The mask is 1 exactly on sampled ids, the stop token included.
    for (size_t t = 0; t < record.loss_mask.size(); ++t) {
      const bool sampled = t >= static_cast<size_t>(record.prompt_tokens);
      EXPECT_EQ(record.loss_mask[t], sampled ? 1 : 0);
      EXPECT_EQ(std::isnan(record.logprobs[t]), !sampled);
    }
    const bool stopped = record.input_ids.back() == 2049 || record.input_ids.back() == 2050;
    EXPECT_EQ(record.finish_reason, stopped ? "stop" : "length");
    EXPECT_EQ(listing.stored.mean_logprob, -0.5);
  }
}

TEST(JobRunnerTest, SampleMeetingNonFiniteStatesIsRejectedAlone) {
  JobHarness harness;
  harness.engine->faults.bad_token = 777;
  harness.engine->faults.bad_boundary = 4;
  harness.Run();
  std::vector<v1::SampleInput> samples = Texts(10, 30);
  samples[3].mutable_tokens()->mutable_ids()->Set(20, 777);
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(Options(), samples));
  const JobRecord job = harness.WaitForEnd(submitted);
  EXPECT_EQ(NameOf(job.state), "succeeded");
  EXPECT_EQ(job.counts.stored, 9);
  ASSERT_OK_AND_ASSIGN(const auto rejected, harness.store->Rejected(job.key, -1, 10));
  ASSERT_EQ(rejected.size(), 1u);
  EXPECT_EQ(rejected[0].sample.id, "s3");
  EXPECT_EQ(rejected[0].sample.rejection->reason, "non_finite");
  EXPECT_EQ(rejected[0].sample.rejection->layer, 4);
  EXPECT_EQ(rejected[0].sample.rejection->token, 20);
  EXPECT_EQ(harness.BufferedInTheEnd(), 0);
}

TEST(JobRunnerTest, StatesOfSeveralBoundariesMayComeAtTheSameTime) {
  std::map<std::string, uint64_t> checksums[2];
  for (const bool at_once : {false, true}) {
    JobHarness harness;
    harness.engine->faults.at_once = at_once;
    harness.Run();
    ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(Options(), Texts(20, 60)));
    const JobRecord job = harness.WaitForEnd(submitted);
    EXPECT_EQ(job.counts.stored, 20);
    checksums[at_once ? 1 : 0] = harness.Checksums(job);
    EXPECT_EQ(harness.BufferedInTheEnd(), 0);
  }
  EXPECT_EQ(checksums[0].size(), 20u);
  EXPECT_EQ(checksums[0], checksums[1]);
}

TEST(JobRunnerTest, SampleWithFewerRowsThanTokensIsRejectedAlone) {
  JobHarness harness;
  harness.engine->faults.short_boundary = 5;
  harness.engine->faults.short_token = 3;
  harness.Run();
  std::vector<v1::SampleInput> samples = Texts(6, 30);
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(Options(), samples));
  const JobRecord job = harness.WaitForEnd(submitted);
  EXPECT_EQ(job.counts.stored, 5);
  ASSERT_OK_AND_ASSIGN(const auto rejected, harness.store->Rejected(job.key, -1, 10));
  ASSERT_EQ(rejected.size(), 1u);
  EXPECT_EQ(rejected[0].sample.id, "s2");
  EXPECT_EQ(rejected[0].sample.rejection->reason, "engine");
  EXPECT_EQ(rejected[0].sample.rejection->message, "boundary 5 has 29 rows for 30 tokens");
  EXPECT_EQ(harness.BufferedInTheEnd(), 0);
}

TEST(JobRunnerTest, SamplesDoNotDependOnNeighboursOrRestarts) {
  JobHarness clean;
  clean.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord alone, clean.Submit(Options(), Chats(40)));
  clean.WaitForEnd(alone);
  const auto expected = clean.Checksums(alone);
  ASSERT_EQ(expected.size(), 40u);

  JobHarness harness;
  harness.engine->faults.step = std::chrono::microseconds(200);
  harness.Run();
  std::vector<v1::SampleInput> reversed = Chats(40);
  std::reverse(reversed.begin(), reversed.end());
  v1::JobOptions options = Options(1 << 20);
  ASSERT_OK_AND_ASSIGN(JobRecord job, harness.Submit(options, reversed));
  for (int restart = 0; restart < 3; ++restart) {
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
    harness.Stop();
    harness.Restart();
    harness.engine->faults.step = std::chrono::microseconds(200);
    harness.Run();
  }
  job = harness.WaitForEnd(job);
  EXPECT_EQ(job.counts.stored, 40);
  EXPECT_EQ(harness.Checksums(job), expected);
}

TEST(JobRunnerTest, PauseOutlastsARestartAndResumeGivesTheSameSamples) {
  JobHarness clean;
  clean.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord alone, clean.Submit(Options(), Chats(60)));
  clean.WaitForEnd(alone);

  JobHarness harness;
  harness.engine->faults.step = std::chrono::milliseconds(5);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(60)));
  harness.WaitUntil(job,
                    [&](const JobRecord&) { return harness.runner->LiveOf(job.key).captured > 0; });
  ASSERT_OK(harness.runner->Pause(job));
  ASSERT_OK_AND_ASSIGN(const JobRecord paused, harness.store->GetJob(job.key));
  EXPECT_EQ(NameOf(paused.state), "paused");
  EXPECT_GT(paused.counts.to_do, 0);
  ASSERT_OK(harness.runner->Pause(job));  // once more changes nothing
  // Others run meanwhile, and a restart leaves it paused.
  ASSERT_OK_AND_ASSIGN(const JobRecord other, harness.Submit(Options(1 << 20), Chats(3)));
  EXPECT_EQ(harness.WaitForEnd(other).counts.stored, 3);
  harness.Stop();
  harness.Restart();
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord still, harness.store->GetJob(job.key));
  EXPECT_EQ(NameOf(still.state), "paused");
  EXPECT_EQ(still.counts.stored, paused.counts.stored);
  ASSERT_OK(harness.runner->Resume(still));
  EXPECT_EQ(harness.WaitForEnd(job).counts.stored, 60);
  EXPECT_EQ(harness.Checksums(job), clean.Checksums(alone));
  EXPECT_THAT(harness.runner->Resume(still),
              StatusIs(absl::StatusCode::kFailedPrecondition, "not paused"));
  EXPECT_THAT(harness.runner->Pause(*harness.store->GetJob(job.key)),
              StatusIs(absl::StatusCode::kFailedPrecondition, "nothing to pause"));
}

TEST(JobRunnerTest, APausedJobCanBeCancelledAndDeleted) {
  JobHarness harness;
  harness.engine->faults.step = std::chrono::milliseconds(1);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord first, harness.Submit(Options(), Chats(100)));
  ASSERT_OK_AND_ASSIGN(const JobRecord second, harness.Submit(Options(1 << 20), Chats(100)));
  ASSERT_OK(harness.runner->Pause(first));
  ASSERT_OK(harness.runner->Pause(second));
  ASSERT_OK(harness.runner->Cancel(*harness.store->GetJob(first.key)));
  EXPECT_EQ(NameOf(harness.store->GetJob(first.key)->state), "cancelled");
  ASSERT_OK(harness.runner->Delete(second));
  EXPECT_THAT(harness.store->GetJob(second.key), StatusIs(absl::StatusCode::kNotFound, "deleted"));
}

TEST(JobRunnerTest, DeleteOfARunningJobLeavesNothing) {
  JobHarness harness;
  harness.engine->faults.step = std::chrono::milliseconds(1);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(1 << 20), Chats(300)));
  harness.WaitUntil(job, [](const JobRecord& now) { return now.state == JobState::kRunning; });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  ASSERT_OK(harness.runner->Delete(job));
  EXPECT_FALSE(std::filesystem::exists(harness.folders().Folder(job.id)));
  ASSERT_OK_AND_ASSIGN(const auto doomed, harness.store->Doomed());
  EXPECT_TRUE(doomed.empty());
  EXPECT_EQ(harness.BufferedInTheEnd(), 0);
  // The same again is a new job.
  ASSERT_OK_AND_ASSIGN(const JobRecord again, harness.Submit(Options(1 << 20), Chats(3)));
  EXPECT_NE(again.id, job.id);
  EXPECT_EQ(harness.WaitForEnd(again).counts.stored, 3);
}

TEST(JobRunnerTest, ADeletionThatACrashCutShortIsFinishedAtTheNextStart) {
  JobHarness harness;
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(3)));
  harness.WaitForEnd(job);
  harness.runner.reset();
  ASSERT_OK(harness.store->DeleteJob(job.key));  // and the files are still there
  EXPECT_TRUE(std::filesystem::exists(harness.folders().Folder(job.id)));
  harness.Restart();
  harness.Run();
  EXPECT_FALSE(std::filesystem::exists(harness.folders().Folder(job.id)));
}

TEST(JobRunnerTest, RetryRunsRejectedSamplesOfEndedAndRunningJobs) {
  JobHarness harness;
  harness.engine->faults.bad_token = 777;
  harness.Run();
  std::vector<v1::SampleInput> samples = Texts(10, 30);
  samples[3].mutable_tokens()->mutable_ids()->Set(20, 777);
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(Options(), samples));
  EXPECT_EQ(harness.WaitForEnd(submitted).counts.rejected, 1);
  harness.engine->faults.bad_token = -1;  // mended
  ASSERT_OK_AND_ASSIGN(const JobStore::Retried retried, harness.runner->Retry(submitted));
  EXPECT_EQ(retried.retried, 1);
  const JobRecord job =
      harness.WaitUntil(submitted, [](const JobRecord& now) { return now.counts.stored == 10; });
  EXPECT_EQ(NameOf(job.state), "succeeded");
  EXPECT_THAT(harness.runner->Retry(job),
              StatusIs(absl::StatusCode::kFailedPrecondition, "no rejected samples"));
  // A running job goes on after a retry that has nothing to do.
  harness.engine->faults.step = std::chrono::milliseconds(1);
  ASSERT_OK_AND_ASSIGN(const JobRecord running, harness.Submit(Options(1 << 20), Chats(40)));
  harness.WaitUntil(running, [](const JobRecord& now) { return now.state == JobState::kRunning; });
  ASSERT_OK(harness.store->MarkWaiting(running.key, "for a disk"));
  EXPECT_THAT(harness.runner->Retry(running),
              StatusIs(absl::StatusCode::kFailedPrecondition, "no rejected samples"));
  EXPECT_EQ(harness.WaitForEnd(running).counts.stored, 40);
}

TEST(JobRunnerTest, ASmallJobBesideALargeOneFinishesSoonAndAHigherPriorityFirst) {
  JobHarness harness;
  harness.engine->faults.step = std::chrono::milliseconds(2);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord large, harness.Submit(Options(), Chats(2000)));
  harness.WaitUntil(large, [](const JobRecord& now) { return now.state == JobState::kRunning; });
  ASSERT_OK_AND_ASSIGN(const JobRecord small, harness.Submit(Options(1 << 20), Chats(10)));
  const JobRecord done = harness.WaitForEnd(small);
  EXPECT_EQ(done.counts.stored, 10);
  EXPECT_LT(harness.runner->LiveOf(large.key).captured, 1000);
  // Of several at once the one of higher priority is through before the others.
  ASSERT_OK(harness.runner->Cancel(large));
  std::vector<JobRecord> equals;
  for (int i = 0; i < 4; ++i) {
    v1::JobOptions options = Options();
    options.set_name(fmt::format("equal {}", i));
    ASSERT_OK_AND_ASSIGN(JobRecord job, harness.Submit(options, Chats(200)));
    equals.push_back(std::move(job));
  }
  v1::JobOptions options = Options();
  options.set_name("urgent");
  options.set_priority(5);
  ASSERT_OK_AND_ASSIGN(const JobRecord urgent, harness.Submit(options, Chats(30)));
  const int64_t ended_ms = harness.WaitForEnd(urgent).ended_ms;
  for (const JobRecord& job : equals) EXPECT_GT(harness.WaitForEnd(job).ended_ms, ended_ms);
  options.set_priority(101);
  options.set_name("too urgent");
  EXPECT_THAT(harness.Submit(options, Chats(1)),
              StatusIs(absl::StatusCode::kInvalidArgument, "priority: 101"));
}

TEST(JobRunnerTest, StatesInFp8AreHalfTheBytesAndTheJobSaysSo) {
  JobHarness harness;
  harness.Run();
  v1::JobOptions options = Options();
  options.set_states("fp8");
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(options, Chats(5)));
  const JobRecord job = harness.WaitForEnd(submitted);
  EXPECT_EQ(job.counts.stored, 5);
  ASSERT_OK_AND_ASSIGN(const auto shards, harness.store->Shards(job.key));
  ASSERT_OK_AND_ASSIGN(const auto reader,
                       ShardReader::Open(harness.folders().FromStored(shards[0].path)));
  EXPECT_EQ(reader->config().dtype, StatesDtype::kFp8);
  ASSERT_OK_AND_ASSIGN(const auto damaged, reader->Verify());
  EXPECT_TRUE(damaged.empty());
  options.set_states("fp4");
  EXPECT_THAT(harness.Submit(options, Chats(1)),
              StatusIs(absl::StatusCode::kInvalidArgument, "states: \"fp4\""));
}

TEST(JobRunnerTest, EvictKeepsTokensAndStatisticsOverACrash) {
  JobHarness harness;
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(Options(1 << 20), Chats(40)));
  const JobRecord job = harness.WaitForEnd(submitted);
  ASSERT_OK_AND_ASSIGN(const auto before, harness.store->Shards(job.key));
  const std::filesystem::path path = harness.folders().FromStored(before[0].path);
  ASSERT_OK_AND_ASSIGN(const auto whole, ShardReader::Open(path));
  // A crash behind the write: the file is there, the store does not name it.
  std::ofstream(path.parent_path() / (path.stem().string() + "-tokens.h5")) << "cut";
  ASSERT_OK(harness.runner->Evict(job));
  ASSERT_OK_AND_ASSIGN(const JobRecord now, harness.store->GetJob(job.key));
  EXPECT_EQ(now.counts.evicted, 40);
  EXPECT_EQ(now.counts.stored, 40);
  EXPECT_LT(now.bytes, job.bytes);
  EXPECT_FALSE(std::filesystem::exists(path));
  harness.Stop();
  harness.Restart();
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const auto after, harness.store->Shards(job.key));
  ASSERT_EQ(after.size(), before.size());
  ASSERT_OK_AND_ASSIGN(const auto rest,
                       ShardReader::Open(harness.folders().FromStored(after[0].path)));
  ASSERT_EQ(rest->samples().size(), whole->samples().size());
  for (size_t i = 0; i < rest->samples().size(); ++i) {
    ASSERT_OK_AND_ASSIGN(const SampleRecord was, whole->ReadRecord(static_cast<int64_t>(i)));
    ASSERT_OK_AND_ASSIGN(const SampleRecord is, rest->ReadRecord(static_cast<int64_t>(i)));
    EXPECT_EQ(is.input_ids, was.input_ids);
    EXPECT_EQ(is.loss_mask, was.loss_mask);
  }
  ASSERT_OK(harness.runner->Evict(now));  // nothing is left to do
  ASSERT_OK_AND_ASSIGN(const JobRecord again, harness.store->GetJob(job.key));
  EXPECT_EQ(again.counts.evicted, 40);
  harness.engine->faults.step = std::chrono::milliseconds(1);
  ASSERT_OK_AND_ASSIGN(const JobRecord running, harness.Submit(Options(2 << 20), Chats(200)));
  EXPECT_THAT(harness.runner->Evict(running),
              StatusIs(absl::StatusCode::kFailedPrecondition, "ended or are paused"));
}

TEST(JobRunnerTest, AJobWithADeadTapPausesAtItsGateAndASoundOneDoesNot) {
  JobHarness harness;
  harness.engine->faults.zero_boundary = 4;
  harness.engine->faults.step = std::chrono::microseconds(200);
  harness.Run();
  v1::JobOptions options = Options();
  options.set_gate(10);
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(options, Chats(300)));
  const JobRecord paused = harness.WaitUntil(
      submitted, [](const JobRecord& now) { return now.state == JobState::kPaused; });
  ASSERT_EQ(NameOf(paused.state), "paused");
  EXPECT_THAT(paused.message, HasSubstr("zero_boundary"));
  EXPECT_THAT(paused.message, HasSubstr("4"));
  EXPECT_GE(paused.counts.stored, 10);
  EXPECT_GT(paused.counts.to_do, 0);
  // A person looked and goes on: it is not looked at again.
  ASSERT_OK(harness.runner->Resume(paused));
  EXPECT_EQ(harness.WaitForEnd(paused).counts.stored, 300);

  harness.engine->faults.zero_boundary = -1;
  harness.engine->faults.step = std::chrono::milliseconds(5);
  options.set_name("sound");
  ASSERT_OK_AND_ASSIGN(const JobRecord sound, harness.Submit(options, Chats(40)));
  EXPECT_EQ(NameOf(harness.WaitForEnd(sound).state), "succeeded");
  ASSERT_OK_AND_ASSIGN(const auto shards, harness.store->Shards(sound.key));
  EXPECT_EQ(shards.size(), 2u);  // the first was closed for the look
  options.set_gate(-1);
  options.set_name("wrong");
  EXPECT_THAT(harness.Submit(options, Chats(1)),
              StatusIs(absl::StatusCode::kInvalidArgument, "gate: -1"));
}

// The engine may have captured everything by the time that the first sample is in its shard.
TEST(JobRunnerTest, AGateIsLookedAtAfterItsSamplesHoweverFastTheEngineIs) {
  JobHarness harness;
  harness.engine->faults.zero_boundary = 4;
  harness.Run();
  v1::JobOptions options = Options();
  options.set_gate(10);
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(options, Texts(60, 2)));
  const JobRecord paused = harness.WaitUntil(submitted, [](const JobRecord& now) {
    return now.state == JobState::kPaused || HasEnded(now.state);
  });
  ASSERT_EQ(NameOf(paused.state), "paused");
  EXPECT_EQ(paused.counts.stored, 10);
  EXPECT_EQ(paused.counts.to_do, 50);
  EXPECT_EQ(harness.BufferedInTheEnd(), 0);  // of those that were captured as well
  ASSERT_OK(harness.runner->Resume(paused));
  EXPECT_EQ(harness.WaitForEnd(paused).counts.stored, 60);
}

bool IsPausedOrHasEnded(const JobRecord& job) {
  return job.state == JobState::kPaused || HasEnded(job.state);
}

// As if the server had been killed between storing a gate's samples and noting the pause.
TEST(JobRunnerTest, AGateIsLookedAtOnceAcrossACrash) {
  for (const int samples : {60, 10}) {
    JobHarness harness;
    harness.engine->faults.zero_boundary = 4;
    harness.Run();
    ASSERT_OK_AND_ASSIGN(auto sql, SqlConnection::Open(harness.dir / "statetap.db",
                                                       SqlConnection::Access::kReadWrite));
    ASSERT_OK(
        sql.Execute("CREATE TRIGGER killed BEFORE UPDATE OF state ON jobs WHEN NEW.state = 7 "
                    "BEGIN SELECT RAISE(ABORT, 'killed'); END"));
    v1::JobOptions options = Options();
    options.set_gate(10);
    ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(options, Texts(samples, 2)));
    harness.WaitUntil(job, [](const JobRecord& now) { return now.counts.stored == 10; });
    harness.Stop();
    ASSERT_OK(sql.Execute("DROP TRIGGER killed"));
    harness.Restart();
    harness.Run();
    const JobRecord paused = harness.WaitUntil(job, IsPausedOrHasEnded);
    ASSERT_EQ(NameOf(paused.state), "paused");
    EXPECT_THAT(paused.message, HasSubstr("zero_boundary"));
    EXPECT_EQ(paused.counts.stored, 10);
    EXPECT_EQ(paused.counts.to_do, samples - 10);
    // Neither a restart of the paused job nor one after its resumption looks again.
    harness.Restart();
    harness.engine->faults.step = std::chrono::milliseconds(1);
    harness.Run();
    EXPECT_EQ(NameOf(harness.store->GetJob(job.key)->state), "paused");
    ASSERT_OK(harness.runner->Resume(paused));
    harness.Restart();
    harness.Run();
    const JobRecord ended = harness.WaitUntil(job, IsPausedOrHasEnded);
    EXPECT_EQ(NameOf(ended.state), "succeeded");
    EXPECT_EQ(ended.counts.stored, samples);
  }
}

TEST(JobRunnerTest, AJobThatEndsAtOrBeforeItsGateIsLookedAtToo) {
  for (const bool rejects : {false, true}) {
    for (const int64_t gate : {10, 11, 500}) {
      JobHarness harness;
      harness.engine->faults.zero_boundary = 4;
      if (rejects) harness.engine->faults.bad_token = 10;  // the last sample's
      harness.Run();
      v1::JobOptions options = Options();
      options.set_gate(gate);
      ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(options, Texts(10, 40)));
      const JobRecord paused = harness.WaitUntil(job, IsPausedOrHasEnded);
      ASSERT_EQ(NameOf(paused.state), "paused") << gate;
      EXPECT_THAT(paused.message, HasSubstr("zero_boundary"));
      EXPECT_EQ(paused.counts.stored, rejects ? 9 : 10);
      EXPECT_EQ(paused.counts.to_do, 0);
      ASSERT_OK(harness.runner->Resume(paused));
      EXPECT_EQ(NameOf(harness.WaitForEnd(job).state), "succeeded");

      // Cancelled, it is no success.
      options.set_name("cancelled");
      ASSERT_OK_AND_ASSIGN(const JobRecord other, harness.Submit(options, Texts(10, 40)));
      ASSERT_OK(harness.runner->Cancel(harness.WaitUntil(other, IsPausedOrHasEnded)));
      EXPECT_EQ(NameOf(harness.store->GetJob(other.key)->state), "cancelled");

      harness.engine->faults.zero_boundary = -1;
      options.set_name("sound");
      ASSERT_OK_AND_ASSIGN(const JobRecord sound, harness.Submit(options, Texts(10, 40)));
      EXPECT_EQ(NameOf(harness.WaitUntil(sound, IsPausedOrHasEnded).state), "succeeded");
    }
  }
}

TEST(JobRunnerTest, ABoundOnShardsPausesTheEngineUntilReadersAreDone) {
  JobRunner::Options options;
  options.max_shard_bytes = 512 << 10;  // 128 bytes a row; a committed shard takes 4.4 MB
  options.retain = JobRunner::Options::Retain::kUntilAcknowledged;
  JobHarness harness(options);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(1 << 20), Chats(400)));
  std::set<int64_t> read;
  int full = 0;
  for (int round = 0; round < 200; ++round) {
    const auto stuck_or_done = [&](const JobRecord& now) {
      return HasEnded(now.state) || (harness.runner->LiveOf(job.key).disk_is_full &&
                                     now.counts.stored > static_cast<int64_t>(read.size()));
    };
    const JobRecord now = harness.WaitUntil(job, stuck_or_done);
    ASSERT_TRUE(stuck_or_done(now)) << now.counts.stored << " stored, " << read.size() << " read";
    full += HasEnded(now.state) ? 0 : 1;
    ASSERT_OK_AND_ASSIGN(const auto samples,
                         harness.store->InStoredOrder(job.key, "trainer", 0, -1, 1000));
    std::vector<int64_t> indices;
    for (const IndexedSample& sample : samples) {
      if (sample.acknowledged) continue;
      EXPECT_TRUE(read.insert(sample.index).second);
      indices.push_back(sample.index);
    }
    ASSERT_OK(harness.store->Acknowledge(job.key, "trainer", indices));
    harness.runner->Acknowledged(job.key);
    if (HasEnded(now.state)) break;
  }
  const JobRecord end = harness.WaitForEnd(job);
  EXPECT_EQ(NameOf(end.state), "succeeded");
  EXPECT_EQ(read.size(), 400u);
  EXPECT_EQ(end.counts.stored, 400);
  EXPECT_EQ(end.counts.evicted, 400);
  EXPECT_GT(full, 2);
}

TEST(JobRunnerTest, StatesAreKeptUntilEveryGroupIsDoneWithThem) {
  JobRunner::Options options;
  options.retain = JobRunner::Options::Retain::kUntilAcknowledged;
  JobHarness harness(options);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(Options(), Chats(10)));
  const JobRecord job = harness.WaitForEnd(submitted);
  const std::vector<int64_t> most = {0, 1, 2, 3, 4, 5, 6, 7, 8}, last = {9};
  const auto evicted = [&] { return harness.store->GetJob(job.key)->counts.evicted; };
  harness.runner->Acknowledged(job.key);  // by nobody
  EXPECT_EQ(evicted(), 0);
  ASSERT_OK(harness.store->Acknowledge(job.key, "a", most));
  ASSERT_OK(harness.store->Acknowledge(job.key, "b", most));
  ASSERT_OK(harness.store->Acknowledge(job.key, "a", last));
  harness.runner->Acknowledged(job.key);
  EXPECT_EQ(evicted(), 0);  // b still wants one
  ASSERT_OK(harness.store->MarkExcluded(job.key, last, JobStore::Exclusion::kExclude));
  harness.runner->Acknowledged(job.key);
  EXPECT_EQ(evicted(), 10);  // nobody gets that one any more
}

// While one reader's last sample of a shard makes its states go, others come with theirs and are
// turned away: the one at work looks again.
TEST(JobRunnerTest, AcknowledgementsDuringAnEvictionAreNotForgotten) {
  JobRunner::Options options;
  options.retain = JobRunner::Options::Retain::kUntilAcknowledged;
  JobHarness harness(options);
  harness.Run();
  for (int round = 0; round < 5; ++round) {
    const auto samples = Texts(120, 250, fmt::format("{}-", round));
    ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(Options(1 << 20), samples));
    const JobRecord job = harness.WaitForEnd(submitted);
    ASSERT_OK_AND_ASSIGN(const auto stored,
                         harness.store->InStoredOrder(job.key, "trainers", 0, -1, 1000));
    std::map<int64_t, int64_t> last;  // sample of each shard
    for (const IndexedSample& sample : stored) last[sample.shard] = sample.index;
    ASSERT_GE(last.size(), 4u);
    std::vector<int64_t> others;
    for (const IndexedSample& sample : stored)
      if (last[sample.shard] != sample.index) others.push_back(sample.index);
    ASSERT_OK(harness.store->Acknowledge(job.key, "trainers", others));
    std::vector<std::thread> readers;
    for (const auto& [shard, index] : last) {
      readers.emplace_back([&harness, &job, index = index] {
        EXPECT_OK(harness.store->Acknowledge(job.key, "trainers", {&index, 1}));
        harness.runner->Acknowledged(job.key);
      });
    }
    for (std::thread& reader : readers) reader.join();
    EXPECT_EQ(harness.store->GetJob(job.key)->counts.evicted, 120);
  }
}

TEST(JobRunnerTest, CancelKeepsWhatIsFinished) {
  JobHarness harness;
  harness.engine->faults.step = std::chrono::milliseconds(5);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(300)));
  harness.WaitUntil(job,
                    [&](const JobRecord&) { return harness.runner->LiveOf(job.key).captured > 0; });
  ASSERT_OK(harness.runner->Cancel(job));
  ASSERT_OK_AND_ASSIGN(const JobRecord now, harness.store->GetJob(job.key));
  EXPECT_EQ(NameOf(now.state), "cancelled");
  EXPECT_GT(now.counts.stored, 0);
  EXPECT_GT(now.counts.cancelled, 0);
  EXPECT_EQ(now.counts.stored + now.counts.cancelled, 300);
  EXPECT_EQ(static_cast<int64_t>(harness.Checksums(job).size()), now.counts.stored);
  EXPECT_THAT(harness.runner->Cancel(now),
              StatusIs(absl::StatusCode::kFailedPrecondition, "has ended (cancelled)"));
  // The engine is free for others.
  ASSERT_OK_AND_ASSIGN(const JobRecord next, harness.Submit(Options(), Chats(3)));
  EXPECT_EQ(harness.WaitForEnd(next).counts.stored, 3);
  EXPECT_EQ(harness.BufferedInTheEnd(), 0);
}

TEST(JobRunnerTest, CancelOfAQueuedJobCancelsAll) {
  JobHarness harness;  // stored before a runner runs: nothing has started
  ASSERT_OK_AND_ASSIGN(JobRecord job, harness.Submit(Options(), Chats(20)));
  EXPECT_EQ(NameOf(job.state), "queued");
  harness.engine->faults.step = std::chrono::milliseconds(50);
  harness.Run();
  ASSERT_OK(harness.runner->Cancel(job));
  ASSERT_OK_AND_ASSIGN(job, harness.store->GetJob(job.key));
  EXPECT_EQ(job.counts.cancelled, 20);
  EXPECT_EQ(NameOf(job.state), "cancelled");
}

TEST(JobRunnerTest, FolderThatCannotBeWrittenFailsTheJobAndSaysWhy) {
  testing::TempDir elsewhere;
  std::ofstream(elsewhere / "file") << "in the way";
  JobHarness harness({}, {elsewhere / "file"});
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness.Submit(Options(), Chats(5)));
  const JobRecord job = harness.WaitForEnd(submitted);
  EXPECT_EQ(NameOf(job.state), "failed");
  EXPECT_EQ(job.counts.rejected, 5);
  EXPECT_THAT(job.message, HasSubstr("5 write"));
  EXPECT_THAT(job.message, HasSubstr((elsewhere / "file").string()));
  EXPECT_THAT(harness.folders().roots()[0].failure, HasSubstr("file"));
}

TEST(JobRunnerTest, AFailingDiskIsTakenOutAndItsUnfinishedSamplesRunOnTheOthers) {
  testing::TempDir disks;
  JobHarness harness({}, {disks / "one", disks / "two"});
  harness.Run();
  std::vector<v1::SampleInput> samples = Texts(130, 250);
  harness.engine->faults.step = std::chrono::milliseconds(1);
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(1 << 20), samples));
  harness.WaitUntil(job, [](const JobRecord& now) { return now.counts.stored > 0; });
  // Both are of one file system and have as much room: the first one was chosen. Its folder is lost
  // under the open shard and cannot be made again.
  ASSERT_TRUE(std::filesystem::exists(disks / "one" / job.id / "shard-000001.h5"));
  std::filesystem::rename(disks / "one" / job.id, disks / "one" / "lost");
  std::ofstream(disks / "one" / job.id) << "in the way";
  const JobRecord ended = harness.WaitForEnd(job);
  EXPECT_EQ(NameOf(ended.state), "succeeded") << ended.message;
  EXPECT_EQ(ended.counts.stored, 130);
  const auto roots = harness.folders().roots();
  EXPECT_THAT(roots[0].failure, HasSubstr(job.id));
  EXPECT_TRUE(roots[0].out_of_use);
  EXPECT_EQ(roots[1].failure, "");
  // Nothing of what was stored before is lost, and the rest lies on the other disk.
  std::filesystem::remove(disks / "one" / job.id);
  std::filesystem::rename(disks / "one" / "lost", disks / "one" / job.id);
  EXPECT_EQ(harness.Checksums(ended).size(), 130u);
  EXPECT_TRUE(std::filesystem::exists(disks / "two" / job.id));
  // A server that starts again takes it back.
  ShardFolders again(harness.dir.path(), {disks / "one", disks / "two"});
  ASSERT_OK_AND_ASSIGN(const auto path, again.PathFor("other", 1));
  EXPECT_THAT(path.string(), HasSubstr((disks / "one").string()));
}

TEST(JobRunnerTest, AShardGoesToADiskThatIsIdleAndHasRoom) {
  testing::TempDir disks;
  ShardFolders folders(disks.path(), {disks / "one", disks / "two"});
  ASSERT_OK_AND_ASSIGN(const auto first, folders.PathFor("job", 1));
  const auto next = [&](int64_t bytes, std::vector<std::filesystem::path> busy) {
    return *folders.PathFor("job", 2, bytes, busy);
  };
  EXPECT_NE(next(1, {first}).parent_path(), first.parent_path());
  EXPECT_EQ(next(1, {next(1, {first})}).parent_path(), first.parent_path());
  // Where all are busy, to the one with the fewest on their way; without room, to one all the same.
  const auto second = next(1, {first});
  EXPECT_NE(next(1, {first, second, first}).parent_path(), first.parent_path());
  EXPECT_NE(next(1, {second, first, second}).parent_path(), second.parent_path());
  EXPECT_FALSE(next(int64_t{1} << 60, {first}).empty());
}

// Several are filled side by side: any sample that waits is too much here.
TEST(JobRunnerTest, ManyShardsOnTheirWayAreAllNoted) {
  testing::TempDir disks;
  JobRunner::Options options;
  options.shards.lag_bytes = 0;
  JobHarness harness(options, {disks / "one", disks / "two"});
  harness.Run();
  std::vector<v1::SampleInput> samples = Texts(400, 250);
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(1 << 20), samples));
  EXPECT_EQ(harness.WaitForEnd(job).counts.stored, 400);
  ASSERT_OK_AND_ASSIGN(const auto shards, harness.store->Shards(job.key));
  ASSERT_GT(shards.size(), 8u);
  std::set<std::string> names;
  for (const ShardRow& shard : shards)
    names.insert(std::filesystem::path(shard.path).filename().string());
  EXPECT_EQ(names.size(), shards.size());
  EXPECT_EQ(harness.Checksums(job).size(), 400u);
}

TEST(JobRunnerTest, SeveralShardsAreFilledSideBySideOnAllDisks) {
  testing::TempDir disks;
  JobRunner::Options options;
  options.shards.lag_bytes = -1;  // every open shard lags behind
  JobHarness harness(options, {disks / "one", disks / "two"});
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(10)));
  EXPECT_EQ(harness.WaitForEnd(job).counts.stored, 10);
  // None is full before the job ends: all four were open until then.
  ASSERT_OK_AND_ASSIGN(const auto shards, harness.store->Shards(job.key));
  ASSERT_EQ(shards.size(), 4u);
  std::map<std::string, int> by_disk;
  for (const ShardRow& shard : shards) {
    EXPECT_GT(shard.samples, 0);
    ++by_disk[harness.folders().FromStored(shard.path).parent_path().parent_path().filename()];
  }
  EXPECT_THAT(by_disk, ::testing::ElementsAre(std::pair("one", 2), std::pair("two", 2)));
  EXPECT_EQ(harness.Checksums(job).size(), 10u);
}

TEST(JobRunnerTest, AShardFolderThatIsNotThereYetMayBeNamedRelatively) {
  testing::TempDir data;
  const ShardFolders folders(data.path(), {"not-there/yet"});
  EXPECT_EQ(folders.roots()[0].path, std::filesystem::current_path() / "not-there/yet");
  EXPECT_GT(folders.FreeBytes(), 0);
}

TEST(JobRunnerTest, TheLastDiskIsNeverTakenOut) {
  testing::TempDir disks;
  ShardFolders folders(disks.path(), {disks / "one", disks / "two"});
  EXPECT_TRUE(folders.TakeOut(disks / "two" / "job" / "shard.h5", absl::InternalError("EIO")));
  EXPECT_TRUE(folders.TakeOut(disks / "two" / "other", absl::InternalError("EIO")));
  EXPECT_FALSE(folders.TakeOut(disks / "one" / "job", absl::InternalError("EIO")));
  EXPECT_EQ(folders.roots()[1].failure, "EIO");
  EXPECT_TRUE(folders.roots()[1].out_of_use);
  // It is tried again, and said until a shard is written.
  EXPECT_EQ(folders.roots()[0].failure, "EIO");
  EXPECT_FALSE(folders.roots()[0].out_of_use);
  folders.Written(disks / "one" / "job" / "shard.h5");
  folders.Written(disks / "two" / "job" / "shard.h5");
  EXPECT_EQ(folders.roots()[0].failure, "");
  EXPECT_EQ(folders.roots()[1].failure, "EIO");
}

TEST(JobRunnerTest, AJobsFoldersAreThoseOfItsShards) {
  testing::TempDir data, disks;
  const ShardFolders folders(data.path(), {disks / "one", data / "two"});
  using Paths = std::vector<std::filesystem::path>;
  EXPECT_EQ(folders.FoldersWith("job", {}), Paths({disks / "one" / "job"}));
  std::vector<ShardRow> shards(3);
  shards[0].path = folders.ToStored(data / "two" / "job" / "shard-1.h5");
  shards[1].path = folders.ToStored(disks / "one" / "job" / "shard-2.h5");
  shards[2].path = folders.ToStored(data / "two" / "job" / "shard-3.h5");
  EXPECT_EQ(folders.FoldersWith("job", shards),
            Paths({data / "two" / "job", disks / "one" / "job"}));
}

TEST(JobRunnerTest, FailedWriteWaitsAndGoesOnWhenMended) {
  JobRunner::Options options;
  options.shards.retry_after = std::chrono::milliseconds(100);
  JobHarness harness(options);
  harness.Run();
  // 16 × 4 boundaries × 2 bytes a row: a shard of 1 MiB holds 33 samples of 250 rows.
  v1::JobOptions job_options = Options(1 << 20);
  std::vector<v1::SampleInput> samples = Texts(130, 250);
  harness.engine->faults.step = std::chrono::milliseconds(1);
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(job_options, samples));
  harness.WaitUntil(job, [](const JobRecord& now) { return now.counts.stored > 0; });
  // The third shard's name is taken by a folder: it cannot be created, like on a failing disk.
  const auto folder = harness.folders().Folder(job.id);
  const auto blocked = folder / "shard-000003.h5";
  std::filesystem::create_directories(blocked / "x");
  const JobRecord waiting =
      harness.WaitUntil(job, [](const JobRecord& now) { return now.state == JobState::kWaiting; });
  ASSERT_EQ(NameOf(waiting.state), "waiting");
  EXPECT_THAT(waiting.message, HasSubstr("shard-000003.h5"));
  EXPECT_THAT(waiting.message, HasSubstr("tries again"));
  std::filesystem::remove_all(blocked);
  const JobRecord done = harness.WaitForEnd(job);
  EXPECT_EQ(done.counts.stored, 130);
  EXPECT_EQ(harness.folders().roots()[0].failure, "");
  EXPECT_EQ(harness.Checksums(job).size(), 130u);
  EXPECT_EQ(harness.BufferedInTheEnd(), 0);
}

// The disk of --data is full as well: neither that the job waits nor that it goes on can be noted
// at first.
TEST(JobRunnerTest, WaitingThatCannotBeNotedIsTriedAgainAllTheSame) {
  JobRunner::Options options;
  options.shards.retry_after = std::chrono::milliseconds(50);
  JobHarness harness(options);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(auto sql, SqlConnection::Open(harness.dir / "statetap.db",
                                                     SqlConnection::Access::kReadWrite));
  ASSERT_OK(
      sql.Execute("CREATE TRIGGER full BEFORE UPDATE OF state ON jobs WHEN NEW.state IN (1, 3) "
                  "AND OLD.state <> 0 BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"));
  std::vector<v1::SampleInput> samples = Texts(100, 250);
  harness.engine->faults.step = std::chrono::milliseconds(1);
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(1 << 20), samples));
  const auto blocked = harness.folders().Folder(job.id) / "shard-000002.h5";
  std::filesystem::create_directories(blocked / "x");
  harness.WaitUntil(job, [](const JobRecord& now) { return now.counts.stored > 0; });
  std::this_thread::sleep_for(std::chrono::milliseconds(400));  // several attempts
  const JobRecord stuck = *harness.store->GetJob(job.key);
  EXPECT_EQ(NameOf(stuck.state), "running");
  EXPECT_LT(stuck.counts.stored, 100);
  std::filesystem::remove_all(blocked);
  ASSERT_OK(sql.Execute("DROP TRIGGER full"));
  EXPECT_EQ(harness.WaitForEnd(job).counts.stored, 100);
}

// What was 8192 by default need not stop a job whose samples are short.
TEST(JobRunnerTest, SmallerLengthLimitMattersOnlyWhereASampleMayReachIt) {
  JobHarness harness;
  ASSERT_OK_AND_ASSIGN(const JobRecord prefill,
                       harness.Submit({}, {IdsSample("a", std::vector<int32_t>(100, 7))}));
  v1::JobOptions options;
  options.set_max_new_tokens(20);
  ASSERT_OK_AND_ASSIGN(const JobRecord bounded, harness.Submit(options, Chats(3)));
  options.clear_max_new_tokens();
  ASSERT_OK_AND_ASSIGN(const JobRecord open, harness.Submit(options, Chats(3)));
  harness.model.max_seq_len = 128;
  harness.Restart();
  harness.Run();
  EXPECT_EQ(harness.WaitForEnd(prefill).counts.stored, 1);
  EXPECT_EQ(harness.WaitForEnd(bounded).counts.stored, 3);
  const JobRecord waiting = *harness.store->GetJob(open.key);
  EXPECT_EQ(NameOf(waiting.state), "waiting");
  EXPECT_THAT(waiting.message, HasSubstr("max_length is 512"));
  EXPECT_THAT(waiting.message, HasSubstr("--max-seq-len 512"));
}

TEST(JobRunnerTest, OtherConfigurationMakesTheJobWaitAndNamesTheField) {
  JobHarness harness;
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(4)));
  harness.Restart();
  harness.model.digest = "weights-2";
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord waiting, harness.store->GetJob(job.key));
  EXPECT_EQ(NameOf(waiting.state), "waiting");
  EXPECT_THAT(waiting.message, HasSubstr("weight_digest"));
  EXPECT_THAT(waiting.message, HasSubstr("weights-1"));
  EXPECT_THAT(waiting.message, HasSubstr("weights-2"));
  harness.Restart();
  harness.model.digest = "weights-1";
  harness.model.inner_eps = 1e-6;
  harness.Run();
  EXPECT_THAT(harness.store->GetJob(job.key)->message, HasSubstr("inner_eps"));
  harness.Restart();
  harness.model.inner_eps = 1e-5;
  harness.Run();
  EXPECT_EQ(harness.WaitForEnd(job).counts.stored, 4);
}

TEST(JobRunnerTest, OtherStopIdsMakeAJobOfAnswersWait) {
  JobHarness harness;
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(4)));
  ASSERT_OK_AND_ASSIGN(const JobRecord prefill, harness.Submit({}, {IdsSample("a", {1, 2, 3})}));
  harness.Restart();
  harness.model.stop_ids = {2050};
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord waiting, harness.store->GetJob(job.key));
  EXPECT_EQ(NameOf(waiting.state), "waiting");
  EXPECT_THAT(waiting.message, HasSubstr("stop ids"));
  EXPECT_THAT(waiting.message, HasSubstr("[2049,2050]"));
  EXPECT_THAT(waiting.message, HasSubstr("[2050]"));
  EXPECT_EQ(harness.WaitForEnd(prefill).counts.stored, 1);  // nothing is sampled there
}

// As generation_config.json is read: changing it changes what a job's content depends on.
TEST(ServedModelTest, StopIdsAreTheCheckpointsAndTheNamedOnes) {
  const testing::TempDir dir;
  const std::filesystem::path folder = dir / "model";
  std::filesystem::copy(std::filesystem::path(STATETAP_SOURCE_DIR) / "models/tiny-kimi", folder);
  const auto content = [&]() -> absl::StatusOr<ContentConfig> {
    STATETAP_ASSIGN_OR_RETURN(const CheckpointIndex index, CheckpointIndex::Open(folder));
    STATETAP_ASSIGN_OR_RETURN(const ServedModel model, ServedModel::Of(index, {}, {}));
    return model.Content(model.template_kind);
  };
  ASSERT_OK_AND_ASSIGN(const ContentConfig before, content());
  EXPECT_EQ(before.stop_ids, "[2049,2050]");
  std::ofstream(folder / "generation_config.json") << R"({"eos_token_id": [2050, 7]})";
  ASSERT_OK_AND_ASSIGN(const ContentConfig after, content());
  EXPECT_EQ(after.stop_ids, "[7,2049,2050]");
  EXPECT_THAT(ContentConflict(before, after), HasSubstr("stop ids"));
  EXPECT_EQ(ContentConflict(before, before), "");
}

// As if the server had been killed between the renames and the transactions.
void ForgetShards(const JobHarness& harness, int samples) {
  ASSERT_OK_AND_ASSIGN(auto sql, SqlConnection::Open(harness.dir / "statetap.db",
                                                     SqlConnection::Access::kReadWrite));
  ASSERT_OK(sql.Execute(fmt::format(
      "DELETE FROM shards; UPDATE samples SET state = 0, shard = NULL, row = NULL;"
      "UPDATE jobs SET state = 2, stored = 0, to_do = {}, tokens = 0, generated = 0, bytes = 0",
      samples)));
}

TEST(JobRunnerTest, StartRemovesUnfinishedFilesAndTakesOverUnnotedShards) {
  JobHarness harness;
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(6)));
  harness.WaitForEnd(job);
  const auto expected = harness.Checksums(job);
  harness.Stop();
  ForgetShards(harness, 6);
  const auto folder = harness.folders().Folder(job.id);
  std::ofstream(folder / "shard-000002.h5.partial") << "cut";
  std::filesystem::copy_file(folder / "shard-000001.h5", folder / "shard-000007.h5");
  std::ofstream(folder / "shard-000009.h5") << "no shard";
  harness.Restart();
  const int64_t steps = harness.engine->steps;
  harness.Run();
  const JobRecord now = harness.WaitForEnd(job);
  EXPECT_EQ(NameOf(now.state), "succeeded");
  EXPECT_EQ(harness.engine->steps, steps);
  EXPECT_EQ(harness.Checksums(job), expected);
  EXPECT_TRUE(std::filesystem::exists(folder / "shard-000001.h5"));
  EXPECT_FALSE(std::filesystem::exists(folder / "shard-000002.h5.partial"));
  EXPECT_FALSE(std::filesystem::exists(folder / "shard-000007.h5"));
  EXPECT_FALSE(std::filesystem::exists(folder / "shard-000009.h5"));
}

// Several shards are on their way at once: a crash may leave a later one and not the one before.
TEST(JobRunnerTest, AnUnnotedShardKeepsItsNumber) {
  JobHarness harness;
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(6)));
  harness.WaitForEnd(job);
  harness.Stop();
  ForgetShards(harness, 6);
  const auto folder = harness.folders().Folder(job.id);
  std::filesystem::rename(folder / "shard-000001.h5", folder / "shard-000003.h5");
  harness.Restart();
  harness.Run();
  harness.WaitForEnd(job);
  ASSERT_OK_AND_ASSIGN(const auto shards, harness.store->Shards(job.key));
  ASSERT_EQ(shards.size(), 1u);
  EXPECT_EQ(shards[0].seq, 3);
  EXPECT_EQ(*harness.store->NextShard(job.key), 4);
}

TEST(JobRunnerTest, SmallJobDoesNotWaitForALargeOne) {
  JobHarness harness;
  harness.engine->faults.step = std::chrono::milliseconds(1);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord large, harness.Submit(Options(), Chats(400)));
  harness.WaitUntil(large, [](const JobRecord& now) { return now.state == JobState::kRunning; });
  std::vector<v1::SampleInput> few = Chats(5);
  v1::JobOptions options = Options();
  options.set_seed(7);
  ASSERT_OK_AND_ASSIGN(const JobRecord small, harness.Submit(options, few));
  EXPECT_EQ(harness.WaitForEnd(small).counts.stored, 5);
  EXPECT_GT(harness.store->GetJob(large.key)->counts.to_do, 200);
}

TEST(JobRunnerTest, HostBufferBoundsWhatRuns) {
  JobRunner::Options options;
  // Two samples of 256 rows × 4 boundaries × 16 × 2 bytes.
  options.host_buffer_bytes = 2 * 256 * 4 * 16 * 2;
  JobHarness harness(options);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(30)));
  EXPECT_EQ(harness.WaitForEnd(job).counts.stored, 30);
  EXPECT_LE(harness.engine->most_running, 2);

  options.host_buffer_bytes = 1;  // one sample may always run
  JobHarness narrow(options);
  narrow.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord other, narrow.Submit(Options(), Chats(5)));
  EXPECT_EQ(narrow.WaitForEnd(other).counts.stored, 5);
  EXPECT_EQ(narrow.engine->most_running, 1);
}

TEST(JobRunnerTest, FailedEngineMakesJobsWaitAndLosesNothing) {
  JobHarness harness;
  harness.engine->faults.step = std::chrono::milliseconds(1);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(50)));
  harness.WaitUntil(job, [](const JobRecord& now) { return now.state == JobState::kRunning; });
  harness.engine->faults.fail = true;
  const JobRecord waiting =
      harness.WaitUntil(job, [](const JobRecord& now) { return now.state == JobState::kWaiting; });
  EXPECT_THAT(waiting.message, HasSubstr("the engine has failed"));
  EXPECT_THAT(harness.runner->Ask({}), StatusIs(absl::StatusCode::kUnavailable, "a rank"));
  harness.Restart();
  harness.Run();
  EXPECT_EQ(harness.WaitForEnd(job).counts.stored, 50);
}

TEST(JobRunnerTest, AnswersComeBeforeJobsAndStopWhenAbandoned) {
  JobHarness harness;
  harness.engine->faults.step = std::chrono::milliseconds(1);
  harness.Run();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(Options(), Chats(200)));
  SampleTask task;
  task.input_ids = {1, 2, 3};
  task.generate = true;
  task.max_new_tokens = 10;
  task.max_length = 100;
  ASSERT_OK_AND_ASSIGN(const auto answer, harness.runner->Ask(task));
  int tokens = 0;
  while (answer->Next()) ++tokens;
  EXPECT_OK(answer->status());
  EXPECT_EQ(tokens, 10);
  EXPECT_GT(harness.store->GetJob(job.key)->counts.to_do, 100);

  task.max_new_tokens = 1 << 20;
  task.max_length = 1 << 20;
  ASSERT_OK_AND_ASSIGN(const auto endless, harness.runner->Ask(task));
  EXPECT_TRUE(endless->Next().has_value());
  endless->Abandon();
  while (endless->Next()) {
  }
  EXPECT_THAT(endless->status(), StatusIs(absl::StatusCode::kCancelled, ""));
}

}  // namespace
}  // namespace statetap
