// The only truth about jobs, samples, shards and acknowledgements: one SQLite file, one transaction
// a method, durable when a method returns.
//
// After every transaction submitted = stored + rejected + cancelled + to_do, and a job that has
// nothing to do has ended: SUCCEEDED where something was stored, CANCELLED where something was
// cancelled, else FAILED with the reasons. One that has stored something ends behind its gate only.
// Thread safe. Errors: NOT_FOUND names the job,
// RESOURCE_EXHAUSTED or INTERNAL the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/shard/sample_filter.h"
#include "extractor/text/text_counts.h"
#include "server/store/sqlite.h"

namespace statetap {

// Values as in statetap.v1.JobState.
enum class JobState {
  kCreating = 0,
  kQueued = 1,
  kRunning = 2,
  kWaiting = 3,
  kSucceeded = 4,
  kFailed = 5,
  kCancelled = 6,
  kPaused = 7
};
constexpr bool HasEnded(JobState state) {
  return state == JobState::kSucceeded || state == JobState::kFailed ||
         state == JobState::kCancelled;
}
std::string_view NameOf(JobState state);  // "queued", …

// Of a job whose first samples' statistics are looked at (JobOptions.gate).
enum class Gate {
  kNone = 0,   // there is none, or it is passed
  kAhead = 1,  // not looked at yet
  kShut = 2    // there were alarms: paused until a person resumes it
};

struct JobCounts {
  int64_t submitted = 0, stored = 0, rejected = 0, cancelled = 0, to_do = 0;
  int64_t excluded = 0, evicted = 0;  // marks on stored samples
};

// What a job's content depends on besides its options: a server with another one must not go on
// with it.
struct ContentConfig {
  std::string weight_digest, tokenizer_digest, template_digest;
  std::string dtype = "bf16";
  double inner_eps = 0;
  // "[2049,2050]": sampling one ends an answer. Empty: nothing is sampled, or the job is
  // older than the column.
  std::string stop_ids;
};

struct JobRecord {
  int64_t key = 0;  // the store's own
  std::string id, name, message;
  JobState state = JobState::kCreating;
  std::string options;  // serialized statetap.v1.JobOptions
  std::string digest;
  int64_t created_ms = 0, started_ms = 0, ended_ms = 0;
  ContentConfig content;
  JobCounts counts;
  TextCounts text;  // of the samples that were not rejected as they came in
  int64_t tokens = 0, generated = 0, bytes = 0;
  Gate gate = Gate::kNone;
};

struct Rejection {
  std::string reason;  // as in statetap.v1.Rejected
  std::optional<int64_t> layer, token;
  std::string message;
};

// A sample as submitted: to do, or rejected already.
struct SampleRow {
  int64_t index = 0;
  std::string id, digest, source, meta_json, split = "train";
  int64_t source_line = 0;
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;  // prefill: one a token
  int32_t prompt_tokens = 0;
  bool truncated = false;
  int32_t max_new_tokens = 0;                // 0: the job's
  std::optional<double> temperature, top_p;  // none: the job's
  std::optional<Rejection> rejection;
  // Of an upload alone.
  int turn = 0;     // which answer of a chat it ends with, from 1; 0: the chat is one sample
  TextCounts text;  // added to the job's
};

// Where a sample lies and what became of it.
struct StoredSample {
  int64_t index = 0;
  int64_t position = 0;  // among the shard's samples
  int64_t row = 0, rows = 0;
  std::string finish;
  bool truncated = false;
  std::optional<double> mean_logprob;
  int64_t supervised = 0, generated = 0;
};

struct ShardRow {
  int64_t seq = 0;   // CommitShard's caller chooses it: NextShard
  std::string path;  // relative to the data folder, or absolute
  int64_t samples = 0, rows = 0, bytes = 0;
  std::string digest;
  bool evicted = false;  // without states
};

struct SampleListing {  // of `samples` and `rejected`
  SampleRow sample;     // without ids and mask
  StoredSample stored;
  int64_t shard = 0;
  bool excluded = false;
};

// A stored sample that a stream sends.
struct IndexedSample {
  int64_t index = 0, shard = 0, position = 0, row = 0, rows = 0;
  bool acknowledged = false;  // by the group that asks
};

class JobStore {
 public:
  struct Options {
    // Recounts the samples in every transaction and refuses one that breaks the equation. Tests.
    bool verify_counts = false;
  };
  // Creates the file where it is missing, brings one of an older version up to this one; jobs whose
  // upload never ended are removed.
  // FAILED_PRECONDITION for a file of a newer version.
  static absl::StatusOr<std::unique_ptr<JobStore>> Open(const std::filesystem::path& file,
                                                        const Options& options);

  // --- An upload: Create, Add…, then Publish or Abandon. Invisible until published.
  absl::StatusOr<int64_t> CreateJob(const ContentConfig& content, Gate gate = Gate::kNone);
  struct Added {
    int64_t added = 0;
    int64_t to_do = 0, tokens = 0;  // of the added ones those that were not rejected
    int64_t duplicates = 0;         // same id and same content: the same sample, counted once
  };
  // Indices are given in order. INVALID_ARGUMENT for an id that is there with other content.
  absl::StatusOr<Added> AddSamples(int64_t key, std::span<const SampleRow> samples);
  struct Published {
    JobRecord job;
    bool existed = false;  // a job of this name, options and content was there; the new one is gone
  };
  // `difference(options)` says what differs where only the options do. An empty name becomes the
  // digest. ALREADY_EXISTS where a job of this name has other content or options: says what
  // differs.
  absl::StatusOr<Published> PublishJob(
      int64_t key, std::string_view name, std::string_view options,
      const std::function<std::string(std::string_view options)>& difference);
  absl::Status AbandonJob(int64_t key);

  // --- Work.
  // Of a queued job; nothing happens to others (one that came to wait a moment ago goes on
  // waiting).
  absl::Status MarkRunning(int64_t key);
  // The job cannot go on: `message` says why and what would help. Nothing happens to a job that has
  // ended, here and in the following.
  absl::Status MarkWaiting(int64_t key, std::string_view message);
  // From WAITING or RUNNING back to QUEUED.
  absl::Status MarkQueued(int64_t key);
  struct RejectedSample {
    int64_t index;
    Rejection rejection;
  };
  // Samples that are not to do any more are left alone.
  absl::Status Reject(int64_t key, std::span<const RejectedSample> samples);
  // Every sample that is still to do.
  absl::Status RejectRest(int64_t key, const Rejection& rejection);
  // CANCELLED, too, where nothing is to do and the gate is not passed.
  absl::Status CancelRest(int64_t key);
  // Of a queued, running or waiting job.
  absl::Status MarkPaused(int64_t key, std::string_view message);
  // The look at the gate found nothing, or alarms that `message` names.
  absl::Status PassGate(int64_t key);
  absl::Status PauseAtGate(int64_t key, std::string_view message);
  // From PAUSED to QUEUED, through a gate that is shut; FAILED_PRECONDITION for a job that is not
  // paused.
  absl::Status Resume(int64_t key);
  struct Retried {
    int64_t retried = 0, kept = 0;  // kept: refused at admission, nothing of them is there
  };
  // Rejected samples are to do again and an ended job is queued. FAILED_PRECONDITION where none can
  // be tried again.
  absl::StatusOr<Retried> Retry(int64_t key);
  // The job, its samples, shards and acknowledgements are gone, and its id is among Doomed() until
  // Forget: its files are still to be removed.
  absl::Status DeleteJob(int64_t key);
  absl::StatusOr<std::vector<std::string>> Doomed() const;
  absl::Status Forget(std::string_view id);
  enum class Exclusion { kExclude, kInclude };
  // Stored samples alone; how many were not so before.
  absl::StatusOr<int64_t> MarkExcluded(int64_t key, std::span<const int64_t> indices,
                                       Exclusion exclusion);
  absl::StatusOr<int64_t> NextShard(int64_t key);
  // All of the samples or none. FAILED_PRECONDITION where one of them is not to do.
  absl::Status CommitShard(int64_t key, const ShardRow& shard,
                           std::span<const StoredSample> samples);
  // The shard of `shard.seq` lies in another file from now on, without its states.
  absl::Status MarkEvicted(int64_t key, const ShardRow& shard);
  absl::Status Acknowledge(int64_t key, std::string_view group, std::span<const int64_t> indices);

  // --- Reading.
  absl::StatusOr<JobRecord> GetJob(std::string_view id_or_name) const;
  absl::StatusOr<JobRecord> GetJob(int64_t key) const;
  absl::StatusOr<std::vector<JobRecord>> ListJobs() const;  // newest first
  // To do with index > `after`, in order.
  absl::StatusOr<std::vector<SampleRow>> ToDo(int64_t key, int64_t after, int64_t limit) const;
  // Those that `filter` holds for, `limit` of them.
  absl::StatusOr<std::vector<SampleListing>> Stored(int64_t key, int64_t after, int64_t limit,
                                                    const SampleFilter& filter = {}) const;
  absl::StatusOr<std::vector<SampleListing>> Rejected(int64_t key, int64_t after,
                                                      int64_t limit) const;
  absl::StatusOr<std::vector<ShardRow>> Shards(int64_t key) const;  // in the order written
  absl::StatusOr<ShardRow> GetShard(int64_t key, int64_t seq) const;
  // Shards with states whose every sample, excluded ones apart, each group that acknowledged
  // anything of the job has acknowledged.
  absl::StatusOr<std::vector<ShardRow>> FullyAcknowledged(int64_t key) const;
  absl::StatusOr<int64_t> ShardBytes() const;  // of all jobs' shards that have states
  // Stored samples behind (shard, row) in stored order that are not excluded and that `filter`
  // holds for, `limit` of them.
  absl::StatusOr<std::vector<IndexedSample>> InStoredOrder(int64_t key, std::string_view group,
                                                           int64_t shard, int64_t row,
                                                           int64_t limit,
                                                           const SampleFilter& filter = {}) const;
  // Stored samples with states, excluded ones apart, that a group has not acknowledged; of every
  // group that has acknowledged one of them. Reads all of the job's samples.
  struct ReaderLag {
    std::string group;
    int64_t samples = 0, rows = 0;
  };
  absl::StatusOr<std::vector<ReaderLag>> ReaderLags(int64_t key) const;
  absl::StatusOr<int64_t> Acknowledgements(int64_t key) const;              // of all groups
  absl::StatusOr<std::map<std::string, int64_t>> RejectedByReason() const;  // of all jobs
  absl::StatusOr<bool> IsAcknowledged(int64_t key, std::string_view group, int64_t index) const;
  absl::StatusOr<IndexedSample> FindStored(int64_t key, std::string_view id) const;
  // The most tokens that a sample to do can reach: its own and `new_tokens(max_new of the sample)`.
  // 0 where nothing is to do.
  absl::StatusOr<int64_t> MostTokens(int64_t key,
                                     const std::function<int64_t(int64_t)>& new_tokens) const;
  // By index: the digest of a sample that is still to do, or nothing.
  absl::StatusOr<std::optional<std::string>> ToDoDigest(int64_t key, int64_t index) const;

 private:
  JobStore(SqlConnection write, SqlConnection read, const Options& options);
  absl::Status Settle(int64_t key);
  absl::Status VerifyCounts(int64_t key);
  absl::StatusOr<std::string> FirstDifference(int64_t key, int64_t other);
  absl::StatusOr<std::string> ContentDigest(int64_t key, std::string_view options);
  absl::Status DeleteRows(int64_t key);
  absl::StatusOr<int64_t> DeleteSomeSamples(int64_t key);
  // Begin, `body`, Settle, commit; rolls back where one of them fails.
  absl::Status Transact(int64_t key, const std::function<absl::Status()>& body);

  const Options options_;
  mutable std::mutex write_mutex_;
  mutable SqlConnection write_;
  mutable std::mutex read_mutex_;
  mutable SqlConnection read_;
};

// INVALID_ARGUMENT: two samples of one job have the same id and are not the same.
absl::Status DifferentContent(std::string_view id, int64_t first_line, int64_t line);

int64_t NowUnixMs();

}  // namespace statetap
