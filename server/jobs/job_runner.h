// Runs jobs: takes what is to do from the store, gives it to the engine within the host buffer's
// budget, assembles the samples and hands them to the shard pipeline. Answers to people go before
// jobs. Two threads: the engine's, and the pipeline's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "extractor/engine/engine.h"
#include "server/jobs/answer.h"
#include "server/jobs/sample_assembler.h"
#include "server/jobs/shard_pipeline.h"
#include "server/jobs/work_queue.h"

namespace statetap {

class JobRunner final : private SampleSource, private HiddenStateSink {
 public:
  struct Options {
    // Reserved for a sample before it starts: the most rows it can have, at every boundary. One
    // sample may always run.
    int64_t host_buffer_bytes = int64_t{4} << 30;
    ShardPipeline::Options shards;
    // Of shards with states, open ones included: nothing starts while they take as much. 0: no
    // bound.
    int64_t max_shard_bytes = 0;
    enum class Retain { kAll, kUntilAcknowledged };
    Retain retain = Retain::kAll;  // of states, see Acknowledged
    // Once, on the engine's thread, after engine_status() has become what it stays.
    std::function<void()> engine_failed;
  };
  // Puts the shard folders in order and goes on with every job that has not ended; one whose
  // content depends on another configuration than `model` comes to wait. All references outlive the
  // runner.
  static absl::StatusOr<std::unique_ptr<JobRunner>> Start(JobStore& store, const ServedModel& model,
                                                          Engine& engine, ShardFolders& folders,
                                                          const Options& options);
  ~JobRunner();

  // A job that was published a moment ago.
  absl::Status Submit(const JobRecord& job);
  // Returns when the job's samples are stored or cancelled. FAILED_PRECONDITION where it has ended;
  // UNAVAILABLE, here and in the following, while the server drains.
  absl::Status Cancel(const JobRecord& job);
  // Returns when what is complete is committed. FAILED_PRECONDITION where the job has ended.
  absl::Status Pause(const JobRecord& job);
  absl::Status Resume(const JobRecord& job);
  absl::StatusOr<JobStore::Retried> Retry(const JobRecord& job);
  // The job is gone from the store and its shards from the disk.
  absl::Status Delete(const JobRecord& job);
  // Of a job that has ended or is paused: its shards keep all but the states. FAILED_PRECONDITION
  // for others, and for every call on a job while this works on it.
  absl::Status Evict(const JobRecord& job);
  // Readers have acknowledged samples of the job. Where states are kept until then, shards that all
  // groups are done with lose theirs.
  void Acknowledged(int64_t key);
  // UNAVAILABLE while draining or where the engine has failed. The answer's reader must have gone
  // before the runner does.
  absl::StatusOr<std::shared_ptr<Answer>> Ask(SampleTask task);

  struct Live {
    int64_t running = 0, captured = 0, captured_rows = 0;
    bool disk_is_full = false;  // max_shard_bytes is reached
    double tokens_per_second = 0;
  };
  Live LiveOf(int64_t key) const;
  absl::Status engine_status() const;  // not OK: it has failed
  int64_t buffered_bytes() const { return buffered_; }
  // Of jobs and answers together.
  struct Load {
    int64_t running_samples, running_answers, waiting_answers;  // now
    // Since the server started: tokens of prompts and given texts that were read, and tokens
    // written. What runs again counts again.
    int64_t prompt_tokens, answer_tokens;
  };
  Load load() const;

  // Starts nothing more; waits until `deadline` for what runs, gives up the rest (it runs again
  // next time), closes the shards. False: the engine is in a step that did not end a moment after
  // that. What comes of it is dropped; the destructor waits for it, the end of the process does
  // not. Idempotent.
  bool Drain(std::chrono::steady_clock::time_point deadline);

 private:
  struct Running {
    ActiveJobPtr job;  // or
    std::shared_ptr<Answer> answer;
    std::optional<SampleAssembler> assembler;
    int64_t reserved = 0;
    int64_t prompt_tokens = 0;  // that are not in the count of those read yet
  };
  JobRunner(JobStore& store, const ServedModel& model, Engine& engine, ShardFolders& folders,
            const Options& options);
  absl::Status Activate(const JobRecord& record);
  absl::Status StopThen(int64_t key, ShardPipeline::Finished finished,
                        std::function<absl::Status()> then);
  void RunEngine();
  void StopJob(const ActiveJob& job);
  void Release(int64_t bytes);
  void Wake();
  // Empty, or why the job cannot go on with this model and these limits.
  absl::StatusOr<std::string> Obstacle(const JobRecord& record, const JobPlan& plan) const;
  ShardConfig ShardConfigOf(const JobRecord& record, const JobPlan& plan) const;
  int64_t MostRows(const ActiveJob& job, const SampleRow& sample) const;
  int64_t Reservation(const ActiveJob& job, const SampleRow& sample) const;
  std::optional<SampleTask> NextAnswer();
  absl::Status EvictShards(const JobRecord& job,
                           const std::function<absl::StatusOr<std::vector<ShardRow>>()>& shards);
  void CountShardBytes();
  bool DiskIsFull();                         // engine's thread
  ActiveJobPtr ActiveOf(int64_t key) const;  // null where no attempt is under way
  void End(uint64_t ticket, Running& running);
  void CountPrompt(Running& running);
  Running* Find(uint64_t ticket);

  std::optional<SampleTask> Next() override;
  std::vector<uint64_t> TakeCancelled() override;
  bool Wait() override;
  bool Stopping() override;
  void OnStates(uint64_t ticket, int boundary, int64_t first_row,
                std::span<const uint16_t> states) override;
  void OnToken(uint64_t ticket, int32_t id, TokenScore score) override;
  void OnScores(uint64_t ticket, int64_t first, std::span<const TokenScore> scores) override;
  void OnFinished(uint64_t ticket, FinishReason reason) override;
  void OnFailed(uint64_t ticket, const Failure& failure) override;

  JobStore& store_;
  const ServedModel& model_;
  Engine& engine_;
  ShardFolders& folders_;
  const Options options_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t version_ = 0;  // counts changes that Wait waits for
  std::map<int64_t, ActiveJobPtr> jobs_;
  std::set<int64_t> evicting_;
  std::set<int64_t> acknowledged_;               // since their shards were last looked at
  std::deque<std::shared_ptr<Answer>> answers_;  // not yet started
  absl::Status engine_status_;
  bool draining_ = false, idle_ = false;

  std::atomic<bool> stopping_{false}, cancels_{false}, disk_is_full_{false};
  std::atomic<int64_t> shard_bytes_{0};  // committed
  std::atomic<int64_t> buffered_{0}, running_samples_{0}, running_answers_{0};
  std::atomic<int64_t> prompt_tokens_{0}, answer_tokens_{0};

  // The engine's thread only.
  std::unordered_map<uint64_t, Running> running_;
  uint64_t last_ticket_ = 0, seen_version_ = 0;

  std::optional<WorkQueue> queue_;
  std::optional<ShardPipeline> pipeline_;
  std::thread engine_thread_;
};

}  // namespace statetap
