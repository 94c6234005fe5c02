// Threads that split the rows of one operation. Owned by one rank; calls come from that rank's
// thread only.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace statetap {

class WorkerPool {
 public:
  // `num_threads` counts the caller: 1 starts no thread.
  explicit WorkerPool(int num_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Calls body(begin, end, thread) on disjoint ranges that cover [0, count), `thread` in [0,
  // num_threads()); returns when all have ended. The split never changes a result: bodies compute
  // each index by itself.
  void ParallelFor(int64_t count, const std::function<void(int64_t, int64_t, int)>& body);
  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

 private:
  void Work(int thread);

  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int64_t, int64_t, int)>* body_ = nullptr;
  int64_t count_ = 0;
  uint64_t round_ = 0;
  int running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace statetap
