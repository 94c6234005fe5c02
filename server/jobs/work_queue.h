// Which sample runs next: of the active jobs of the highest priority that have one, each in turn
// (the one that started a sample longest ago first), its samples in the order they were submitted.
// A thread of its own reads ahead from the store, so that the engine's thread never waits for a
// disk. Thread safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "server/jobs/active_job.h"
#include "server/store/job_store.h"

namespace statetap {

class WorkQueue {
 public:
  // `on_ready` is called, from the reading thread, whenever Next may have something new.
  WorkQueue(JobStore& store, std::function<void()> on_ready);
  ~WorkQueue();

  void Add(ActiveJobPtr job);
  void Remove(const ActiveJob& job);

  struct Work {
    ActiveJobPtr job;
    SampleRow sample;
  };
  // The next sample, or nothing: none is there, or `fits` refuses it. Does not block.
  std::optional<Work> Next(const std::function<bool(const ActiveJob&, const SampleRow&)>& fits);

 private:
  struct Entry {
    ActiveJobPtr job;
    std::deque<SampleRow> ready;
    int64_t cursor = -1;     // the last index read
    bool exhausted = false;  // the store has no more
    bool mark_running = false;
    uint64_t last_turn = 0;
  };
  void ReadAhead();
  Entry* ToServe();  // wants reading or marking
  Entry* Find(const ActiveJob& job);

  JobStore& store_;
  const std::function<void()> on_ready_;
  std::mutex mutex_;
  std::condition_variable wanted_;
  std::vector<std::unique_ptr<Entry>> entries_;
  uint64_t turns_ = 0;
  bool stop_ = false;
  std::thread reader_;
};

}  // namespace statetap
