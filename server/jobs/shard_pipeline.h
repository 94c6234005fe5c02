// From finished samples to committed shards: one thread that appends samples to their job's open
// shard, closes it when it is large enough or the job has nothing more to run, and then writes the
// one store transaction that names its samples. Rejections, cancels and endings pass through the
// same thread, so the order of a job's events is the order they were pushed in.
//
// A full shard reaches the disk on a thread of its own while the next one is filled, on another
// folder where one is idle: several disks take bytes at once. At most one shard a folder is on its
// way; the store hears of them in the order they were filled.
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
  };
  ShardPipeline(JobStore& store, ShardFolders& folders, Listener listener, Options options);
  ~ShardPipeline();

  // `reserved_bytes` of the host buffer are released once the sample is in its shard or dropped.
  void PushFinished(ActiveJobPtr job, FinishedSample sample, int64_t reserved_bytes);
  void PushRejected(ActiveJobPtr job, int64_t index, Rejection rejection);
  // Stops the attempt that runs, commits or drops what it finished, forgets a retry that is due,
  // and runs `then` on the pipeline's thread; its status comes when all that was pushed before is
  // done.
  enum class Finished { kCommit, kDrop };
  std::future<absl::Status> Stop(int64_t key, Finished finished,
                                 std::function<absl::Status()> then);
  // Commits every open shard.
  void CloseAll();
  // Closes every open shard and ends the thread. Pushing afterwards is not allowed.
  void Finish();

 private:
  struct OpenShard {
    ActiveJobPtr job;
    int64_t seq = 0;
    std::filesystem::path path;
    std::unique_ptr<ShardWriter> writer;
    std::vector<StoredSample> samples;
    int64_t rows = 0;
  };
  struct Commit {
    OpenShard shard;
    std::future<absl::StatusOr<ShardSummary>> written;
    std::thread thread;
  };
  struct Event {
    ActiveJobPtr job;
    std::function<void()> run;
    std::vector<JobStore::RejectedSample> rejected;
  };
  void Push(Event event);
  void Work();
  void Append(const ActiveJobPtr& job, const FinishedSample& sample);
  void Reject(const ActiveJobPtr& job, std::span<const JobStore::RejectedSample> samples);
  void StopNow(int64_t key, Finished finished);
  absl::StatusOr<OpenShard*> OpenShardOf(const ActiveJobPtr& job);
  // The open shard, where there is one, goes its way. A failure is that of an earlier one.
  absl::Status BeginCommit(const ActiveJobPtr& job);
  // Waits for the oldest and tells the store.
  absl::Status NoteOldest();
  void NoteOldestOrFault();
  // Until nothing of the job is on its way. The first failure.
  absl::Status Settle(const ActiveJobPtr& job);
  absl::Status Close(const ActiveJobPtr& job);   // both
  int64_t InShards(const ActiveJob& job) const;  // samples that the store does not know yet
  void CountCaptured(ActiveJob& job) const;
  void CloseAllNow();
  void CloseIfNothingLeft(const ActiveJobPtr& job);
  void LookAtGate(const ActiveJobPtr& job);
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
  std::map<int64_t, OpenShard> open_;  // by job key
  std::deque<Commit> commits_;         // oldest first
  std::map<int64_t, std::chrono::steady_clock::time_point> retries_;
  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<Event> events_;
  bool finish_ = false;
  std::thread thread_;
};

}  // namespace statetap
