// From finished samples to committed shards: one thread that hands samples to their job's open
// shard, closes it when it is large enough or the job has nothing more to run, and then writes the
// one store transaction that names its samples. Rejections, cancels and endings pass through the
// same thread, so the order of a job's events is the order they were pushed in.
//
// Each shard is filled, and then brought to the disk, by a thread of its own. The next one begins
// meanwhile, and a job whose samples come faster than one file takes them fills several side by
// side, on folders that are idle where there are such: several disks take bytes at once. The store
// numbers shards in the order in which they reach the disk.
//
// A write that fails stops the attempt: its samples are to do again. Where there are other shard
// folders, the one that failed is taken out and the job goes on at once (a full one is not: the
// next shard goes where there is room). A last folder that cannot be written fails a job that has
// stored nothing; otherwise the job waits and is tried again after a while.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/jobs/active_job.h"
#include "server/jobs/sample_assembler.h"
#include "server/jobs/shard_folders.h"

namespace statetap {

class ShardPipeline {
 public:
  // Called on the pipeline's thread.
  struct Listener {
    std::function<void(int64_t bytes)> released;        // of the host buffer
    std::function<void(const ActiveJob& job)> stopped;  // ended, failed or waits
    std::function<bool(int64_t job_key)> retry;         // a waiting job is due again; false: later
    std::function<ActiveJobPtr(int64_t job_key)> current;  // the attempt that runs, or null
    std::function<void()> committed;                       // a shard
  };
  struct Options {
    std::chrono::milliseconds retry_after{30000};
    // Of samples that wait for each of a job's shards, above which it fills another beside them:
    // three samples of 2K tokens of Kimi-K2.5.
    int64_t lag_bytes = int64_t{384} << 20;
    TokenScorer scorer = nullptr;  // of the served model, for a job's gate; null: none
  };
  ShardPipeline(JobStore& store, ShardFolders& folders, Listener listener, Options options);
  ~ShardPipeline();

  // `reserved_bytes` of the host buffer are released once the sample is in its shard or dropped.
  void PushFinished(ActiveJobPtr job, FinishedSample sample, int64_t reserved_bytes);
  void PushRejected(ActiveJobPtr job, int64_t index, Rejection rejection);
  // Of a job with its gate ahead: a crash or a pause may have come between the storing of its first
  // samples and the look at them.
  void LookWhereDue(ActiveJobPtr job);
  // Stops the attempt that runs, commits or drops what it finished, forgets a retry that is due,
  // and runs `then` on the pipeline's thread; its status comes when all that was pushed before is
  // done.
  enum class Finished { kCommit, kDrop };
  std::future<absl::Status> Stop(int64_t key, Finished finished,
                                 std::function<absl::Status()> then);
  // Commits every open shard.
  void CloseAll();
  // Closes every open shard and ends the thread. What is pushed afterwards is dropped.
  void Finish();

 private:
  struct Shard;  // one on its way to the disk
  struct Event {
    ActiveJobPtr job;
    std::function<void()> run;
    std::vector<JobStore::RejectedSample> rejected;
  };
  void Push(Event event);
  void PushResult();  // from a shard's thread: it has one
  void Work();
  void Append(const ActiveJobPtr& job, std::shared_ptr<FinishedSample> sample, int64_t reserved);
  void Reject(const ActiveJobPtr& job, std::span<const JobStore::RejectedSample> samples);
  void StopNow(int64_t key, Finished finished);
  // One of the job's that may be filled; begins one where there is none or all lag behind.
  absl::StatusOr<Shard*> ShardFor(const ActiveJobPtr& job);
  absl::StatusOr<Shard*> Begin(const ActiveJobPtr& job);
  Shard* AnyOf(const ActiveJob& job) const;  // or null
  void BeginCommit(Shard& shard);
  // Waits for the shard's next result, an append's or the commit's, and takes it; after the
  // commit's the shard is gone and the store knows it.
  absl::Status TakeNext(Shard& shard);
  void TakeWhatIsReady();
  // Commits the job's shards and waits for them. The first failure.
  absl::Status Close(const ActiveJobPtr& job);
  // Drops those that are being filled and waits for those that are on their way: they count.
  void Drop(const ActiveJobPtr& job);
  void CountCaptured(ActiveJob& job) const;
  // Only this thread's transactions change them while the attempt runs: the store is asked after
  // each, not for every sample.
  absl::StatusOr<JobCounts> CountsOf(ActiveJob& job) const;
  void CloseAllNow();
  void CloseIfNothingLeft(const ActiveJobPtr& job);
  void LookAtGate(const ActiveJobPtr& job);
  bool PassesGate(const ActiveJobPtr& job);  // else the job has stopped
  absl::StatusOr<std::string> AlarmsOf(int64_t key) const;
  void Fault(const ActiveJobPtr& job, const absl::Status& status);
  // Of a write below `path` that failed: UNAVAILABLE where its folder was taken out and the job can
  // go on in others, else the status as it was.
  absl::Status Elsewhere(const std::filesystem::path& path, const absl::Status& status);
  void RunDueRetries();

  JobStore& store_;
  ShardFolders& folders_;
  const Listener listener_;
  const Options options_;
  std::deque<std::unique_ptr<Shard>> shards_;  // in the order they were begun
  std::map<int64_t, std::chrono::steady_clock::time_point> retries_;
  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<Event> events_;
  bool finish_ = false;
  std::thread thread_;
};

}  // namespace statetap
