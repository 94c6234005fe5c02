// Ranks that reach each other's device memory: on GPUs with peer access, or sharing one GPU. The
// host threads meet, the streams are joined by events; no kernel spins, so ranks that share a GPU
// cannot block each other. Where each rank has a GPU of its own, small exchanges go without the
// host (push.h). What the halves of a large step exchange is fetched by copy engines, which take no
// multiprocessor from the products they run beside.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "extractor/backend/cuda/device_group.h"
#include "extractor/backend/cuda/owners.h"
#include "extractor/backend/cuda/push.h"

namespace statetap::cuda {

class PeerGroup final : public DeviceGroup {
 public:
  // `apart`: no two ranks on one GPU.
  explicit PeerGroup(int world, bool apart = false);
  const char* name() const override { return "peer memory"; }
  void Join(int rank) override;
  void BeginStep(int rank) override;
  void Reserve(int rank, const SharedRows& rows) override;
  bool Overlaps() const override { return world() > 1; }
  void Send(int rank, const SharedRows& rows, cudaStream_t stream) override;
  void GatherBeside(int rank, int half, std::span<const GatherParams> arrays, int num_rows,
                    cudaStream_t stream) override;
  void Arrive(int rank, int half, cudaStream_t stream) override;
  Parts Share(int rank, const SharedRows& rows, cudaStream_t stream) override;
  void Release(int rank, cudaStream_t stream) override;
  void ExchangeAddNorm(int rank, const SharedRows& rows, SumAddNormParams sum,
                       cudaStream_t stream) override;
  bool Recordable(size_t bytes, size_t unit) const override {
    return world() == 1 || Pushable(bytes, unit);
  }
  void GatherRows(int rank, const void* own, int num_rows, size_t row_bytes, void* all,
                  cudaStream_t stream) override;

 private:
  struct Rank {
    std::unique_ptr<Event> ready, done;
    const std::byte* pointer = nullptr;
    // Of pushes: [2][world][kSlotBytes], flags and counts [world + 1][kMostPushBlocks].
    DeviceBuffer inbox, flags;
    int next = 0;         // which half of the inbox comes next: the last exchange is still read
    bool pushed = false;  // the last Share
    // Of halves: what each has on its way, where the others' partial sums of this rank's shard are
    // fetched to, by which stream, and when they have been added up.
    struct Flight {
      // Of a call and the next: a rank may be one ahead of another that still looks.
      struct Departure {
        Event ready;
        std::vector<const std::byte*> arrays;
      };
      std::array<Departure, 2> departures;
      unsigned calls = 0;
      Event done;
      bool under_way = false, sums = false;  // sums: partial ones, on their way to `fetched`
    };
    std::vector<Flight> flights;
    DeviceBuffer fetched;
    std::unique_ptr<Stream> fetching;
    std::unique_ptr<Event> summed;
  };
  Rank::Flight& FlightOf(int rank, int half) {
    return ranks_[static_cast<size_t>(rank)].flights.at(static_cast<size_t>(half));
  }
  // The end of Send: from `fetched`, in rank order.
  void AddFetched(int rank, const SharedRows& rows, SumAddNormParams sum, cudaStream_t stream);
  // The others may fetch what `stream` has made so far at each `own`, and this rank what they have
  // made. Returns which of the departures it is, on every rank.
  size_t Depart(int rank, int half, std::span<const GatherParams> arrays, cudaStream_t stream);
  // Behind what this rank has fetched; what the others have fetched may change.
  void AwaitOthers(int rank, int half, cudaStream_t stream);
  // A block that a rank pushes: 64 rows of logits of an eighth of a large vocabulary. Larger ones
  // are read from the rank that has them.
  static constexpr size_t kSlotBytes = size_t{6} << 20;
  bool Pushable(size_t bytes, size_t unit) const {
    return apart_ && bytes <= kSlotBytes && unit % 16 == 0;
  }
  // Of the next push, and where rank r's block will lie, of every rank; this rank's own where it
  // is.
  std::pair<PushParams, Parts> NextPush(int rank, const void* own, size_t bytes, size_t most_bytes);
  std::byte* Slot(int of, int half, int from) const {
    return ranks_[static_cast<size_t>(of)].inbox.as<std::byte>() +
           static_cast<size_t>(half * world() + from) * kSlotBytes;
  }
  uint32_t* Flags(int of, int from) const {
    return ranks_[static_cast<size_t>(of)].flags.as<uint32_t>() + from * kMostPushBlocks;
  }
  void OnAbort() override;

  // What `stream` has made so far at `pointer` may be read by the others, theirs on `stream`.
  void Publish(int rank, const void* pointer, cudaStream_t stream);
  // Waits on the host for the other threads, not for the devices.
  void Meet(int rank);

  const bool apart_;
  std::vector<Rank> ranks_;
  PinnedBuffer aborted_word_;  // an int that kernels look at
  std::atomic<int> waiting_ = 0;
  std::atomic<uint64_t> round_ = 0;
};

}  // namespace statetap::cuda
