#include "extractor/backend/cuda/peer_group.h"

#include <algorithm>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

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

void DeviceGroup::ExchangeAddNorm(int rank, const SharedRows& rows, SumAddNormParams sum,
                                  cudaStream_t stream) {
  const Parts parts = Share(rank, rows, stream);
  sum.world = world_;
  for (size_t r = 0; r < static_cast<size_t>(world_); ++r)
    sum.partial[r] = reinterpret_cast<const bf16*>(parts[r]);
  SumAddNorm(sum, stream);
  Release(rank, stream);
}

void DeviceGroup::ThrowIfAborted(int rank) {
  if (!aborted_) return;
  End(rank);
  throw RankAborted("another rank of the group has failed");
}

PeerGroup::PeerGroup(int world, bool apart)
    : DeviceGroup(world), apart_(apart && world > 1), ranks_(static_cast<size_t>(world)) {
  if (!apart_) return;
  aborted_word_ = PinnedBuffer(sizeof(int));
  *aborted_word_.as<volatile int>() = 0;
}

void PeerGroup::OnAbort() {
  if (apart_) *aborted_word_.as<volatile int>() = 1;
}

void PeerGroup::BeginStep(int rank) {
  if (!apart_) return;
  ranks_[static_cast<size_t>(rank)].next = 0;
  // A kernel that waits must not meet a device that waits for it to end, to give memory back.
  Meet(rank);
}

std::pair<PushParams, DeviceGroup::Parts> PeerGroup::NextPush(int rank, const void* own,
                                                              size_t bytes, size_t most_bytes) {
  ThrowIfAborted(rank);
  Rank& of = ranks_[static_cast<size_t>(rank)];
  const int half = std::exchange(of.next, 1 - of.next);
  PushParams p{};
  p.own = static_cast<const std::byte*>(own);
  p.bytes = bytes;
  p.most_bytes = most_bytes;
  p.rank = rank;
  p.world = world();
  p.calls = Flags(rank, world());
  p.aborted = aborted_word_.as<int>();
  Parts parts{};
  for (int r = 0; r < world(); ++r) {
    const auto i = static_cast<size_t>(r);
    parts[i] = r == rank ? p.own : Slot(rank, half, r);
    p.flag[i] = Flags(rank, r);
    p.flag_at[i] = Flags(r, rank);
    p.inbox[i] = r == rank ? nullptr : Slot(r, half, rank);
  }
  return {p, parts};
}

void PeerGroup::ExchangeAddNorm(int rank, const SharedRows& rows, SumAddNormParams sum,
                                cudaStream_t stream) {
  if (std::exchange(ranks_[static_cast<size_t>(rank)].num_made, 0) > 0)
    return ExchangePieces(rank, rows, sum, stream);
  const size_t bytes = static_cast<size_t>(rows.num_rows) * rows.row_bytes;
  if (rows.sharded || !Pushable(bytes, rows.row_bytes) ||
      rows.row_bytes != static_cast<size_t>(sum.hidden) * sizeof(bf16) ||
      !CanPushRows(sum.num_rows, sum.hidden))
    return DeviceGroup::ExchangeAddNorm(rank, rows, sum, stream);
  const auto [push, parts] = NextPush(rank, rows.own, bytes, bytes);
  sum.world = world();
  for (size_t r = 0; r < ranks_.size(); ++r)
    sum.partial[r] = reinterpret_cast<const bf16*>(parts[r]);
  PushSumAddNorm(push, sum, stream);
}

void PeerGroup::Reserve(int rank, int num_rows, size_t row_bytes, bool sharded) {
  if (!sharded || Pieces(num_rows, world()).count() == 1) return;
  const auto shard = static_cast<size_t>(ShardOfRows(num_rows, 0, world()).count);
  ranks_[static_cast<size_t>(rank)].fetched.Reserve(ranks_.size() * shard * row_bytes);
}

void PeerGroup::Made(int rank, int piece, cudaStream_t stream) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.made[static_cast<size_t>(piece)].Record(stream);
  ++own.num_made;
}

void PeerGroup::ExchangePieces(int rank, const SharedRows& rows, SumAddNormParams sum,
                               cudaStream_t stream) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  cudaStream_t fetching = own.fetching->get();
  own.pointer = static_cast<const std::byte*>(rows.own);
  Meet(rank);  // every rank has recorded its pieces
  own.summed->Hold(fetching);
  const Pieces pieces(rows.num_rows, world());
  const RowRange mine = ShardOfRows(rows.num_rows, rank, world());
  const size_t block = static_cast<size_t>(mine.count) * rows.row_bytes,
               skipped = static_cast<size_t>(mine.begin) * rows.row_bytes;
  const int piece = pieces.Of(rank);
  sum.world = world();
  sum.partial[rank] = static_cast<const bf16*>(rows.own);
  // Those that make this rank's piece first come first: the ones in front of it.
  for (int i = 1; i <= world(); ++i) {
    const int from = (piece * pieces.owners() + 2 * world() - i) % world();
    if (from == rank) continue;
    const Rank& other = ranks_[static_cast<size_t>(from)];
    std::byte* to = own.fetched.as<std::byte>() + static_cast<size_t>(from) * block;
    other.made[static_cast<size_t>(piece)].Hold(fetching);
    if (block > 0)
      Check(cudaMemcpyAsync(to, other.pointer + skipped, block, cudaMemcpyDefault, fetching));
    sum.partial[from] = reinterpret_cast<const bf16*>(to - skipped);
  }
  own.done->Record(fetching);
  own.done->Hold(stream);
  SumAddNorm(sum, stream);
  own.summed->Record(stream);
  // What the others have fetched may change.
  Meet(rank);
  for (const Rank& other : ranks_) {
    if (&other != &own) other.done->Hold(stream);
  }
}

void PeerGroup::Join(int rank) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.ready = std::make_unique<Event>();
  own.done = std::make_unique<Event>();
  own.fetching = std::make_unique<Stream>();
  own.summed = std::make_unique<Event>();
  own.made = std::vector<Event>(ranks_.size());
  if (!apart_ || own.inbox.size() > 0) return;
  const auto ranks = static_cast<size_t>(world());
  own.inbox = DeviceBuffer(2 * ranks * kSlotBytes);
  own.flags = DeviceBuffer((ranks + 1) * kMostPushBlocks * sizeof(uint32_t), /*zeroed=*/true);
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
  const size_t bytes = static_cast<size_t>(rows.num_rows) * rows.row_bytes;
  bool& pushed = ranks_[static_cast<size_t>(rank)].pushed;
  pushed = !rows.sharded && Pushable(bytes, bytes);
  if (pushed) {
    const auto [push, parts] = NextPush(rank, rows.own, bytes, bytes);
    Push(push, stream);
    return parts;
  }
  Publish(rank, rows.own, stream);
  Parts parts{};
  for (size_t r = 0; r < ranks_.size(); ++r) parts[r] = ranks_[r].pointer;
  return parts;
}

void PeerGroup::Release(int rank, cudaStream_t stream) {
  // The inbox has another half; what was pushed lies with the others by now.
  if (world() == 1 || ranks_[static_cast<size_t>(rank)].pushed) return;
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.done->Record(stream);
  Meet(rank);
  for (const Rank& other : ranks_) {
    if (&other != &own) other.done->Hold(stream);
  }
}

void PeerGroup::GatherRows(int rank, const void* own, int num_rows, size_t row_bytes, void* all,
                           cudaStream_t stream) {
  const size_t most = static_cast<size_t>(ShardOfRows(num_rows, 0, world()).count) * row_bytes;
  bool& pushed = ranks_[static_cast<size_t>(rank)].pushed;
  pushed = Pushable(most, row_bytes);
  Parts parts{};
  if (pushed) {
    const RowRange mine = ShardOfRows(num_rows, rank, world());
    PushParams push;
    std::tie(push, parts) = NextPush(rank, own, static_cast<size_t>(mine.count) * row_bytes, most);
    Push(push, stream);
  } else {
    Publish(rank, own, stream);
    for (size_t r = 0; r < ranks_.size(); ++r) parts[r] = ranks_[r].pointer;
  }
  // Beginning with the next rank, so that not all read from one.
  for (int i = 1; i <= world(); ++i) {
    const int r = (rank + i) % world();
    const RowRange rows = ShardOfRows(num_rows, r, world());
    if (rows.count == 0) continue;
    Check(
        cudaMemcpyAsync(static_cast<std::byte*>(all) + static_cast<size_t>(rows.begin) * row_bytes,
                        parts[static_cast<size_t>(r)], static_cast<size_t>(rows.count) * row_bytes,
                        cudaMemcpyDefault, stream));
  }
  Release(rank, stream);
}

}  // namespace statetap::cuda
