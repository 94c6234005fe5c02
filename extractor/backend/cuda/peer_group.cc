#include "extractor/backend/cuda/peer_group.h"

#include <chrono>
#include <thread>

#include "extractor/backend/cuda/check.h"

namespace statetap::cuda {
namespace {

// A thread that has not come by then never will: its rank is dead or stuck.
constexpr auto kPatience = std::chrono::seconds(30);
constexpr int kPollsBetweenLooks = 1024;

}  // namespace

PeerGroup::PeerGroup(int world) : ranks_(static_cast<size_t>(world)) {
  if (world > kMaxRanks) {
    Fail(std::to_string(world) + " ranks: at most " + std::to_string(kMaxRanks) + " are supported");
  }
}

void PeerGroup::Join(int rank) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.ready = std::make_unique<Event>();
  own.done = std::make_unique<Event>();
}

void PeerGroup::ThrowIfAborted() const {
  if (aborted_) throw RankAborted("another rank of the group has failed");
}

void PeerGroup::Meet() {
  ThrowIfAborted();
  const uint64_t round = round_.load();
  if (waiting_.fetch_add(1) + 1 == world()) {
    waiting_ = 0;
    ++round_;
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (int poll = 1; round_.load() == round; ++poll) {
    if (poll % kPollsBetweenLooks != 0) continue;
    ThrowIfAborted();
    if (std::chrono::steady_clock::now() > deadline) {
      Abort();
      Fail("a rank did not come to an exchange within 30 s");
    }
    std::this_thread::yield();
  }
}

void PeerGroup::Publish(int rank, const void* pointer, cudaStream_t stream) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.pointer = pointer;
  if (world() == 1) return;
  own.ready->Record(stream);
  Meet();
  for (const Rank& other : ranks_) {
    if (&other != &own) other.ready->Hold(stream);
  }
}

void PeerGroup::Leave(int rank, cudaStream_t stream) {
  if (world() == 1) return;
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.done->Record(stream);
  Meet();
  for (const Rank& other : ranks_) {
    if (&other != &own) other.done->Hold(stream);
  }
}

}  // namespace statetap::cuda
