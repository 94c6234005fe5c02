#include "server/jobs/shard_pipeline.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "extractor/base/log.h"
#include "extractor/shard/joined_statistics.h"
#include "extractor/shard/tables.h"

namespace statetap {
namespace {

// Waiting does not mend these; a person must.
bool IsPermanent(const absl::Status& status) {
  return absl::IsPermissionDenied(status) || absl::IsNotFound(status) ||
         absl::IsAlreadyExists(status) || absl::IsFailedPrecondition(status);
}

constexpr size_t kMostSideBySide = 4;  // of a job

// A thread that runs what it is given, in order.
class SerialThread {
 public:
  SerialThread() : thread_([this] { Work(); }) {}
  ~SerialThread() {
    {
      const std::lock_guard lock(mutex_);
      end_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  // `done` is called once the future is ready.
  template <typename Task>
  auto Run(Task task, std::function<void()> done) {
    auto run = std::make_shared<std::packaged_task<std::invoke_result_t<Task>()>>(std::move(task));
    auto result = run->get_future();
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back([run, done = std::move(done)] {
        (*run)();
        done();
      });
    }
    changed_.notify_all();
    return result;
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return end_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool end_ = false;
  std::thread thread_;
};

template <typename T>
bool IsReady(const std::future<T>& future) {
  return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace

struct ShardPipeline::Shard {
  struct PendingAppend {
    std::shared_ptr<FinishedSample> sample;
    int64_t reserved;  // bytes of the host buffer: of the longest that it could have become
    int64_t bytes;     // of its states
    std::future<absl::Status> appended;
  };

  bool filling() const { return !written.valid(); }
  bool HasResult() const {
    return appends.empty() ? written.valid() && IsReady(written)
                           : IsReady(appends.front().appended);
  }

  ActiveJobPtr job;
  int64_t number = 0;  // of its file
  std::filesystem::path path;
  std::vector<StoredSample> samples;  // that are in it
  int64_t rows = 0;
  int64_t given_rows = 0;  // with those of the pending ones
  std::deque<PendingAppend> appends;
  int64_t waiting = 0;                                // bytes of their states
  std::future<absl::StatusOr<ShardSummary>> written;  // once its commit has begun
  std::unique_ptr<ShardWriter> writer;                // the thread's
  SerialThread thread;
};

ShardPipeline::ShardPipeline(JobStore& store, ShardFolders& folders, Listener listener,
                             Options options)
    : store_(store),
      folders_(folders),
      listener_(std::move(listener)),
      options_(options),
      thread_([this] { Work(); }) {}

ShardPipeline::~ShardPipeline() { Finish(); }

void ShardPipeline::Finish() {
  {
    const std::lock_guard lock(mutex_);
    finish_ = true;
  }
  pushed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ShardPipeline::Push(Event event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  pushed_.notify_all();
}

void ShardPipeline::PushResult() {
  Push({nullptr, [this] { TakeWhatIsReady(); }, {}});
}

void ShardPipeline::PushFinished(ActiveJobPtr job, FinishedSample sample, int64_t reserved_bytes) {
  auto shared = std::make_shared<FinishedSample>(std::move(sample));
  Push({job, [this, job, shared, reserved_bytes] { Append(job, shared, reserved_bytes); }, {}});
}

void ShardPipeline::PushRejected(ActiveJobPtr job, int64_t index, Rejection rejection) {
  Push({std::move(job), nullptr, {{index, std::move(rejection)}}});
}

void ShardPipeline::LookWhereDue(ActiveJobPtr job) {
  Push({nullptr,
        [this, job = std::move(job)] {
          LookAtGate(job);
          CloseIfNothingLeft(job);
        },
        {}});
}

std::future<absl::Status> ShardPipeline::Stop(int64_t key, Finished finished,
                                              std::function<absl::Status()> then) {
  auto promise = std::make_shared<std::promise<absl::Status>>();
  Push({nullptr,
        [this, key, finished, promise, then = std::move(then)] {
          StopNow(key, finished);
          promise->set_value(then());
        },
        {}});
  return promise->get_future();
}

void ShardPipeline::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto awake = [&] { return finish_ || !events_.empty(); };
    if (retries_.empty()) {
      pushed_.wait(lock, awake);
    } else {
      const auto by_time = [](const auto& a, const auto& b) { return a.second < b.second; };
      const auto due = std::min_element(retries_.begin(), retries_.end(), by_time)->second;
      pushed_.wait_until(lock, due, awake);
    }
    std::deque<Event> events = std::exchange(events_, {});
    if (events.empty() && finish_) break;
    lock.unlock();
    for (size_t i = 0; i < events.size(); ++i) {
      if (events[i].run) {
        events[i].run();
        continue;
      }
      // A run of rejections is one transaction.
      while (i + 1 < events.size() && !events[i + 1].run && events[i + 1].job == events[i].job) {
        auto& next = events[i + 1].rejected;
        next.insert(next.begin(), events[i].rejected.begin(), events[i].rejected.end());
        ++i;
      }
      Reject(events[i].job, events[i].rejected);
    }
    events.clear();
    RunDueRetries();
    lock.lock();
  }
  lock.unlock();
  CloseAllNow();
}

void ShardPipeline::CloseAll() {
  Push({nullptr, [this] { CloseAllNow(); }, {}});
}

void ShardPipeline::CloseAllNow() {
  while (!shards_.empty()) {
    const ActiveJobPtr job = shards_.front()->job;
    if (const absl::Status status = Close(job); !status.ok()) Fault(job, status);
  }
}

absl::StatusOr<ShardPipeline::Shard*> ShardPipeline::Begin(const ActiveJobPtr& job) {
  auto shard = std::make_unique<Shard>();
  shard->job = job;
  STATETAP_ASSIGN_OR_RETURN(shard->number, store_.NextShard(job->key));
  std::vector<std::filesystem::path> busy;
  for (const auto& other : shards_) {
    busy.push_back(other->path);
    if (other->job->key == job->key) shard->number = std::max(shard->number, other->number + 1);
  }
  STATETAP_ASSIGN_OR_RETURN(
      shard->path, folders_.PathFor(job->id, shard->number,
                                    static_cast<int64_t>(job->plan.options.shard_bytes()), busy));
  auto writer = ShardWriter::Create(shard->path, job->shard_config, {});
  if (!writer.ok()) return Elsewhere(shard->path, writer.status());
  shard->writer = *std::move(writer);
  return shards_.emplace_back(std::move(shard)).get();
}

absl::StatusOr<ShardPipeline::Shard*> ShardPipeline::ShardFor(const ActiveJobPtr& job) {
  Shard* idlest = nullptr;
  size_t filling = 0;
  for (const auto& shard : shards_) {
    if (shard->job != job || !shard->filling()) continue;
    ++filling;
    if (idlest == nullptr || shard->waiting < idlest->waiting) idlest = shard.get();
  }
  if (idlest == nullptr || (idlest->waiting > options_.lag_bytes && filling < kMostSideBySide))
    return Begin(job);
  return idlest;
}

void ShardPipeline::Append(const ActiveJobPtr& job, std::shared_ptr<FinishedSample> sample,
                           int64_t reserved) {
  if (job->stopped) return listener_.released(reserved);
  const absl::StatusOr<Shard*> found = ShardFor(job);
  if (!found.ok()) {
    listener_.released(reserved);
    return Fault(job, found.status());
  }
  Shard& shard = **found;
  const auto append = [job = job.get(), sample, writer = shard.writer.get()]() -> absl::Status {
    if (job->stopped) return absl::CancelledError("the attempt was stopped");
    const std::vector<std::span<const uint16_t>> states(sample->states.begin(),
                                                        sample->states.end());
    const absl::Status status = writer->Append(sample->record, states);
    sample->states = {};
    return status;
  };
  const auto rows = std::ssize(sample->record.input_ids);
  const int64_t bytes = rows * StatesRowBytes(job->shard_config);
  shard.given_rows += rows;
  shard.waiting += bytes;
  shard.appends.push_back(
      {sample, reserved, bytes, shard.thread.Run(append, [this] { PushResult(); })});
  CountCaptured(*job);
  if (shard.given_rows * StatesRowBytes(job->shard_config) >=
      static_cast<int64_t>(job->plan.options.shard_bytes()))
    BeginCommit(shard);
  LookAtGate(job);
}

void ShardPipeline::BeginCommit(Shard& shard) {
  if (!shard.filling()) return;
  shard.written = shard.thread.Run([writer = shard.writer.get()] { return writer->Commit(); },
                                   [this] { PushResult(); });
}

absl::Status ShardPipeline::TakeNext(Shard& shard) {
  const ActiveJobPtr job = shard.job;
  if (!shard.appends.empty()) {
    Shard::PendingAppend next = std::move(shard.appends.front());
    shard.appends.pop_front();
    const absl::Status status = next.appended.get();
    shard.waiting -= next.bytes;
    listener_.released(next.reserved);
    if (absl::IsCancelled(status)) return absl::OkStatus();
    if (!status.ok()) return Elsewhere(shard.path, status);
    StoredSample facts = StoredFacts(next.sample->record);
    facts.position = std::ssize(shard.samples);
    facts.row = shard.rows;
    shard.rows += facts.rows;
    shard.samples.push_back(std::move(facts));
    return absl::OkStatus();
  }
  const absl::StatusOr<ShardSummary> written = shard.written.get();
  const auto self =
      std::ranges::find_if(shards_, [&](const auto& each) { return each.get() == &shard; });
  const std::unique_ptr<Shard> done = std::move(*self);
  shards_.erase(self);
  CountCaptured(*job);
  if (!written.ok()) return Elsewhere(done->path, written.status());
  const ShardSummary& summary = *written;
  folders_.Written(summary.path);
  const auto note = [&]() -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const int64_t next, store_.NextShard(job->key));
    return store_.CommitShard(job->key,
                              {std::max(next, done->number), folders_.ToStored(summary.path),
                               summary.samples, summary.rows, summary.bytes, summary.digest},
                              done->samples);
  };
  const absl::Status status = note();
  job->counts.reset();
  if (status.ok()) {
    LogInfo("{}: {} holds {} samples, {} rows, {} bytes", job->id, summary.path.string(),
            summary.samples, summary.rows, summary.bytes);
    listener_.committed();
    return status;
  }
  // A shard that the store does not name would stand in the way of the next one.
  std::error_code ignored;
  std::filesystem::remove(summary.path, ignored);
  return status;
}

void ShardPipeline::TakeWhatIsReady() {
  while (true) {
    const auto ready =
        std::ranges::find_if(shards_, [](const auto& shard) { return shard->HasResult(); });
    if (ready == shards_.end()) return;
    const ActiveJobPtr job = (*ready)->job;
    if (const absl::Status status = TakeNext(**ready); !status.ok()) {
      Fault(job, status);
    } else {
      CloseIfNothingLeft(job);
    }
  }
}

ShardPipeline::Shard* ShardPipeline::AnyOf(const ActiveJob& job) const {
  const auto found =
      std::ranges::find_if(shards_, [&](const auto& shard) { return shard->job.get() == &job; });
  return found == shards_.end() ? nullptr : found->get();
}

absl::Status ShardPipeline::Close(const ActiveJobPtr& job) {
  for (const auto& shard : shards_) {
    if (shard->job == job) BeginCommit(*shard);
  }
  absl::Status first;
  while (Shard* const shard = AnyOf(*job)) first.Update(TakeNext(*shard));
  return first;
}

void ShardPipeline::Drop(const ActiveJobPtr& job) {
  for (const auto& shard : shards_) {
    if (shard->job != job || !shard->filling()) continue;
    while (!shard->appends.empty()) {
      shard->appends.front().appended.wait();
      listener_.released(shard->appends.front().reserved);
      shard->appends.pop_front();
    }
  }
  std::erase_if(shards_, [&](const auto& shard) { return shard->job == job && shard->filling(); });
  if (const absl::Status status = Close(job); !status.ok())
    LogError("{}: {}", job->id, MessageOf(status));
}

void ShardPipeline::CountCaptured(ActiveJob& job) const {
  int64_t samples = 0, rows = 0;
  for (const auto& shard : shards_) {
    if (shard->job.get() != &job) continue;
    samples += std::ssize(shard->samples) + std::ssize(shard->appends);
    rows += shard->given_rows;
  }
  job.captured = samples;
  job.captured_rows = rows;
}

void ShardPipeline::Reject(const ActiveJobPtr& job,
                           std::span<const JobStore::RejectedSample> samples) {
  if (job->stopped) return;
  job->counts.reset();
  if (const absl::Status status = store_.Reject(job->key, samples); !status.ok())
    return Fault(job, status);
  CloseIfNothingLeft(job);
}

absl::StatusOr<JobCounts> ShardPipeline::CountsOf(ActiveJob& job) const {
  if (!job.counts) {
    STATETAP_ASSIGN_OR_RETURN(const JobRecord record, store_.GetJob(job.key));
    job.counts = record.counts;
  }
  return *job.counts;
}

// What is to do lies in shards: nothing else runs, so they are closed, which ends the job, or lets
// its gate be looked at, however few samples there are.
void ShardPipeline::CloseIfNothingLeft(const ActiveJobPtr& job) {
  if (job->stopped) return;
  const absl::StatusOr<JobCounts> counts = CountsOf(*job);
  if (!counts.ok()) return Fault(job, counts.status());
  if (counts->to_do > job->captured) return;
  if (const absl::Status status = Close(job); !status.ok()) return Fault(job, status);
  if (job->gate_ahead && !PassesGate(job)) return;
  job->stopped = true;
  const absl::StatusOr<JobRecord> record = store_.GetJob(job->key);
  if (record.ok()) {
    LogInfo("{}: {}: {} stored, {} rejected, {} cancelled of {}", job->id, NameOf(record->state),
            record->counts.stored, record->counts.rejected, record->counts.cancelled,
            record->counts.submitted);
  }
  listener_.stopped(*job);
}

// Once the first samples are in shards they are stored, and the rest runs only if nothing about
// them is alarming. Looked at as each comes: the engine may have captured all others meanwhile.
void ShardPipeline::LookAtGate(const ActiveJobPtr& job) {
  if (!job->gate_ahead || job->stopped) return;
  const absl::StatusOr<JobCounts> counts = CountsOf(*job);
  if (!counts.ok()) return Fault(job, counts.status());
  const int64_t in_shards = job->captured;
  if (counts->to_do == in_shards) return;  // CloseIfNothingLeft looks
  if (counts->stored + in_shards < job->plan.options.gate()) return;
  if (const absl::Status status = Close(job); !status.ok()) return Fault(job, status);
  PassesGate(job);
}

// What the look finds and what follows from it is one transaction: until that is done the gate is
// ahead, also for the next attempt.
bool ShardPipeline::PassesGate(const ActiveJobPtr& job) {
  const absl::StatusOr<std::string> alarms = AlarmsOf(job->key);
  absl::Status status = alarms.status();
  if (status.ok() && alarms->empty()) {
    status = store_.PassGate(job->key);
  } else if (status.ok()) {
    LogWarning("{}: paused at its gate: {}", job->id, *alarms);
    status = store_.PauseAtGate(
        job->key, fmt::format("paused at its gate: {}; look at `statetap stats {}`, then `statetap "
                              "resume` or `statetap cancel`",
                              *alarms, job->id));
  }
  if (!status.ok()) {
    Fault(job, status);
    return false;
  }
  job->gate_ahead = false;
  if (alarms->empty()) return true;
  job->stopped = true;
  listener_.stopped(*job);
  return false;
}

absl::StatusOr<std::string> ShardPipeline::AlarmsOf(int64_t key) const {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, store_.Shards(key));
  JoinedStatistics joined;
  for (const ShardRow& shard : shards) {
    STATETAP_ASSIGN_OR_RETURN(const auto reader,
                              ShardReader::Open(folders_.FromStored(shard.path)));
    STATETAP_RETURN_IF_ERROR(joined.Add(*reader));
  }
  ScoreFinals(options_.scorer, joined.finals);
  std::string text;
  for (const StatisticsAlarm& alarm : joined.Alarms())
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", alarm.kind, alarm.message);
  return text;
}

void ShardPipeline::StopNow(int64_t key, Finished finished) {
  retries_.erase(key);
  const ActiveJobPtr job = listener_.current(key);
  if (job == nullptr || job->stopped) return;
  if (finished == Finished::kCommit) {
    // What was finished counts; a shard that cannot be closed is as if it had never been begun.
    if (const absl::Status status = Close(job); !status.ok())
      LogError("{}: {}", job->id, MessageOf(status));
  }
  job->stopped = true;
  Drop(job);
  listener_.stopped(*job);
}

absl::Status ShardPipeline::Elsewhere(const std::filesystem::path& path,
                                      const absl::Status& status) {
  // A sample that does not fit is no fault of the disk, and a full one may have room again.
  if (absl::IsInvalidArgument(status) || absl::IsResourceExhausted(status)) return status;
  if (!folders_.TakeOut(path, status)) return status;
  return absl::UnavailableError(
      fmt::format("{}; its samples run again for other folders", MessageOf(status)));
}

void ShardPipeline::Fault(const ActiveJobPtr& job, const absl::Status& status) {
  job->stopped = true;
  Drop(job);  // what is on its way still counts: the next attempt must not run it again
  if (absl::IsUnavailable(status)) {
    LogError("{}: {}", job->id, MessageOf(status));
    retries_[job->key] = std::chrono::steady_clock::now();
    return listener_.stopped(*job);
  }
  LogError("{}: cannot store samples: {}", job->id, MessageOf(status));
  const absl::StatusOr<JobRecord> record = store_.GetJob(job->key);
  const bool nothing_stored = record.ok() && record->counts.stored == 0;
  absl::Status noted;
  if (nothing_stored && IsPermanent(status)) {
    noted = store_.RejectRest(
        job->key, {"write",
                   {},
                   {},
                   fmt::format("{}; make the folder writable, or start the server with another "
                               "--shards, and submit again",
                               MessageOf(status))});
  } else {
    noted = store_.MarkWaiting(
        job->key,
        fmt::format("{}; free space there or mend it: the job tries again every {:.3g} s and loses "
                    "nothing that is stored",
                    MessageOf(status),
                    std::chrono::duration<double>(options_.retry_after).count()));
    retries_[job->key] = std::chrono::steady_clock::now() + options_.retry_after;
  }
  if (!noted.ok()) LogError("{}: {}", job->id, MessageOf(noted));
  listener_.stopped(*job);
}

void ShardPipeline::RunDueRetries() {
  const auto now = std::chrono::steady_clock::now();
  for (auto retry = retries_.begin(); retry != retries_.end();) {
    if (retry->second > now) {
      ++retry;
      continue;
    }
    const int64_t key = retry->first;
    retry = retries_.erase(retry);
    if (!listener_.retry(key)) retries_[key] = now + options_.retry_after;
  }
}

}  // namespace statetap
