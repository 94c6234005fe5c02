#include "extractor/backend/cuda/peer_group.h"

#include <string>
#include <thread>

#include "extractor/backend/cuda/check.h"

namespace statetap::cuda {
namespace {

constexpr int kPollsBetweenLooks = 1024;

}  // namespace

DeviceGroup::DeviceGroup(int world) : world_(world) {
  if (world > kMaxRanks) {
    Fail(std::to_string(world) + " ranks: at most " + std::to_string(kMaxRanks) + " are supported");
  }
}

void DeviceGroup::Reserve(int, int, size_t, bool) {}

void DeviceGroup::ThrowIfAborted(int rank) {
  if (!aborted_) return;
  End(rank);
  throw RankAborted("another rank of the group has failed");
}

PeerGroup::PeerGroup(int world) : DeviceGroup(world), ranks_(static_cast<size_t>(world)) {}

void PeerGroup::Join(int rank) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.ready = std::make_unique<Event>();
  own.done = std::make_unique<Event>();
}

void PeerGroup::Meet(int rank) {
  ThrowIfAborted(rank);
  const uint64_t round = round_.load();
  if (waiting_.fetch_add(1) + 1 == world()) {
    waiting_ = 0;
    ++round_;
    return;
  }
  // Whoever runs the ranks notices that one does not come, and aborts the group.
  for (int poll = 1; round_.load() == round; ++poll) {
    if (poll % kPollsBetweenLooks != 0) continue;
    ThrowIfAborted(rank);
    std::this_thread::yield();
  }
}

void PeerGroup::Publish(int rank, const void* pointer, cudaStream_t stream) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.pointer = static_cast<const std::byte*>(pointer);
  if (world() == 1) return;
  own.ready->Record(stream);
  Meet(rank);
  for (const Rank& other : ranks_) {
    if (&other != &own) other.ready->Hold(stream);
  }
}

DeviceGroup::Parts PeerGroup::Share(int rank, const SharedRows& rows, cudaStream_t stream) {
  Publish(rank, rows.own, stream);
  Parts parts{};
  for (size_t r = 0; r < ranks_.size(); ++r) parts[r] = ranks_[r].pointer;
  return parts;
}

void PeerGroup::Release(int rank, cudaStream_t stream) {
  if (world() == 1) return;
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.done->Record(stream);
  Meet(rank);
  for (const Rank& other : ranks_) {
    if (&other != &own) other.done->Hold(stream);
  }
}

void PeerGroup::GatherRows(int rank, const void* own, int num_rows, size_t row_bytes, void* all,
                           cudaStream_t stream) {
  Publish(rank, own, stream);
  for (int r = 0; r < world(); ++r) {
    const RowRange rows = ShardOfRows(num_rows, r, world());
    if (rows.count == 0) continue;
    Check(
        cudaMemcpyAsync(static_cast<std::byte*>(all) + static_cast<size_t>(rows.begin) * row_bytes,
                        ranks_[static_cast<size_t>(r)].pointer,
                        static_cast<size_t>(rows.count) * row_bytes, cudaMemcpyDefault, stream));
  }
  Release(rank, stream);
}

}  // namespace statetap::cuda
