#include "server/store/job_store.h"

#include "extractor/base/file.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

std::string NoDifference(std::string_view) { return "options differ"; }

SampleRow Sample(std::string id, std::string digest = "d", int64_t line = 1) {
  SampleRow sample;
  sample.id = std::move(id);
  sample.digest = std::move(digest);
  sample.source_line = line;
  sample.ids = {1, 2, 3};
  sample.prompt_tokens = 3;
  return sample;
}

// Every transaction recounts: a broken equation fails the call.
class JobStoreTest : public ::testing::Test {
 protected:
  void SetUp() override { Reopen(); }
  void Reopen() {
    store_.reset();
    auto store = JobStore::Open(dir_ / "statetap.db", {.verify_counts = true});
    ASSERT_OK(store);
    store_ = *std::move(store);
  }
  absl::StatusOr<JobRecord> Publish(std::vector<SampleRow> samples, std::string_view name = "job",
                                    std::string_view options = "o") {
    STATETAP_ASSIGN_OR_RETURN(const int64_t key, store_->CreateJob({.weight_digest = "w"}));
    STATETAP_RETURN_IF_ERROR(store_->AddSamples(key, samples).status());
    STATETAP_ASSIGN_OR_RETURN(JobStore::Published published,
                              store_->PublishJob(key, name, options, NoDifference));
    return std::move(published.job);
  }
  void ExpectCounts(int64_t key, JobState state, int64_t stored, int64_t rejected,
                    int64_t cancelled, int64_t to_do) {
    ASSERT_OK_AND_ASSIGN(const JobRecord job, store_->GetJob(key));
    EXPECT_EQ(NameOf(job.state), NameOf(state));
    EXPECT_EQ(job.counts.submitted, stored + rejected + cancelled + to_do);
    EXPECT_EQ(job.counts.stored, stored);
    EXPECT_EQ(job.counts.rejected, rejected);
    EXPECT_EQ(job.counts.cancelled, cancelled);
    EXPECT_EQ(job.counts.to_do, to_do);
  }
  absl::Status Commit(int64_t key, std::vector<int64_t> indices) {
    std::vector<StoredSample> stored;
    for (const int64_t index : indices) {
      const auto position = static_cast<int64_t>(stored.size());
      StoredSample sample;
      sample.index = index;
      sample.position = position;
      sample.row = 4 * position;
      sample.rows = 4;
      sample.finish = "stop";
      sample.generated = 1;
      stored.push_back(sample);
    }
    STATETAP_ASSIGN_OR_RETURN(const int64_t seq, store_->NextShard(key));
    const auto count = static_cast<int64_t>(stored.size());
    return store_->CommitShard(
        key, {seq, fmt::format("{}.h5", seq), count, 4 * count, 100, "digest"}, stored);
  }

  testing::TempDir dir_;
  std::unique_ptr<JobStore> store_;
};

TEST_F(JobStoreTest, CountsAddUpThroughStoreRejectCancelAndReopen) {
  std::vector<SampleRow> samples;
  for (int i = 0; i < 10; ++i) samples.push_back(Sample(fmt::format("s{}", i)));
  samples[4].rejection = Rejection{"too_long", {}, {}, "9 tokens"};
  ASSERT_OK_AND_ASSIGN(const JobRecord job, Publish(samples));
  ExpectCounts(job.key, JobState::kQueued, 0, 1, 0, 9);
  ASSERT_OK(store_->MarkRunning(job.key));
  ASSERT_OK(Commit(job.key, {0, 2}));
  const std::vector<JobStore::RejectedSample> bad = {{3, {"non_finite", 2, 7, "NaN"}},
                                                     {0, {"non_finite", 2, 7, "too late"}}};
  ASSERT_OK(store_->Reject(job.key, bad));
  ExpectCounts(job.key, JobState::kRunning, 2, 2, 0, 6);
  Reopen();
  ASSERT_OK_AND_ASSIGN(const auto to_do, store_->ToDo(job.key, -1, 100));
  EXPECT_EQ(to_do.size(), 6u);
  EXPECT_EQ(to_do[0].index, 1);
  EXPECT_EQ(to_do[0].ids, (std::vector<int32_t>{1, 2, 3}));
  ASSERT_OK(store_->CancelRest(job.key));
  ExpectCounts(job.key, JobState::kCancelled, 2, 2, 6, 0);
  ASSERT_OK_AND_ASSIGN(const auto rejected, store_->Rejected(job.key, -1, 100));
  ASSERT_EQ(rejected.size(), 2u);
  EXPECT_EQ(rejected[0].sample.rejection->layer, 2);
  EXPECT_EQ(rejected[0].sample.rejection->token, 7);
  EXPECT_EQ(rejected[1].sample.rejection->layer, std::nullopt);
}

TEST_F(JobStoreTest, JobEndsWithItsLastSample) {
  ASSERT_OK_AND_ASSIGN(const JobRecord good, Publish({Sample("a"), Sample("b")}, "good"));
  ASSERT_OK(Commit(good.key, {1}));
  const std::vector<JobStore::RejectedSample> last = {{0, {"template", {}, {}, "no"}}};
  ASSERT_OK(store_->Reject(good.key, last));
  ExpectCounts(good.key, JobState::kSucceeded, 1, 1, 0, 0);

  SampleRow sample = Sample("a");
  sample.rejection = Rejection{"token_id", {}, 0, "id 9999"};
  ASSERT_OK_AND_ASSIGN(const JobRecord bad, Publish({sample}, "bad"));
  EXPECT_EQ(bad.state, JobState::kFailed);
  EXPECT_THAT(bad.message, HasSubstr("1 token_id (id 9999)"));
}

TEST_F(JobStoreTest, CommitIsAllOrNothing) {
  ASSERT_OK_AND_ASSIGN(const JobRecord job, Publish({Sample("a"), Sample("b"), Sample("c")}));
  ASSERT_OK(Commit(job.key, {1}));
  EXPECT_THAT(Commit(job.key, {0, 1}), StatusIs(absl::StatusCode::kFailedPrecondition, "sample 1"));
  ExpectCounts(job.key, JobState::kQueued, 1, 0, 0, 2);
  ASSERT_OK_AND_ASSIGN(const auto shards, store_->Shards(job.key));
  EXPECT_EQ(shards.size(), 1u);
}

TEST_F(JobStoreTest, SameIdIsTheSameSampleOrRefused) {
  ASSERT_OK_AND_ASSIGN(const int64_t key, store_->CreateJob({}));
  const std::vector<SampleRow> batch = {Sample("a", "x", 1), Sample("a", "x", 2)};
  ASSERT_OK_AND_ASSIGN(const JobStore::Added added, store_->AddSamples(key, batch));
  EXPECT_EQ(added.added, 1);
  EXPECT_EQ(added.duplicates, 1);
  const std::vector<SampleRow> other = {Sample("b", "y", 3), Sample("a", "z", 9)};
  EXPECT_THAT(store_->AddSamples(key, other),
              StatusIs(absl::StatusCode::kInvalidArgument, "lines 1 and 9"));
}

TEST_F(JobStoreTest, NameIsIdempotent) {
  ASSERT_OK_AND_ASSIGN(const JobRecord first, Publish({Sample("a"), Sample("b")}));
  ASSERT_OK_AND_ASSIGN(const JobRecord again, Publish({Sample("a"), Sample("b")}));
  EXPECT_EQ(first.id, again.id);
  EXPECT_THAT(Publish({Sample("a"), Sample("c")}),
              StatusIs(absl::StatusCode::kAlreadyExists, "sample 1 (\"c\")"));
  EXPECT_THAT(Publish({Sample("a")}),
              StatusIs(absl::StatusCode::kAlreadyExists, "1 samples here, 2 there"));
  EXPECT_THAT(Publish({Sample("a"), Sample("b")}, "job", "p"),
              StatusIs(absl::StatusCode::kAlreadyExists, "options differ"));
  ASSERT_OK_AND_ASSIGN(const auto jobs, store_->ListJobs());
  EXPECT_EQ(jobs.size(), 1u);
}

TEST_F(JobStoreTest, UnpublishedUploadLeavesNothing) {
  ASSERT_OK_AND_ASSIGN(const int64_t key, store_->CreateJob({}));
  ASSERT_OK(store_->AddSamples(key, std::vector<SampleRow>{Sample("a")}));
  ASSERT_OK_AND_ASSIGN(const auto jobs, store_->ListJobs());
  EXPECT_TRUE(jobs.empty());
  Reopen();
  EXPECT_THAT(store_->GetJob(key), StatusIs(absl::StatusCode::kNotFound, "deleted"));
}

// As an upload that was refused, and one that was there already: 40 MB of ids.
TEST_F(JobStoreTest, UploadThatIsGivenUpLeavesNoLargeLog) {
  const auto log_bytes = [&] { return std::filesystem::file_size(dir_ / "statetap.db-wal"); };
  for (const bool publish : {true, true, false}) {
    ASSERT_OK_AND_ASSIGN(const int64_t key, store_->CreateJob({}));
    for (int batch = 0; batch < 2; ++batch) {
      std::vector<SampleRow> samples;
      for (int i = 0; i < 5000; ++i) {
        samples.push_back(Sample(fmt::format("{}-{}", batch, i)));
        samples.back().ids.assign(1000, i);
      }
      ASSERT_OK(store_->AddSamples(key, samples));
    }
    if (publish) {
      ASSERT_OK(store_->PublishJob(key, "large", "o", NoDifference));
    } else {
      ASSERT_OK(store_->AbandonJob(key));
      EXPECT_THAT(store_->GetJob(key), StatusIs(absl::StatusCode::kNotFound, "deleted"));
    }
  }
  EXPECT_LT(log_bytes(), size_t{1} << 20);
  ASSERT_OK_AND_ASSIGN(const auto jobs, store_->ListJobs());
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].counts.to_do, 10000);
}

TEST_F(JobStoreTest, GroupsAcknowledgeApart) {
  ASSERT_OK_AND_ASSIGN(const JobRecord job, Publish({Sample("a"), Sample("b"), Sample("c")}));
  ASSERT_OK(Commit(job.key, {2, 0}));
  ASSERT_OK(Commit(job.key, {1}));
  ASSERT_OK(store_->Acknowledge(job.key, "g", std::vector<int64_t>{2}));
  ASSERT_OK(store_->Acknowledge(job.key, "g", std::vector<int64_t>{2}));
  Reopen();
  ASSERT_OK_AND_ASSIGN(const auto all, store_->InStoredOrder(job.key, "g", 0, -1, 10));
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].index, 2);
  EXPECT_TRUE(all[0].acknowledged);
  EXPECT_EQ(all[1].index, 0);
  EXPECT_EQ(all[1].shard, 1);
  EXPECT_FALSE(all[1].acknowledged);
  EXPECT_EQ(all[2].index, 1);
  EXPECT_TRUE(*store_->IsAcknowledged(job.key, "g", 2));
  EXPECT_FALSE(*store_->IsAcknowledged(job.key, "g", 0));
  EXPECT_FALSE(*store_->IsAcknowledged(job.key, "h", 2));
  // Pages go on behind what was seen, whether it passed the filter or not.
  ASSERT_OK_AND_ASSIGN(const SampleFilter filter, SampleFilter::Parse("index < 2"));
  ASSERT_OK_AND_ASSIGN(const auto some, store_->InStoredOrder(job.key, "g", 0, -1, 1, filter));
  ASSERT_EQ(some.size(), 1u);
  EXPECT_EQ(some[0].index, 0);
}

TEST_F(JobStoreTest, RefusesAFileThatIsNoStoreOrIsNewer) {
  ASSERT_OK(WriteFileAtomically(dir_ / "text.db", std::string(4096, 'x')));
  EXPECT_THAT(JobStore::Open(dir_ / "text.db", {}),
              StatusIs(absl::StatusCode::kDataLoss, "text.db"));
  ASSERT_OK_AND_ASSIGN(auto newer,
                       SqlConnection::Open(dir_ / "newer.db", SqlConnection::Access::kReadWrite));
  ASSERT_OK(newer.Execute("PRAGMA user_version = 99"));
  EXPECT_THAT(JobStore::Open(dir_ / "newer.db", {}),
              StatusIs(absl::StatusCode::kFailedPrecondition, "version 99"));
}

TEST_F(JobStoreTest, PauseKeepsWhatIsToDoUntilResume) {
  ASSERT_OK_AND_ASSIGN(const JobRecord job, Publish({Sample("a"), Sample("b")}));
  ASSERT_OK(store_->MarkRunning(job.key));
  ASSERT_OK(store_->MarkPaused(job.key, "paused"));
  ASSERT_OK(store_->MarkQueued(job.key));  // a restart does not end a pause
  ExpectCounts(job.key, JobState::kPaused, 0, 0, 0, 2);
  ASSERT_OK(store_->Resume(job.key));
  ExpectCounts(job.key, JobState::kQueued, 0, 0, 0, 2);
  EXPECT_THAT(store_->Resume(job.key), StatusIs(absl::StatusCode::kFailedPrecondition, "paused"));
  ASSERT_OK(Commit(job.key, {0, 1}));
  ASSERT_OK(store_->MarkPaused(job.key, "paused"));
  ExpectCounts(job.key, JobState::kSucceeded, 2, 0, 0, 0);
}

TEST_F(JobStoreTest, AJobEndsBehindItsGate) {
  const auto publish = [&](std::string_view name) -> absl::StatusOr<int64_t> {
    STATETAP_ASSIGN_OR_RETURN(const int64_t key, store_->CreateJob({}, Gate::kAhead));
    STATETAP_RETURN_IF_ERROR(
        store_->AddSamples(key, std::vector{Sample("a"), Sample("b")}).status());
    return store_->PublishJob(key, name, "o", NoDifference)->job.key;
  };
  ASSERT_OK_AND_ASSIGN(const int64_t sound, publish("sound"));
  ASSERT_OK(Commit(sound, {0, 1}));
  ExpectCounts(sound, JobState::kQueued, 2, 0, 0, 0);
  ASSERT_OK(store_->PassGate(sound));
  ExpectCounts(sound, JobState::kSucceeded, 2, 0, 0, 0);

  ASSERT_OK_AND_ASSIGN(const int64_t dead, publish("dead"));
  ASSERT_OK(Commit(dead, {0, 1}));
  ASSERT_OK(store_->PauseAtGate(dead, "a dead tap"));
  Reopen();
  ExpectCounts(dead, JobState::kPaused, 2, 0, 0, 0);
  EXPECT_EQ(store_->GetJob(dead)->message, "a dead tap");
  ASSERT_OK(store_->Resume(dead));
  ExpectCounts(dead, JobState::kSucceeded, 2, 0, 0, 0);

  // A pause by a person is no look.
  ASSERT_OK_AND_ASSIGN(const int64_t paused, publish("paused"));
  ASSERT_OK(store_->MarkPaused(paused, "paused"));
  ASSERT_OK(store_->Resume(paused));
  EXPECT_EQ(store_->GetJob(paused)->gate, Gate::kAhead);
  ASSERT_OK(Commit(paused, {0, 1}));
  ASSERT_OK(store_->CancelRest(paused));
  ExpectCounts(paused, JobState::kCancelled, 2, 0, 0, 0);

  // Without a stored sample there is nothing to look at.
  ASSERT_OK_AND_ASSIGN(const int64_t empty, publish("empty"));
  ASSERT_OK(store_->RejectRest(empty, {"write", {}, {}, "no"}));
  ExpectCounts(empty, JobState::kFailed, 0, 2, 0, 0);
}

TEST_F(JobStoreTest, RetryBringsBackWhatCanRunAndSaysWhatCannot) {
  std::vector<SampleRow> samples = {Sample("a"), Sample("b"), Sample("c")};
  samples[2].rejection = Rejection{"template", {}, {}, "no"};
  samples[2].ids.clear();
  ASSERT_OK_AND_ASSIGN(const JobRecord job, Publish(samples));
  EXPECT_THAT(store_->Retry(job.key),
              StatusIs(absl::StatusCode::kFailedPrecondition, "refused as they came in"));
  const std::vector<JobStore::RejectedSample> rejected = {{0, {"non_finite", 2, 1, "NaN"}},
                                                          {1, {"non_finite", 2, 1, "NaN"}}};
  ASSERT_OK(store_->Reject(job.key, rejected));
  ExpectCounts(job.key, JobState::kFailed, 0, 3, 0, 0);
  ASSERT_OK_AND_ASSIGN(const JobStore::Retried retried, store_->Retry(job.key));
  EXPECT_EQ(retried.retried, 2);
  EXPECT_EQ(retried.kept, 1);
  ExpectCounts(job.key, JobState::kQueued, 0, 1, 0, 2);
  ASSERT_OK(Commit(job.key, {0, 1}));
  ExpectCounts(job.key, JobState::kSucceeded, 2, 1, 0, 0);
  ASSERT_OK_AND_ASSIGN(const JobRecord other, Publish({Sample("a")}, "other"));
  EXPECT_THAT(store_->Retry(other.key),
              StatusIs(absl::StatusCode::kFailedPrecondition, "no rejected samples"));
}

TEST_F(JobStoreTest, DeletedJobsAreDoomedUntilTheirFilesAreGone) {
  ASSERT_OK_AND_ASSIGN(const JobRecord job, Publish({Sample("a"), Sample("b")}));
  ASSERT_OK(Commit(job.key, {0}));
  ASSERT_OK(store_->DeleteJob(job.key));
  EXPECT_THAT(store_->GetJob(job.key), StatusIs(absl::StatusCode::kNotFound, "deleted"));
  Reopen();
  ASSERT_OK_AND_ASSIGN(const auto doomed, store_->Doomed());
  EXPECT_THAT(doomed, ::testing::ElementsAre(job.id));
  ASSERT_OK(store_->Forget(job.id));
  ASSERT_OK_AND_ASSIGN(const auto none, store_->Doomed());
  EXPECT_TRUE(none.empty());
  ASSERT_OK(Publish({Sample("a")}));  // the name is free
}

TEST_F(JobStoreTest, ExcludedSamplesAreStoredButNotStreamed) {
  ASSERT_OK_AND_ASSIGN(const JobRecord job, Publish({Sample("a"), Sample("b"), Sample("c")}));
  ASSERT_OK(Commit(job.key, {0, 1}));
  using Exclusion = JobStore::Exclusion;
  const std::vector<int64_t> indices = {1, 2};  // c is not stored
  ASSERT_OK_AND_ASSIGN(const int64_t excluded,
                       store_->MarkExcluded(job.key, indices, Exclusion::kExclude));
  EXPECT_EQ(excluded, 1);
  ASSERT_OK_AND_ASSIGN(const int64_t again,
                       store_->MarkExcluded(job.key, indices, Exclusion::kExclude));
  EXPECT_EQ(again, 0);
  ASSERT_OK_AND_ASSIGN(const auto left, store_->InStoredOrder(job.key, "g", 0, -1, 10));
  ASSERT_EQ(left.size(), 1u);
  EXPECT_EQ(left[0].index, 0);
  ASSERT_OK_AND_ASSIGN(const auto listed, store_->Stored(job.key, -1, 10));
  ASSERT_EQ(listed.size(), 2u);
  EXPECT_FALSE(listed[0].excluded);
  EXPECT_TRUE(listed[1].excluded);
  ASSERT_OK_AND_ASSIGN(const int64_t included,
                       store_->MarkExcluded(job.key, indices, Exclusion::kInclude));
  EXPECT_EQ(included, 1);
  ASSERT_OK_AND_ASSIGN(const JobRecord now, store_->GetJob(job.key));
  EXPECT_EQ(now.counts.excluded, 0);
}

TEST_F(JobStoreTest, StoredPagesHoldWhatTheFilterHoldsFor) {
  std::vector<SampleRow> samples;
  std::vector<int64_t> all;
  for (int i = 0; i < 50; ++i) {
    samples.push_back(Sample(fmt::format("s{}", i)));
    samples.back().source = i % 10 == 9 ? "rare" : "common";
    all.push_back(i);
  }
  ASSERT_OK_AND_ASSIGN(const JobRecord job, Publish(samples));
  ASSERT_OK(Commit(job.key, all));
  ASSERT_OK_AND_ASSIGN(const SampleFilter filter, SampleFilter::Parse("source == 'rare'"));
  std::vector<int64_t> found;
  for (int64_t after = -1;;) {
    ASSERT_OK_AND_ASSIGN(const auto page, store_->Stored(job.key, after, 2, filter));
    for (const SampleListing& listing : page) found.push_back(listing.sample.index);
    if (page.size() < 2) break;
    after = found.back();
  }
  EXPECT_THAT(found, ::testing::ElementsAre(9, 19, 29, 39, 49));
}

TEST_F(JobStoreTest, FilesOfEarlierVersionsAreBroughtUpToDate) {
  // What each version added, undone.
  const std::vector<std::string> undo = {
      "ALTER TABLE samples DROP COLUMN excluded; DROP TABLE doomed;",  // 2
      "ALTER TABLE jobs DROP COLUMN stop_ids;",                        // 3
      "ALTER TABLE shards DROP COLUMN evicted;",                       // 4
      "ALTER TABLE jobs DROP COLUMN thoughts; ALTER TABLE jobs DROP COLUMN dropped_earlier;"
      "ALTER TABLE jobs DROP COLUMN dropped_tool_turns; ALTER TABLE jobs DROP COLUMN dropped_last;"
      "ALTER TABLE jobs DROP COLUMN tool_calls; ALTER TABLE jobs DROP COLUMN odd_tool_ids;"
      "ALTER TABLE jobs DROP COLUMN spelled_specials;",  // 5
      "ALTER TABLE jobs DROP COLUMN gate;",              // 6
  };
  for (size_t version = 1; version <= undo.size(); ++version) {
    const std::string name = fmt::format("of version {}", version);
    ASSERT_OK_AND_ASSIGN(const JobRecord job, Publish({Sample("a")}, name));
    ASSERT_OK(Commit(job.key, {0}));
    const std::string under_way = name + ", under way", at_gate = name + ", at its gate";
    ASSERT_OK_AND_ASSIGN(const JobRecord running, Publish({Sample("a")}, under_way));
    ASSERT_OK_AND_ASSIGN(const JobRecord shut, Publish({Sample("a")}, at_gate));
    ASSERT_OK(store_->MarkPaused(shut.key, "paused at its gate: zero_boundary"));
    store_.reset();
    {
      ASSERT_OK_AND_ASSIGN(
          SqlConnection older,
          SqlConnection::Open(dir_ / "statetap.db", SqlConnection::Access::kReadWrite));
      for (size_t i = undo.size(); i >= version; --i) ASSERT_OK(older.Execute(undo[i - 1]));
      ASSERT_OK(older.Execute(fmt::format("PRAGMA user_version = {}", version)));
    }
    Reopen();
    ASSERT_OK_AND_ASSIGN(const JobRecord again, store_->GetJob(name));
    EXPECT_EQ(again.content.stop_ids, "");
    ASSERT_OK_AND_ASSIGN(const auto listed, store_->Stored(job.key, -1, 10));
    ASSERT_EQ(listed.size(), 1u);
    EXPECT_FALSE(listed[0].excluded);
    ASSERT_OK_AND_ASSIGN(const auto shards, store_->Shards(job.key));
    EXPECT_FALSE(shards[0].evicted);
    EXPECT_EQ(again.gate, Gate::kNone);
    EXPECT_EQ(store_->GetJob(under_way)->gate, Gate::kAhead);
    EXPECT_EQ(store_->GetJob(at_gate)->gate, Gate::kShut);
    for (const int64_t key : {job.key, running.key, shut.key}) ASSERT_OK(store_->DeleteJob(key));
  }
}

}  // namespace
}  // namespace statetap
