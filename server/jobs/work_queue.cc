#include "server/jobs/work_queue.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "extractor/base/log.h"

namespace statetap {
namespace {

constexpr size_t kLowWater = 64;
constexpr int64_t kBatch = 128;
constexpr std::chrono::seconds kAfterFault{5};

}  // namespace

WorkQueue::WorkQueue(JobStore& store, std::function<void()> on_ready)
    : store_(store), on_ready_(std::move(on_ready)), reader_([this] { ReadAhead(); }) {}

WorkQueue::~WorkQueue() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wanted_.notify_all();
  reader_.join();
}

void WorkQueue::Add(ActiveJobPtr job) {
  {
    const std::lock_guard lock(mutex_);
    auto entry = std::make_unique<Entry>();
    entry->job = std::move(job);
    entries_.push_back(std::move(entry));
  }
  wanted_.notify_all();
}

void WorkQueue::Remove(const ActiveJob& job) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [&](const auto& entry) { return entry->job.get() == &job; });
}

std::optional<WorkQueue::Work> WorkQueue::Next(
    const std::function<bool(const ActiveJob&, const SampleRow&)>& fits) {
  const auto goes_before = [](const Entry& a, const Entry& b) {
    const int mine = a.job->plan.options.priority(), others = b.job->plan.options.priority();
    return mine != others ? mine > others : a.last_turn < b.last_turn;
  };
  const std::lock_guard lock(mutex_);
  Entry* first = nullptr;
  for (const auto& entry : entries_) {
    if (entry->ready.empty()) continue;
    if (first == nullptr || goes_before(*entry, *first)) first = entry.get();
  }
  // One that does not fit yet is not overtaken: it would starve.
  if (first == nullptr || !fits(*first->job, first->ready.front())) return std::nullopt;
  Work work{first->job, std::move(first->ready.front())};
  first->ready.pop_front();
  if (first->last_turn == 0) first->mark_running = true;
  first->last_turn = ++turns_;
  if (first->mark_running || first->ready.size() < kLowWater) wanted_.notify_all();
  return work;
}

WorkQueue::Entry* WorkQueue::ToServe() {
  for (const auto& entry : entries_) {
    if (entry->mark_running || (!entry->exhausted && entry->ready.size() < kLowWater))
      return entry.get();
  }
  return nullptr;
}

WorkQueue::Entry* WorkQueue::Find(const ActiveJob& job) {
  for (const auto& entry : entries_) {
    if (entry->job.get() == &job) return entry.get();
  }
  return nullptr;
}

void WorkQueue::ReadAhead() {
  std::unique_lock lock(mutex_);
  while (true) {
    wanted_.wait(lock, [&] { return stop_ || ToServe() != nullptr; });
    if (stop_) return;
    Entry* entry = ToServe();
    const ActiveJobPtr job = entry->job;
    const int64_t cursor = entry->cursor;
    const bool mark = std::exchange(entry->mark_running, false);
    const bool read = !entry->exhausted;
    lock.unlock();
    absl::Status status = mark ? store_.MarkRunning(job->key) : absl::OkStatus();
    absl::StatusOr<std::vector<SampleRow>> samples = std::vector<SampleRow>();
    if (status.ok() && read) samples = store_.ToDo(job->key, cursor, kBatch);
    if (status.ok()) status = samples.status();
    lock.lock();
    if (!status.ok()) {
      LogError("{}: cannot read what is to do: {}", job->id, MessageOf(status));
      wanted_.wait_for(lock, kAfterFault, [&] { return stop_; });
      continue;
    }
    entry = Find(*job);  // it may be gone by now
    if (entry == nullptr || !read) continue;
    entry->exhausted = static_cast<int64_t>(samples->size()) < kBatch;
    if (!samples->empty()) entry->cursor = samples->back().index;
    for (SampleRow& sample : *samples) entry->ready.push_back(std::move(sample));
    lock.unlock();
    on_ready_();
    lock.lock();
  }
}

}  // namespace statetap
