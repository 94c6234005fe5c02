// The runner's side towards the engine. Everything here runs on the engine's thread; OnStates on
// others of the engine's too, while this one waits for them.
#include <algorithm>
#include <utility>

#include "extractor/base/log.h"
#include "server/jobs/job_runner.h"

namespace statetap {

int64_t JobRunner::MostRows(const ActiveJob& job, const SampleRow& sample) const {
  const auto prompt = static_cast<int64_t>(sample.ids.size());
  if (!job.plan.text.generate) return prompt;
  return std::min<int64_t>(job.plan.options.max_length(), prompt + MaxNewTokens(job.plan, sample));
}

int64_t JobRunner::Reservation(const ActiveJob& job, const SampleRow& sample) const {
  return MostRows(job, sample) * static_cast<int64_t>(job.plan.boundaries.size()) *
         model_.config.hidden * static_cast<int64_t>(sizeof(uint16_t));
}

std::optional<SampleTask> JobRunner::NextAnswer() {
  std::shared_ptr<Answer> answer;
  {
    const std::lock_guard lock(mutex_);
    while (answer == nullptr && !answers_.empty()) {
      answer = std::move(answers_.front());
      answers_.pop_front();
      if (!answer->abandoned()) break;
      answer->End(absl::CancelledError("the caller has gone"));
      answer = nullptr;
    }
  }
  if (answer == nullptr) return std::nullopt;
  SampleTask task = answer->task();
  task.ticket = ++last_ticket_;
  Running& running = running_[task.ticket];
  running.answer = std::move(answer);
  running.prompt_tokens = static_cast<int64_t>(task.input_ids.size());
  ++running_answers_;
  return task;
}

std::optional<SampleTask> JobRunner::Next() {
  {
    const std::lock_guard lock(mutex_);
    seen_version_ = version_;  // before looking: a change from now on ends Wait
    if (draining_) return std::nullopt;
  }
  if (auto task = NextAnswer()) return task;
  if (DiskIsFull()) return std::nullopt;
  const auto fits = [&](const ActiveJob& job, const SampleRow& sample) {
    return buffered_ == 0 || buffered_ + Reservation(job, sample) <= options_.host_buffer_bytes;
  };
  std::optional<WorkQueue::Work> work = queue_->Next(fits);
  if (!work) return std::nullopt;
  SampleTask task = TaskOf(work->job->plan, work->sample, work->sample.id, model_);
  task.ticket = ++last_ticket_;
  Running& running = running_[task.ticket];
  running.prompt_tokens = static_cast<int64_t>(task.input_ids.size());
  running.reserved = Reservation(*work->job, work->sample);
  const int64_t most_rows = MostRows(*work->job, work->sample);
  running.assembler.emplace(std::move(work->sample), AnswerMaskOf(work->job->plan, model_),
                            work->job->plan.boundaries, model_.config.hidden, most_rows);
  running.job = std::move(work->job);
  buffered_ += running.reserved;
  ++running.job->running;
  ++running_samples_;
  return task;
}

// What runs may finish; then the open shards are closed, so that readers can have them.
bool JobRunner::DiskIsFull() {
  if (options_.max_shard_bytes == 0) return false;
  int64_t bytes = shard_bytes_;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, job] : jobs_) {
      bytes += job->captured_rows * static_cast<int64_t>(job->plan.boundaries.size()) *
               model_.config.hidden * static_cast<int64_t>(sizeof(uint16_t));
    }
  }
  const bool full = bytes + buffered_ >= options_.max_shard_bytes;
  if (full && !disk_is_full_) {
    LogWarning(
        "--max-shard-bytes {} is reached: nothing starts until states are acknowledged, "
        "evicted or deleted",
        options_.max_shard_bytes);
  }
  disk_is_full_ = full;
  if (full && running_.empty()) pipeline_->CloseAll();
  return full;
}

std::vector<uint64_t> JobRunner::TakeCancelled() {
  std::vector<uint64_t> tickets;
  if (!cancels_.exchange(false)) return tickets;
  for (const auto& [ticket, running] : running_) {
    if ((running.job != nullptr && running.job->stopped) ||
        (running.answer != nullptr && running.answer->abandoned()))
      tickets.push_back(ticket);
  }
  return tickets;
}

bool JobRunner::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return draining_ || stopping_ || version_ != seen_version_; });
  return !draining_ && !stopping_;
}

bool JobRunner::Stopping() { return stopping_; }

JobRunner::Running* JobRunner::Find(uint64_t ticket) {
  const auto found = running_.find(ticket);
  return found == running_.end() ? nullptr : &found->second;
}

void JobRunner::End(uint64_t ticket, Running& running) {
  if (running.job != nullptr) --running.job->running;
  --(running.job != nullptr ? running_samples_ : running_answers_);
  const int64_t reserved = running.reserved;
  running_.erase(ticket);
  if (reserved > 0) Release(reserved);
}

// Of an answer: its states are not asked for.
void JobRunner::CountPrompt(Running& running) {
  prompt_tokens_ += std::exchange(running.prompt_tokens, 0);
}

void JobRunner::OnStates(uint64_t ticket, int boundary, int64_t first_row,
                         std::span<const uint16_t> states) {
  Running* running = Find(ticket);
  if (running == nullptr || running->job == nullptr) return;
  running->assembler->AddStates(boundary, first_row, states);
  if (boundary != running->job->plan.boundaries.front()) return;
  const auto rows = static_cast<int64_t>(states.size()) / model_.config.hidden;
  running->job->rate.Add(rows);
  const int64_t read = std::min(rows, running->prompt_tokens);
  running->prompt_tokens -= read;
  prompt_tokens_ += read;
  answer_tokens_ += rows - read;
}

void JobRunner::OnToken(uint64_t ticket, int32_t id, TokenScore score) {
  Running* running = Find(ticket);
  if (running == nullptr) return;
  if (running->answer == nullptr) return running->assembler->AddToken(id, score);
  CountPrompt(*running);
  ++answer_tokens_;
  running->answer->Add({id, score});
}

void JobRunner::OnScores(uint64_t ticket, int64_t first, std::span<const TokenScore> scores) {
  Running* running = Find(ticket);
  if (running == nullptr) return;
  if (running->answer != nullptr) return running->answer->AddPromptScores(scores);
  running->assembler->AddScores(first, scores);
}

void JobRunner::OnFinished(uint64_t ticket, FinishReason reason) {
  Running* running = Find(ticket);
  if (running == nullptr) return;
  if (running->answer != nullptr) {
    CountPrompt(*running);
    running->answer->End(absl::OkStatus(), reason);
  } else {
    absl::StatusOr<FinishedSample> sample = running->assembler->Finish(reason);
    if (sample.ok()) {
      // The pipeline gives the reservation back.
      pipeline_->PushFinished(running->job, *std::move(sample),
                              std::exchange(running->reserved, 0));
    } else {
      pipeline_->PushRejected(running->job, running->assembler->index(),
                              {"engine", {}, {}, std::string(MessageOf(sample.status()))});
    }
  }
  End(ticket, *running);
}

void JobRunner::OnFailed(uint64_t ticket, const Failure& failure) {
  Running* running = Find(ticket);
  if (running == nullptr) return;
  const std::string message(MessageOf(failure.status));
  if (running->answer != nullptr) {
    running->answer->End(failure.status);
  } else if (!absl::IsCancelled(failure.status)) {
    Rejection rejection{"engine", {}, {}, message};
    if (absl::IsDataLoss(failure.status)) rejection.reason = "non_finite";
    if (absl::IsResourceExhausted(failure.status)) rejection.reason = "too_long";
    if (absl::IsInvalidArgument(failure.status)) rejection.reason = "input";
    if (failure.boundary >= 0) rejection.layer = failure.boundary;
    if (failure.token >= 0) rejection.token = failure.token;
    pipeline_->PushRejected(running->job, running->assembler->index(), std::move(rejection));
  }
  End(ticket, *running);
}

}  // namespace statetap
