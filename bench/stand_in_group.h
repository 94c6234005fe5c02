// One or two ranks of eight, each on a GPU of its own: the others' part in an exchange is left out,
// or played by the other GPU (by the rank itself where there is one GPU). A rank then moves the
// bytes that it would move among eight, all of them over one link. What is summed then are not the
// sums of a model, so tokens keep the experts that they chose without exchanges.
#pragma once

#include <algorithm>
#include <array>
#include <barrier>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bench/random_fill.h"
#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/device_group.h"
#include "extractor/backend/cuda/owners.h"

namespace statetap::bench {

enum class Exchange {
  kNone,    // a rank adds its own rows alone
  kTurns,   // the same, the halves of a step in turns
  kSerial,  // the other ranks' rows are read as they are added up, all of them
  kHalves,  // as the product does it: one half's rows travel beside the other half's ops
};

class StandInGroup final : public cuda::DeviceGroup {
 public:
  StandInGroup(int world, std::vector<int> devices)
      : DeviceGroup(world), meeting_(static_cast<std::ptrdiff_t>(devices.size())) {
    for (const int device : devices) {
      cuda::Check(cudaSetDevice(device));
      ranks_.emplace_back(std::make_unique<Rank>());
      for (const int other : devices) {
        if (other == device) continue;
        const cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
        if (code != cudaErrorPeerAccessAlreadyEnabled) cuda::Check(code);
      }
      (void)cudaGetLastError();
    }
  }
  const char* name() const override { return "a stand-in"; }
  Exchange exchange = Exchange::kNone;  // between steps

  void Join(int) override {}
  void BeginStep(int rank) override { of(rank).small_gathers = 0; }
  bool Recordable(size_t, size_t) const override { return exchange == Exchange::kNone; }
  void Reserve(int rank, const cuda::SharedRows& rows) override {
    if (rows.sharded) of(rank).staging.Reserve(static_cast<size_t>(rows.num_rows) * rows.row_bytes);
  }
  Parts Share(int, const cuda::SharedRows&, cudaStream_t) override { return {}; }
  void Release(int, cudaStream_t) override {}

  void ExchangeAddNorm(int rank, const cuda::SharedRows& rows, cuda::SumAddNormParams sum,
                       cudaStream_t stream) override {
    const auto* own = static_cast<const cuda::bf16*>(rows.own);
    const bool exchanges = rows.sharded && !alone();
    sum.world = exchanges ? world() : 1;
    std::fill_n(sum.partial, sum.world, own);
    if (!exchanges) return cuda::SumAddNorm(sum, stream);
    const RowRange mine = ShardOfRows(rows.num_rows, rank, world());
    const size_t block = static_cast<size_t>(mine.count) * rows.row_bytes,
                 skipped = static_cast<size_t>(mine.begin) * rows.row_bytes;
    const bool sent = rows.half >= 0;
    const auto* theirs = sent ? of(rank).staging.as<const std::byte>()
                              : static_cast<const std::byte*>(Publish(rank, own, stream));
    if (sent) Done(rank, rows.half).Hold(stream);
    for (int r = 0; r < world(); ++r) {
      if (r == rank) continue;
      sum.partial[r] =
          reinterpret_cast<const cuda::bf16*>(theirs + static_cast<size_t>(r) * block - skipped);
    }
    cuda::SumAddNorm(sum, stream);
    of(rank).summed.Record(stream);
    if (!sent) Done(rank, rows.half).Record(stream);
    Return(rank, rows.half, stream);
  }

  bool Overlaps() const override {
    return exchange == Exchange::kTurns || exchange == Exchange::kHalves;
  }
  // Another shard of the other rank's for each rank.
  void Send(int rank, const cuda::SharedRows& rows, cudaStream_t stream) override {
    if (rows.half < 0 || alone()) return;
    Rank& here = of(rank);
    cudaStream_t copies = here.copies.get();
    const auto* theirs = static_cast<const std::byte*>(Publish(rank, rows.own, copies, stream));
    here.summed.Hold(copies);
    const size_t block =
        static_cast<size_t>(ShardOfRows(rows.num_rows, rank, world()).count) * rows.row_bytes;
    std::vector<cuda::RowCopy> blocks;
    for (int r = 0; r < world(); ++r) {
      const size_t at = static_cast<size_t>(r) * block;
      if (r != rank) blocks.push_back({here.staging.as<std::byte>() + at, theirs + at, block});
    }
    cuda::CopyTogether(std::move(blocks), copies);
    Done(rank, rows.half).Record(copies);
  }
  void GatherBeside(int rank, int half, std::span<const GatherParams> arrays, int num_rows,
                    cudaStream_t stream) override {
    for (const GatherParams& p : arrays) {
      if (alone() || p.row_bytes <= kSmallRow)
        GatherRows(rank, p.own, num_rows, p.row_bytes, p.all, stream);
    }
    if (alone()) return;
    Rank& here = of(rank);
    cudaStream_t copies = here.copies.get();
    const auto* theirs =
        static_cast<const std::byte*>(Publish(rank, arrays[0].own, copies, stream));
    here.ready[here.publishes % 2].Hold(copies);
    here.summed.Hold(copies);
    std::vector<cuda::RowCopy> blocks;
    for (const GatherParams& p : arrays) {
      // Small rows are not the ones that count: they go where large ones were.
      const bool small = p.row_bytes <= kSmallRow;
      AddBlocks(rank, p.own, theirs, num_rows, p.row_bytes,
                static_cast<std::byte*>(small ? here.staging.as<void>() : p.all), blocks);
    }
    cuda::CopyTogether(std::move(blocks), copies);
    Done(rank, half).Record(copies);
    here.gathers[static_cast<size_t>(half)] = true;
  }
  void Arrive(int rank, int half, cudaStream_t stream) override {
    if (!std::exchange(of(rank).gathers[static_cast<size_t>(half)], false)) return;
    Done(rank, half).Hold(stream);
    Return(rank, half, stream);
  }

  // Small rows: the choice of experts. It is this rank's own, repeated, so that the routing is
  // real.
  void GatherRows(int rank, const void* own, int num_rows, size_t row_bytes, void* all,
                  cudaStream_t stream) override {
    const RowRange mine = ShardOfRows(num_rows, rank, world());
    Rank& here = of(rank);
    if (row_bytes <= kSmallRow) {
      const size_t bytes = static_cast<size_t>(mine.count) * row_bytes;
      cuda::DeviceBuffer& kept = here.kept[{bytes, here.small_gathers++}];
      if (kept.size() < bytes && !alone()) cuda::Fail("steps of this kind want a run alone first");
      kept.Reserve(bytes);
      if (alone())
        Repeat(own, static_cast<int64_t>(bytes), kept.as<void>(), static_cast<int64_t>(bytes),
               stream);
      // By a kernel: a copy would queue behind the large ones on the copy engine.
      return Repeat(kept.as<void>(), static_cast<int64_t>(bytes), all,
                    static_cast<int64_t>(static_cast<size_t>(num_rows) * row_bytes), stream);
    }
    if (alone()) {
      // The others' rows stay what they are from here on: nobody times zeros, which take less
      // power.
      size_t& filled = here.filled[all];
      const size_t bytes = static_cast<size_t>(num_rows) * row_bytes;
      if (filled < bytes) {
        FillNormal(static_cast<cuda::bf16*>(all), static_cast<int64_t>(bytes / sizeof(cuda::bf16)),
                   1, 78);
        cuda::Check(cudaDeviceSynchronize());
        filled = bytes;
      }
      return;
    }
    std::vector<cuda::RowCopy> blocks;
    AddBlocks(rank, own, Publish(rank, own, stream), num_rows, row_bytes,
              static_cast<std::byte*>(all), blocks);
    cuda::CopyTogether(std::move(blocks), stream);
    Done(rank, -1).Record(stream);
    Return(rank, -1, stream);
  }

 private:
  static constexpr size_t kSmallRow = 64;
  struct Rank {
    std::array<cuda::Event, 2> ready;  // of a publication and the next
    std::array<const void*, 2> pointer{};
    size_t publishes = 0;
    std::array<cuda::Event, 2> done;  // of each half; the first one's of a step in one
    std::array<bool, 2> gathers{};
    cuda::Event summed;
    cuda::Stream copies;
    cuda::DeviceBuffer staging;
    int small_gathers = 0;                                      // of the step
    std::map<std::pair<size_t, int>, cuda::DeviceBuffer> kept;  // by size and number
    std::map<const void*, size_t> filled;                       // bytes by buffer
  };
  bool alone() const { return exchange == Exchange::kNone || exchange == Exchange::kTurns; }
  Rank& of(int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  static cuda::Event& DoneOf(Rank& rank, int half) {
    return rank.done[static_cast<size_t>(std::max(0, half))];
  }
  cuda::Event& Done(int rank, int half) { return DoneOf(of(rank), half); }
  Rank& other(int rank) { return *ranks_[ranks_.size() - 1 - static_cast<size_t>(rank)]; }
  // A row of blocks, as of every rank: its own, and the other rank's again and again.
  void AddBlocks(int rank, const void* own, const void* theirs, int num_rows, size_t row_bytes,
                 std::byte* all, std::vector<cuda::RowCopy>& blocks) const {
    const int most = ShardOfRows(num_rows, rank, world()).count;
    for (int r = 0; r < world(); ++r) {
      const RowRange rows = ShardOfRows(num_rows, r, world());
      blocks.push_back({all + static_cast<size_t>(rows.begin) * row_bytes, r == rank ? own : theirs,
                        static_cast<size_t>(std::min(rows.count, most)) * row_bytes});
    }
  }
  // The other rank's pointer; `reader` waits for what its stream has made at it.
  const void* Publish(int rank, const void* pointer, cudaStream_t reader,
                      cudaStream_t stream = nullptr) {
    const size_t which = ++of(rank).publishes % 2;
    of(rank).pointer[which] = pointer;
    of(rank).ready[which].Record(stream == nullptr ? reader : stream);
    meeting_.arrive_and_wait();
    other(rank).ready[which].Hold(reader);
    return other(rank).pointer[which];
  }
  // Behind the exchange: until the other rank has read.
  void Return(int rank, int half, cudaStream_t stream) {
    meeting_.arrive_and_wait();
    DoneOf(other(rank), half).Hold(stream);
  }

  std::barrier<> meeting_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace statetap::bench
