#include "extractor/engine/rank_group.h"

#include "extractor/base/log.h"

namespace statetap {

RankGroup::RankGroup(std::span<const std::unique_ptr<Backend>> backends) : backends_(backends) {
  for (size_t rank = 0; rank < backends.size(); ++rank) {
    threads_.emplace_back([this, rank] { Work(static_cast<int>(rank)); });
  }
}

RankGroup::~RankGroup() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& thread : threads_) thread.join();
}

absl::Status RankGroup::RunAll(const std::function<void(int)>& body) {
  std::unique_lock lock(mutex_);
  STATETAP_RETURN_IF_ERROR(status_);
  body_ = &body;
  running_ = static_cast<int>(threads_.size());
  ++round_;
  start_.notify_all();
  done_.wait(lock, [this] { return running_ == 0; });
  return status_;
}

void RankGroup::Work(int rank) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    lock.unlock();
    try {
      (*body_)(rank);
    } catch (const RankAborted&) {
      // Another rank failed first and has said why.
    } catch (const std::exception& error) {
      Fail(rank, error.what());
    }
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

void RankGroup::Fail(int rank, const std::string& what) {
  LogError("rank {} failed: {}", rank, what);
  {
    const std::lock_guard lock(mutex_);
    if (status_.ok()) {
      status_ = absl::UnavailableError(
          fmt::format("rank {} failed: {}; restart the server to go on", rank, what));
    }
  }
  backends_[static_cast<size_t>(rank)]->communicator().Abort();
}

}  // namespace statetap
