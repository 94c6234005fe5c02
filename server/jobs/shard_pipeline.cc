#include "server/jobs/shard_pipeline.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "extractor/base/log.h"
#include "extractor/shard/joined_statistics.h"

namespace statetap {
namespace {

// Waiting does not mend these; a person must.
bool IsPermanent(const absl::Status& status) {
  return absl::IsPermissionDenied(status) || absl::IsNotFound(status) ||
         absl::IsAlreadyExists(status) || absl::IsFailedPrecondition(status);
}

}  // namespace

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

void ShardPipeline::PushFinished(ActiveJobPtr job, FinishedSample sample, int64_t reserved_bytes) {
  auto shared = std::make_shared<FinishedSample>(std::move(sample));
  Push({job,
        [this, job, shared, reserved_bytes] {
          if (!job->stopped) Append(job, *shared);
          *shared = {};
          listener_.released(reserved_bytes);
        },
        {}});
}

void ShardPipeline::PushRejected(ActiveJobPtr job, int64_t index, Rejection rejection) {
  Push({std::move(job), nullptr, {{index, std::move(rejection)}}});
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
  while (!open_.empty()) {
    const ActiveJobPtr job = open_.begin()->second.job;
    if (const absl::Status status = Close(job); !status.ok()) Fault(job, status);
  }
  while (!commits_.empty()) NoteOldestOrFault();
}

absl::StatusOr<ShardPipeline::OpenShard*> ShardPipeline::OpenShardOf(const ActiveJobPtr& job) {
  if (const auto found = open_.find(job->key); found != open_.end()) return &found->second;
  OpenShard shard;
  shard.job = job;
  STATETAP_ASSIGN_OR_RETURN(shard.seq, store_.NextShard(job->key));
  std::vector<std::filesystem::path> busy;
  for (const Commit& commit : commits_) {
    busy.push_back(commit.shard.path);
    if (commit.shard.job->key == job->key) shard.seq = commit.shard.seq + 1;
  }
  STATETAP_ASSIGN_OR_RETURN(
      shard.path, folders_.PathFor(job->id, shard.seq,
                                   static_cast<int64_t>(job->plan.options.shard_bytes()), busy));
  auto writer = ShardWriter::Create(shard.path, job->shard_config, {});
  if (!writer.ok()) return Elsewhere(shard.path, writer.status());
  shard.writer = *std::move(writer);
  return &open_.emplace(job->key, std::move(shard)).first->second;
}

void ShardPipeline::Append(const ActiveJobPtr& job, const FinishedSample& sample) {
  const absl::StatusOr<OpenShard*> shard = OpenShardOf(job);
  if (!shard.ok()) return Fault(job, shard.status());
  const std::vector<std::span<const uint16_t>> states(sample.states.begin(), sample.states.end());
  if (const absl::Status status = (*shard)->writer->Append(sample.record, states); !status.ok())
    return Fault(job, Elsewhere((*shard)->path, status));
  StoredSample facts = StoredFacts(sample.record);
  facts.position = static_cast<int64_t>((*shard)->samples.size());
  facts.row = (*shard)->rows;
  (*shard)->rows += facts.rows;
  (*shard)->samples.push_back(std::move(facts));
  CountCaptured(*job);
  if ((*shard)->writer->states_bytes() >= static_cast<int64_t>(job->plan.options.shard_bytes())) {
    if (const absl::Status status = BeginCommit(job); !status.ok()) return Fault(job, status);
  }
  CloseIfNothingLeft(job);
}

void ShardPipeline::Reject(const ActiveJobPtr& job,
                           std::span<const JobStore::RejectedSample> samples) {
  if (job->stopped) return;
  if (const absl::Status status = store_.Reject(job->key, samples); !status.ok())
    return Fault(job, status);
  CloseIfNothingLeft(job);
}

absl::Status ShardPipeline::BeginCommit(const ActiveJobPtr& job) {
  const auto waits_for = [&](const Commit& commit) {
    const auto open = open_.find(job->key);
    return open != open_.end() && folders_.OnOneRoot(commit.shard.path, open->second.path);
  };
  while (std::ranges::any_of(commits_, waits_for)) {
    if (commits_.front().shard.job == job) {
      STATETAP_RETURN_IF_ERROR(NoteOldest());
    } else {
      NoteOldestOrFault();
    }
  }
  const auto found = open_.find(job->key);
  if (found == open_.end()) return absl::OkStatus();
  std::promise<absl::StatusOr<ShardSummary>> written;
  Commit& commit = commits_.emplace_back(std::move(found->second), written.get_future());
  open_.erase(found);
  commit.thread = std::thread([this, writer = commit.shard.writer.get(),
                               written = std::move(written)]() mutable {
    written.set_value(writer->Commit());
    Push({nullptr,
          [this] {
            while (!commits_.empty() && commits_.front().written.wait_for(
                                            std::chrono::seconds(0)) == std::future_status::ready)
              NoteOldestOrFault();
          },
          {}});
  });
  return absl::OkStatus();
}

absl::Status ShardPipeline::NoteOldest() {
  Commit commit = std::move(commits_.front());
  commits_.pop_front();
  const absl::StatusOr<ShardSummary> written = commit.written.get();
  commit.thread.join();
  const OpenShard& shard = commit.shard;
  CountCaptured(*shard.job);
  if (!written.ok()) return Elsewhere(shard.path, written.status());
  const ShardSummary& summary = *written;
  const absl::Status status =
      store_.CommitShard(shard.job->key,
                         {shard.seq, folders_.ToStored(summary.path), summary.samples, summary.rows,
                          summary.bytes, summary.digest},
                         shard.samples);
  if (status.ok()) {
    LogInfo("{}: {} holds {} samples, {} rows, {} bytes", shard.job->id, summary.path.string(),
            summary.samples, summary.rows, summary.bytes);
    listener_.committed();
    return status;
  }
  // A shard that the store does not name would stand in the way of the next one.
  std::error_code ignored;
  std::filesystem::remove(summary.path, ignored);
  return status;
}

void ShardPipeline::NoteOldestOrFault() {
  const ActiveJobPtr job = commits_.front().shard.job;
  const absl::Status status = NoteOldest();
  if (status.ok()) return;
  if (!job->stopped) return Fault(job, status);
  LogError("{}: {}", job->id, MessageOf(status));
}

absl::Status ShardPipeline::Settle(const ActiveJobPtr& job) {
  absl::Status first;
  while (std::ranges::any_of(commits_,
                             [&](const Commit& commit) { return commit.shard.job == job; })) {
    if (commits_.front().shard.job == job) {
      first.Update(NoteOldest());
    } else {
      NoteOldestOrFault();
    }
  }
  return first;
}

absl::Status ShardPipeline::Close(const ActiveJobPtr& job) {
  absl::Status status = BeginCommit(job);
  status.Update(Settle(job));
  return status;
}

int64_t ShardPipeline::InShards(const ActiveJob& job) const {
  int64_t samples = 0;
  for (const Commit& commit : commits_)
    if (commit.shard.job->key == job.key) samples += std::ssize(commit.shard.samples);
  if (const auto open = open_.find(job.key); open != open_.end())
    samples += std::ssize(open->second.samples);
  return samples;
}

void ShardPipeline::CountCaptured(ActiveJob& job) const {
  int64_t rows = 0;
  for (const Commit& commit : commits_)
    if (commit.shard.job->key == job.key) rows += commit.shard.rows;
  if (const auto open = open_.find(job.key); open != open_.end()) rows += open->second.rows;
  job.captured = InShards(job);
  job.captured_rows = rows;
}

// What is to do lies in shards: nothing else runs, so they are closed, which ends the job.
void ShardPipeline::CloseIfNothingLeft(const ActiveJobPtr& job) {
  if (job->stopped) return;
  absl::StatusOr<JobRecord> record = store_.GetJob(job->key);
  if (!record.ok()) return Fault(job, record.status());
  const int64_t in_shards = InShards(*job);
  if (record->counts.to_do > in_shards) {
    if (!job->gate_passed && record->counts.stored + in_shards >= job->plan.options.gate())
      LookAtGate(job);
    return;
  }
  if (const absl::Status status = Close(job); !status.ok()) return Fault(job, status);
  job->stopped = true;
  record = store_.GetJob(job->key);
  if (record.ok()) {
    LogInfo("{}: {}: {} stored, {} rejected, {} cancelled of {}", job->id, NameOf(record->state),
            record->counts.stored, record->counts.rejected, record->counts.cancelled,
            record->counts.submitted);
  }
  listener_.stopped(*job);
}

// The first samples are stored, and the rest runs only if nothing about them is alarming.
void ShardPipeline::LookAtGate(const ActiveJobPtr& job) {
  job->gate_passed = true;
  if (const absl::Status status = Close(job); !status.ok()) return Fault(job, status);
  const absl::StatusOr<std::string> alarms = AlarmsOf(job->key);
  if (!alarms.ok()) return Fault(job, alarms.status());
  if (alarms->empty()) return;
  job->stopped = true;
  LogWarning("{}: paused at its gate: {}", job->id, *alarms);
  const absl::Status paused = store_.MarkPaused(
      job->key, fmt::format("paused at its gate: {}; look at `statetap stats {}`, then `statetap "
                            "resume` or `statetap cancel`",
                            *alarms, job->id));
  if (!paused.ok()) LogError("{}: {}", job->id, MessageOf(paused));
  listener_.stopped(*job);
}

absl::StatusOr<std::string> ShardPipeline::AlarmsOf(int64_t key) const {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, store_.Shards(key));
  JoinedStatistics joined;
  for (const ShardRow& shard : shards) {
    STATETAP_ASSIGN_OR_RETURN(const auto reader,
                              ShardReader::Open(folders_.FromStored(shard.path)));
    STATETAP_RETURN_IF_ERROR(joined.Add(*reader));
  }
  std::string text;
  for (const StatisticsAlarm& alarm : joined.Alarms())
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", alarm.kind, alarm.message);
  return text;
}

void ShardPipeline::StopNow(int64_t key, Finished finished) {
  retries_.erase(key);
  const ActiveJobPtr job = listener_.current(key);
  if (job == nullptr || job->stopped) return;
  job->stopped = true;
  if (finished == Finished::kDrop) open_.erase(key);
  // What was finished counts; a shard that cannot be closed is as if it had never been begun.
  const absl::Status status = Close(job);
  if (!status.ok()) LogError("{}: {}", job->id, MessageOf(status));
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
  open_.erase(job->key);
  // What is on its way still counts: the next attempt must not run it again.
  if (const absl::Status other = Settle(job); !other.ok())
    LogError("{}: {}", job->id, MessageOf(other));
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
