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

void DeviceGroup::Reserve(int, const SharedRows&) {}

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
  if (rows.half >= 0) return AddFetched(rank, rows, sum, stream);
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

void PeerGroup::Reserve(int rank, const SharedRows& rows) {
  if (rows.half < 0) return;
  const auto shard = static_cast<size_t>(ShardOfRows(rows.num_rows, 0, world()).count);
  ranks_[static_cast<size_t>(rank)].fetched.Reserve(ranks_.size() * shard * rows.row_bytes);
}

size_t PeerGroup::Depart(int rank, int half, std::span<const GatherParams> arrays,
                         cudaStream_t stream) {
  Rank::Flight& flight = FlightOf(rank, half);
  const size_t which = flight.calls++ % flight.departures.size();
  Rank::Flight::Departure& departure = flight.departures[which];
  departure.arrays.clear();
  for (const GatherParams& p : arrays)
    departure.arrays.push_back(static_cast<const std::byte*>(p.own));
  departure.ready.Record(stream);
  flight.under_way = true;
  Meet(rank);
  cudaStream_t fetching = ranks_[static_cast<size_t>(rank)].fetching->get();
  for (int r = 0; r < world(); ++r) FlightOf(r, half).departures[which].ready.Hold(fetching);
  return which;
}

void PeerGroup::AwaitOthers(int rank, int half, cudaStream_t stream) {
  FlightOf(rank, half).under_way = false;
  Meet(rank);  // every rank has enqueued its copies
  for (int r = 0; r < world(); ++r) {
    if (r != rank) FlightOf(r, half).done.Hold(stream);
  }
}

void PeerGroup::Send(int rank, const SharedRows& rows, cudaStream_t stream) {
  if (rows.half < 0) return;
  Rank& own = ranks_[static_cast<size_t>(rank)];
  if (FlightOf(rank, 1 - rows.half).sums) Fail("partial sums of both halves on their way at once");
  const GatherParams partial{rows.own, nullptr, rows.row_bytes};
  const size_t which = Depart(rank, rows.half, {&partial, 1}, stream);
  cudaStream_t fetching = own.fetching->get();
  own.summed->Hold(fetching);
  const RowRange mine = ShardOfRows(rows.num_rows, rank, world());
  const size_t block = static_cast<size_t>(mine.count) * rows.row_bytes;
  std::vector<RowCopy> copies;
  for (int i = 1; i < world(); ++i) {
    const int from = (rank + i) % world();
    copies.push_back({own.fetched.as<std::byte>() + static_cast<size_t>(from) * block,
                      FlightOf(from, rows.half).departures[which].arrays[0] +
                          static_cast<size_t>(mine.begin) * rows.row_bytes,
                      block});
  }
  CopyTogether(std::move(copies), fetching);
  FlightOf(rank, rows.half).sums = true;
  FlightOf(rank, rows.half).done.Record(fetching);
}

void PeerGroup::AddFetched(int rank, const SharedRows& rows, SumAddNormParams sum,
                           cudaStream_t stream) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  Rank::Flight& flight = FlightOf(rank, rows.half);
  flight.sums = false;
  flight.done.Hold(stream);
  const RowRange mine = ShardOfRows(rows.num_rows, rank, world());
  const size_t block = static_cast<size_t>(mine.count) * rows.row_bytes,
               skipped = static_cast<size_t>(mine.begin) * rows.row_bytes;
  sum.world = world();
  for (int r = 0; r < world(); ++r) {
    sum.partial[r] = r == rank
                         ? static_cast<const bf16*>(rows.own)
                         : reinterpret_cast<const bf16*>(own.fetched.as<std::byte>() +
                                                         static_cast<size_t>(r) * block - skipped);
  }
  SumAddNorm(sum, stream);
  own.summed->Record(stream);
  AwaitOthers(rank, rows.half, stream);
}

void PeerGroup::GatherBeside(int rank, int half, std::span<const GatherParams> arrays, int num_rows,
                             cudaStream_t stream) {
  const size_t which = Depart(rank, half, arrays, stream);
  std::vector<RowCopy> own, others;
  for (size_t a = 0; a < arrays.size(); ++a) {
    const size_t row = arrays[a].row_bytes;
    for (int i = 0; i < world(); ++i) {
      const int from = (rank + i) % world();
      const RowRange rows = ShardOfRows(num_rows, from, world());
      (from == rank ? own : others)
          .push_back(
              {static_cast<std::byte*>(arrays[a].all) + static_cast<size_t>(rows.begin) * row,
               FlightOf(from, half).departures[which].arrays[a],
               static_cast<size_t>(rows.count) * row});
    }
  }
  cudaStream_t fetching = ranks_[static_cast<size_t>(rank)].fetching->get();
  CopyTogether(std::move(own), stream);
  CopyTogether(std::move(others), fetching);
  FlightOf(rank, half).done.Record(fetching);
}

void PeerGroup::Arrive(int rank, int half, cudaStream_t stream) {
  Rank::Flight& flight = FlightOf(rank, half);
  if (!flight.under_way) return;
  flight.done.Hold(stream);
  AwaitOthers(rank, half, stream);
}

void PeerGroup::Join(int rank) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.ready = std::make_unique<Event>();
  own.done = std::make_unique<Event>();
  own.fetching = std::make_unique<Stream>();
  own.summed = std::make_unique<Event>();
  own.flights = std::vector<Rank::Flight>(2);
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
  std::vector<RowCopy> copies;
  for (int i = 1; i <= world(); ++i) {
    const int r = (rank + i) % world();
    const RowRange rows = ShardOfRows(num_rows, r, world());
    copies.push_back({static_cast<std::byte*>(all) + static_cast<size_t>(rows.begin) * row_bytes,
                      parts[static_cast<size_t>(r)], static_cast<size_t>(rows.count) * row_bytes});
  }
  if (!pushed) {
    CopyTogether(std::move(copies), stream);
  } else {  // may be recorded, which a batch cannot be
    for (const RowCopy& copy : copies) {
      if (copy.bytes > 0 && copy.to != copy.from)
        Check(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream));
    }
  }
  Release(rank, stream);
}

}  // namespace statetap::cuda
