#include "extractor/engine/rank_group.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "extractor/base/log.h"

namespace statetap {
namespace {

// A rank that still answers does so at once.
constexpr auto kAnswers = std::chrono::seconds(2);

}  // namespace

// Shared with the threads, which may outlive the group.
struct RankGroup::State {
  std::vector<Communicator*> communicators;
  std::mutex mutex;
  std::condition_variable start, done;
  std::shared_ptr<const std::function<void(int)>> body;
  uint64_t round = 0;
  std::vector<char> inside;  // by rank
  bool stop = false;
  absl::Status status;

  std::vector<int> Inside() const {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < inside.size(); ++rank) {
      if (inside[rank] != 0) ranks.push_back(static_cast<int>(rank));
    }
    return ranks;
  }
};

RankGroup::RankGroup(std::span<const std::unique_ptr<Backend>> backends,
                     std::chrono::milliseconds patience)
    : patience_(patience), state_(std::make_shared<State>()) {
  for (const auto& backend : backends) state_->communicators.push_back(&backend->communicator());
  state_->inside.resize(backends.size());
  for (size_t rank = 0; rank < backends.size(); ++rank) {
    threads_.emplace_back([state = state_, rank] { Work(state, static_cast<int>(rank)); });
  }
}

RankGroup::~RankGroup() {
  std::vector<int> stuck;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    stuck = state_->Inside();
  }
  state_->start.notify_all();
  for (const int rank : stuck) threads_[static_cast<size_t>(rank)].detach();
  for (auto& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void RankGroup::Start(std::function<void(int)> body) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->status.ok()) return;
  state_->body = std::make_shared<const std::function<void(int)>>(std::move(body));
  std::fill(state_->inside.begin(), state_->inside.end(), 1);
  ++state_->round;
  state_->start.notify_all();
}

absl::Status RankGroup::Wait() {
  std::unique_lock lock(state_->mutex);
  // Nothing was started where an earlier round failed; who is inside then is left behind.
  if (state_->body == nullptr) return state_->status;
  const auto all_done = [this] { return state_->Inside().empty(); };
  if (patience_.count() == 0) {
    state_->done.wait(lock, all_done);
  } else if (!state_->done.wait_for(lock, patience_, all_done)) {
    const bool failed = !state_->status.ok();  // by a rank that threw
    for (Communicator* communicator : state_->communicators) communicator->Abort();
    state_->done.wait_for(lock, kAnswers, all_done);
    std::string which;
    for (const int rank : state_->Inside()) which += fmt::format(" {}", rank);
    which = which.empty() ? "a device is stuck, or slow" : fmt::format("stuck: rank{}", which);
    LogError("a step did not end within {} ms ({})", patience_.count(), which);
    if (!failed) {
      state_->status = absl::UnavailableError(
          fmt::format("a step did not end within {} ms ({})", patience_.count(), which));
    }
  }
  state_->body = nullptr;
  return state_->status;
}

void RankGroup::Work(const std::shared_ptr<State>& state, int rank) {
  uint64_t seen = 0;
  std::unique_lock lock(state->mutex);
  while (true) {
    state->start.wait(lock, [&] { return state->stop || state->round != seen; });
    if (state->stop) return;
    seen = state->round;
    auto body = state->body;
    lock.unlock();
    std::string fault;
    try {
      (*body)(rank);
    } catch (const RankAborted&) {
      // Another rank failed first and has said why.
    } catch (const std::exception& error) {
      fault = error.what();
      for (Communicator* communicator : state->communicators) communicator->Abort();
    }
    body = nullptr;  // may be the last to hold what it refers to: not under the lock
    lock.lock();
    if (!fault.empty()) {
      LogError("rank {} failed: {}", rank, fault);
      if (state->status.ok())
        state->status = absl::UnavailableError(fmt::format("rank {} failed: {}", rank, fault));
    }
    state->inside[static_cast<size_t>(rank)] = 0;
    if (state->Inside().empty()) state->done.notify_one();
  }
}

}  // namespace statetap
