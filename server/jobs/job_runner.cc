#include "server/jobs/job_runner.h"

#include <algorithm>
#include <utility>

#include "extractor/base/digest.h"
#include "extractor/base/log.h"
#include "server/jobs/eviction.h"
#include "server/jobs/recovery.h"

namespace statetap {
namespace {

// A step that has not ended so long after a drain is left behind.
constexpr std::chrono::seconds kStepEnds{2};

constexpr std::string_view kEvicting =
    "the job's states are being evicted; try again when that is done";

absl::Status CheckNotEnded(const JobRecord& job, std::string_view action) {
  if (!HasEnded(job.state)) return absl::OkStatus();
  return absl::FailedPreconditionError(fmt::format("job {} has ended ({}): there is nothing to {}",
                                                   job.id, NameOf(job.state), action));
}

}  // namespace

absl::StatusOr<std::unique_ptr<JobRunner>> JobRunner::Start(JobStore& store,
                                                            const ServedModel& model,
                                                            Engine& engine, ShardFolders& folders,
                                                            const Options& options) {
  STATETAP_RETURN_IF_ERROR(TakeOutLostFolders(store, folders));
  STATETAP_RETURN_IF_ERROR(RecoverShards(store, folders));
  std::unique_ptr<JobRunner> runner(new JobRunner(store, model, engine, folders, options));
  runner->CountShardBytes();
  STATETAP_ASSIGN_OR_RETURN(std::vector<JobRecord> jobs, store.ListJobs());
  std::reverse(jobs.begin(), jobs.end());  // oldest first
  for (const JobRecord& job : jobs) {
    if (HasEnded(job.state) || job.state == JobState::kPaused) continue;
    STATETAP_RETURN_IF_ERROR(store.MarkQueued(job.key));
    STATETAP_RETURN_IF_ERROR(runner->Activate(job));
  }
  runner->engine_thread_ = std::thread([raw = runner.get()] { raw->RunEngine(); });
  return runner;
}

JobRunner::JobRunner(JobStore& store, const ServedModel& model, Engine& engine,
                     ShardFolders& folders, const Options& options)
    : store_(store), model_(model), engine_(engine), folders_(folders), options_(options) {
  queue_.emplace(store, [this] { Wake(); });
  ShardPipeline::Listener listener;
  listener.released = [this](int64_t bytes) { Release(bytes); };
  listener.stopped = [this](const ActiveJob& job) { StopJob(job); };
  listener.retry = [this](int64_t key) {
    // The state may still say running: on a full disk the waiting could not be noted either.
    const absl::StatusOr<JobRecord> record = store_.GetJob(key);
    if (absl::IsNotFound(record.status()) || (record.ok() && HasEnded(record->state))) return true;
    if (ActiveOf(key) != nullptr) return true;
    absl::Status status = record.status();
    if (status.ok()) status = store_.MarkQueued(key);
    if (status.ok()) status = Activate(*record);
    if (!status.ok()) LogError("job {}: cannot try again yet: {}", key, MessageOf(status));
    return status.ok();
  };
  listener.committed = [this] { CountShardBytes(); };
  listener.current = [this](int64_t key) { return ActiveOf(key); };
  ShardPipeline::Options shards = options.shards;
  shards.scorer = model.scorer;
  pipeline_.emplace(store, folders, std::move(listener), shards);
}

JobRunner::~JobRunner() {
  Drain(std::chrono::steady_clock::now());
  if (engine_thread_.joinable()) engine_thread_.join();
}

ShardConfig JobRunner::ShardConfigOf(const JobRecord& record, const JobPlan& plan) const {
  ShardConfig config;
  config.job = record.id;
  config.model_name = model_.name;
  config.model_digest = model_.digest;
  config.quantization = std::string(model_.quantization());
  config.hidden = model_.config.hidden;
  config.layers = model_.config.num_layers;
  config.boundaries = plan.boundaries;
  config.dtype = DtypeOf(plan);
  config.rms_norm_eps = model_.config.rms_norm_eps;
  config.inner_eps = model_.inner_eps;
  config.rope_json = model_.RopeJson();
  config.tokenizer_digest = model_.tokenizer->digest();
  config.template_name = std::string(NameOf(plan.text.render.kind));
  config.template_digest = TemplateDigest(plan.text.render.kind);
  config.thinking = plan.text.render.thinking;
  config.first_special = model_.tokenizer->first_special();
  config.think_token = model_.tokenizer->SpecialId("<think>").value_or(-1);
  config.think_end_token = model_.tokenizer->SpecialId("</think>").value_or(-1);
  config.options_json = OptionsJson(plan.options);
  config.producer = std::string(kProducer);
  return config;
}

absl::StatusOr<std::string> JobRunner::Obstacle(const JobRecord& record,
                                                const JobPlan& plan) const {
  std::string conflict = ContentConflict(record.content, ContentOf(plan, model_));
  const int64_t max_length = plan.options.max_length();
  if (!conflict.empty() || max_length <= model_.max_seq_len) return conflict;
  STATETAP_ASSIGN_OR_RETURN(const int64_t most,
                            store_.MostTokens(record.key, [&](int64_t max_new) -> int64_t {
                              if (!plan.text.generate) return 0;
                              if (max_new == 0) max_new = plan.options.max_new_tokens();
                              return max_new > 0 ? max_new : max_length;
                            }));
  if (std::min(most, max_length) <= model_.max_seq_len) return "";
  return fmt::format(
      "max_length is {} and a sample may reach {} tokens, this server's --max-seq-len is {}: start "
      "it with --max-seq-len {} to go on, or submit the rest as a new job",
      max_length, std::min(most, max_length), model_.max_seq_len, max_length);
}

absl::Status JobRunner::Activate(const JobRecord& record) {
  const absl::StatusOr<JobPlan> plan = PlanOfStored(record.options, model_);
  if (!plan.ok()) return store_.MarkWaiting(record.key, MessageOf(plan.status()));
  STATETAP_ASSIGN_OR_RETURN(const std::string obstacle, Obstacle(record, *plan));
  if (!obstacle.empty()) {
    LogWarning("{} waits: {}", record.id, obstacle);
    return store_.MarkWaiting(record.key, obstacle);
  }
  auto job =
      std::make_shared<ActiveJob>(record.key, record.id, *plan, ShardConfigOf(record, *plan));
  if (record.gate == Gate::kAhead) {
    job->gate_ahead = plan->options.gate() > 0;
    if (!job->gate_ahead) STATETAP_RETURN_IF_ERROR(store_.PassGate(record.key));
  }
  {
    const std::lock_guard lock(mutex_);
    jobs_[record.key] = job;
  }
  if (job->gate_ahead) pipeline_->LookWhereDue(job);
  queue_->Add(std::move(job));
  return absl::OkStatus();
}

absl::Status JobRunner::Submit(const JobRecord& job) {
  if (HasEnded(job.state)) return absl::OkStatus();  // every sample was rejected at once
  return Activate(job);
}

absl::Status JobRunner::StopThen(int64_t key, ShardPipeline::Finished finished,
                                 std::function<absl::Status()> then) {
  std::future<absl::Status> done;
  {
    const std::lock_guard lock(mutex_);
    if (draining_) return absl::UnavailableError("the server is shutting down; try again later");
    if (evicting_.contains(key)) return absl::FailedPreconditionError(std::string(kEvicting));
    done = pipeline_->Stop(key, finished, std::move(then));
  }
  return done.get();
}

absl::Status JobRunner::Cancel(const JobRecord& job) {
  STATETAP_RETURN_IF_ERROR(CheckNotEnded(job, "cancel"));
  return StopThen(job.key, ShardPipeline::Finished::kCommit,
                  [&] { return store_.CancelRest(job.key); });
}

absl::Status JobRunner::Pause(const JobRecord& job) {
  STATETAP_RETURN_IF_ERROR(CheckNotEnded(job, "pause"));
  return StopThen(job.key, ShardPipeline::Finished::kCommit,
                  [&] { return store_.MarkPaused(job.key, "paused; `statetap resume` goes on"); });
}

absl::Status JobRunner::Resume(const JobRecord& job) {
  return StopThen(job.key, ShardPipeline::Finished::kCommit, [&]() -> absl::Status {
    STATETAP_RETURN_IF_ERROR(store_.Resume(job.key));
    STATETAP_ASSIGN_OR_RETURN(const JobRecord now, store_.GetJob(job.key));
    // All was stored and only the gate was shut.
    return HasEnded(now.state) ? absl::OkStatus() : Activate(now);
  });
}

// A running job reads what is to do in order and is past the rejected ones: it begins again. So
// does one that was stopped here for nothing.
absl::StatusOr<JobStore::Retried> JobRunner::Retry(const JobRecord& job) {
  JobStore::Retried retried;
  const auto retry = [&]() -> absl::Status {
    const absl::StatusOr<JobStore::Retried> result = store_.Retry(job.key);
    if (result.ok()) retried = *result;
    STATETAP_ASSIGN_OR_RETURN(const JobRecord now, store_.GetJob(job.key));
    if (!HasEnded(now.state) && now.state != JobState::kPaused) {
      STATETAP_RETURN_IF_ERROR(store_.MarkQueued(job.key));
      STATETAP_RETURN_IF_ERROR(Activate(now));
    }
    return result.status();
  };
  STATETAP_RETURN_IF_ERROR(StopThen(job.key, ShardPipeline::Finished::kCommit, retry));
  return retried;
}

absl::Status JobRunner::Evict(const JobRecord& job) {
  if (!HasEnded(job.state) && job.state != JobState::kPaused) {
    return absl::FailedPreconditionError(fmt::format(
        "job {} is {}: evict takes jobs that have ended or are paused", job.id, NameOf(job.state)));
  }
  return EvictShards(job, [&] { return store_.Shards(job.key); });
}

absl::Status JobRunner::EvictShards(
    const JobRecord& job, const std::function<absl::StatusOr<std::vector<ShardRow>>()>& shards) {
  {
    const std::lock_guard lock(mutex_);
    if (draining_) return absl::UnavailableError("the server is shutting down; try again later");
    if (!evicting_.insert(job.key).second)
      return absl::FailedPreconditionError(std::string(kEvicting));
  }
  const auto evict = [&]() -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> these, shards());
    return EvictStates(store_, folders_, job, these).status();
  };
  const absl::Status status = evict();
  {
    const std::lock_guard lock(mutex_);
    evicting_.erase(job.key);
  }
  CountShardBytes();
  return status;
}

void JobRunner::Acknowledged(int64_t key) {
  if (options_.retain == Options::Retain::kAll) return;
  const auto acknowledged = [&](auto change) {
    const std::lock_guard lock(mutex_);
    return change(acknowledged_);
  };
  acknowledged([&](auto& jobs) { return jobs.insert(key).second; });
  const absl::StatusOr<JobRecord> job = store_.GetJob(key);
  absl::Status status = job.status();
  // Who comes while another's acknowledgement is worked on is refused, and that one looks again.
  while (status.ok() && acknowledged([&](auto& jobs) { return jobs.contains(key); })) {
    status = EvictShards(*job, [&] {
      acknowledged([&](auto& jobs) { return jobs.erase(key); });
      return store_.FullyAcknowledged(key);
    });
  }
  if (!status.ok() && !absl::IsFailedPrecondition(status))
    LogWarning("job {}: acknowledged states are kept for now: {}", key, MessageOf(status));
}

void JobRunner::CountShardBytes() {
  if (const absl::StatusOr<int64_t> bytes = store_.ShardBytes(); bytes.ok()) shard_bytes_ = *bytes;
  Wake();
}

absl::Status JobRunner::Delete(const JobRecord& job) {
  return StopThen(job.key, ShardPipeline::Finished::kDrop, [&]() -> absl::Status {
    STATETAP_RETURN_IF_ERROR(store_.DeleteJob(job.key));
    CountShardBytes();
    return RemoveShards(store_, folders_, job.id);
  });
}

absl::StatusOr<std::shared_ptr<Answer>> JobRunner::Ask(SampleTask task) {
  auto answer = std::make_shared<Answer>(std::move(task), [this] { cancels_ = true; });
  {
    const std::lock_guard lock(mutex_);
    if (!engine_status_.ok()) return engine_status_;
    if (draining_) return absl::UnavailableError("the server is shutting down; try again later");
    answers_.push_back(answer);
  }
  Wake();
  return answer;
}

ActiveJobPtr JobRunner::ActiveOf(int64_t key) const {
  const std::lock_guard lock(mutex_);
  const auto found = jobs_.find(key);
  return found == jobs_.end() ? nullptr : found->second;
}

JobRunner::Live JobRunner::LiveOf(int64_t key) const {
  const ActiveJobPtr job = ActiveOf(key);
  if (job == nullptr) return {};
  return {job->running, job->captured, job->captured_rows, disk_is_full_, job->rate.PerSecond()};
}

JobRunner::Load JobRunner::load() const {
  const std::lock_guard lock(mutex_);
  return {running_samples_, running_answers_, static_cast<int64_t>(answers_.size()), prompt_tokens_,
          answer_tokens_};
}

absl::Status JobRunner::engine_status() const {
  const std::lock_guard lock(mutex_);
  return engine_status_;
}

void JobRunner::RunEngine() {
  const absl::Status status = engine_.Run(*this, *this);
  for (auto& [ticket, running] : running_) {
    if (running.job != nullptr) --running.job->running;
    if (running.answer != nullptr)
      running.answer->End(absl::UnavailableError("the engine has stopped; try again later"));
  }
  running_.clear();
  std::deque<std::shared_ptr<Answer>> answers;
  std::vector<ActiveJobPtr> jobs;
  {
    const std::lock_guard lock(mutex_);
    idle_ = true;
    if (!status.ok()) {
      engine_status_ = absl::UnavailableError(
          fmt::format("the engine has failed: {}; restart the server, jobs go on where they were",
                      MessageOf(status)));
      for (const auto& [key, job] : jobs_) jobs.push_back(job);
    }
    answers.swap(answers_);
  }
  changed_.notify_all();
  for (const auto& answer : answers)
    answer->End(absl::UnavailableError("the engine has stopped; try again later"));
  for (const ActiveJobPtr& job : jobs)
    store_.MarkWaiting(job->key, MessageOf(engine_status())).IgnoreError();
  if (status.ok()) return;
  LogError("the engine has failed: {}", MessageOf(status));
  if (options_.engine_failed) options_.engine_failed();
}

void JobRunner::StopJob(const ActiveJob& job) {
  queue_->Remove(job);
  {
    const std::lock_guard lock(mutex_);
    const auto found = jobs_.find(job.key);
    if (found != jobs_.end() && found->second.get() == &job) jobs_.erase(found);
  }
  cancels_ = true;
  Wake();
}

void JobRunner::Release(int64_t bytes) {
  buffered_ -= bytes;
  Wake();
}

void JobRunner::Wake() {
  {
    const std::lock_guard lock(mutex_);
    ++version_;
  }
  changed_.notify_all();
}

bool JobRunner::Drain(std::chrono::steady_clock::time_point deadline) {
  {
    std::unique_lock lock(mutex_);
    draining_ = true;
    ++version_;
    changed_.notify_all();
    changed_.wait_until(lock, deadline, [&] { return idle_ || stopping_; });
  }
  stopping_ = true;  // the engine gives up what runs, behind its step
  Wake();
  bool ended = !engine_thread_.joinable();
  if (!ended) {
    std::unique_lock lock(mutex_);
    ended = changed_.wait_for(lock, kStepEnds, [&] { return idle_; });
    lock.unlock();
    if (ended) engine_thread_.join();
  }
  pipeline_->Finish();
  return ended;
}

}  // namespace statetap
