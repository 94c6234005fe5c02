#include "extractor/base/worker_pool.h"

namespace statetap {

WorkerPool::WorkerPool(int num_threads) {
  for (int thread = 1; thread < num_threads; ++thread)
    threads_.emplace_back([this, thread] { Work(thread); });
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void WorkerPool::ParallelFor(int64_t count,
                             const std::function<void(int64_t, int64_t, int)>& body) {
  const int64_t parts = num_threads();
  if (parts == 1 || count < 2) {
    if (count > 0) body(0, count, 0);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    running_ = static_cast<int>(threads_.size());
    ++round_;
  }
  start_.notify_all();
  if (count / parts > 0) body(0, count / parts, 0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
}

void WorkerPool::Work(int thread) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    const auto* body = body_;
    const int64_t parts = num_threads(), begin = count_ * thread / parts,
                  end = count_ * (thread + 1) / parts;
    lock.unlock();
    if (begin < end) (*body)(begin, end, thread);
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace statetap
