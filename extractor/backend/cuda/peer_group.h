// Ranks that read each other's device memory: on GPUs with peer access, or sharing one GPU. The
// host threads meet, the streams are joined by events; no kernel ever spins, so ranks that share a
// GPU cannot block each other.
#pragma once

#include <atomic>
#include <vector>

#include "extractor/backend/communicator.h"
#include "extractor/backend/cuda/owners.h"

namespace statetap::cuda {

inline constexpr int kMaxRanks = 16;

class PeerGroup {
 public:
  explicit PeerGroup(int world);
  int world() const { return static_cast<int>(ranks_.size()); }
  // Called by each rank on its own thread, before the first Publish.
  void Join(int rank);

  // What `stream` has made so far at `pointer` may be read by the others; what comes next on
  // `stream` may read theirs, at(r). Waits on the host for the other threads, not for the device.
  void Publish(int rank, const void* pointer, cudaStream_t stream);
  // Ends what Publish began: what comes next on `stream` may write to `pointer` again.
  void Leave(int rank, cudaStream_t stream);
  const void* at(int rank) const { return ranks_[static_cast<size_t>(rank)].pointer; }

  // Calls that wait, now or later, throw RankAborted.
  void Abort() { aborted_.store(true); }
  void ThrowIfAborted() const;

 private:
  struct Rank {
    std::unique_ptr<Event> ready, done;
    const void* pointer = nullptr;
  };
  void Meet();

  std::vector<Rank> ranks_;
  std::atomic<int> waiting_ = 0;
  std::atomic<uint64_t> round_ = 0;
  std::atomic<bool> aborted_ = false;
};

class PeerCommunicator final : public Communicator {
 public:
  PeerCommunicator(int rank, std::shared_ptr<PeerGroup> group)
      : rank_(rank), group_(std::move(group)) {}
  int rank() const override { return rank_; }
  int world() const override { return group_->world(); }
  void Abort() override { group_->Abort(); }

  void Publish(const void* pointer, cudaStream_t stream) const {
    group_->Publish(rank_, pointer, stream);
  }
  void Leave(cudaStream_t stream) const { group_->Leave(rank_, stream); }
  const void* at(int rank) const { return group_->at(rank); }
  PeerGroup& group() const { return *group_; }

 private:
  int rank_;
  std::shared_ptr<PeerGroup> group_;
};

}  // namespace statetap::cuda
