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
#include <utility>
#include <vector>

#include "bench/random_fill.h"
#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/device_group.h"
#include "extractor/backend/cuda/owners.h"

namespace statetap::bench {

enum class Exchange {
  kNone,    // a rank adds its own rows alone
  kSerial,  // the other ranks' rows are read as they are added up, all of them
  kPieces,  // as the product does it: copied by copy engines while later pieces are made
  // As with two halves of the tokens in flight: rows are copied by copy engines beside the next
  // half of a layer, which does not wait for them; the one behind it does.
  kOverlapped,
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
  void Reserve(int rank, int num_rows, size_t row_bytes, bool sharded) override {
    if (sharded) of(rank).staging.Reserve(static_cast<size_t>(num_rows) * row_bytes);
  }
  Parts Share(int, const cuda::SharedRows&, cudaStream_t) override { return {}; }
  void Release(int, cudaStream_t) override {}

  void ExchangeAddNorm(int rank, const cuda::SharedRows& rows, cuda::SumAddNormParams sum,
                       cudaStream_t stream) override {
    const auto* own = static_cast<const cuda::bf16*>(rows.own);
    const bool exchanges = rows.sharded && exchange != Exchange::kNone;
    sum.world = exchanges ? world() : 1;
    std::fill_n(sum.partial, sum.world, own);
    if (!exchanges) return cuda::SumAddNorm(sum, stream);
    const RowRange mine = ShardOfRows(rows.num_rows, rank, world());
    const auto* theirs = static_cast<const cuda::bf16*>(Publish(rank, own, stream));
    Rank& here = of(rank);
    const size_t block = static_cast<size_t>(mine.count) * rows.row_bytes,
                 skipped = static_cast<size_t>(mine.begin) * rows.row_bytes;
    const auto part = [&](const void* shard) {
      return reinterpret_cast<const cuda::bf16*>(static_cast<const std::byte*>(shard) - skipped);
    };
    const bool in_pieces = std::exchange(here.num_made, 0) > 0;
    if (exchange == Exchange::kOverlapped) here.copied.Hold(stream);  // behind the last half
    if (exchange != Exchange::kSerial) {
      here.summed.Hold(here.copies.get());
      if (!in_pieces) here.ready.Hold(here.copies.get());
    }
    // Another shard of the other rank's for each rank, in the order in which they are made.
    const cuda::Pieces pieces(rows.num_rows, world());
    for (int i = 0; i < world(); ++i) {
      const int piece = pieces.Made(rank, i / pieces.owners()),
                r = piece * pieces.owners() + i % pieces.owners();
      if (r == rank) continue;
      const std::byte* from =
          reinterpret_cast<const std::byte*>(theirs) + static_cast<size_t>(r) * block;
      sum.partial[r] = part(from);
      if (exchange == Exchange::kSerial) continue;
      if (in_pieces) other(rank).made[static_cast<size_t>(piece)].Hold(here.copies.get());
      auto* place = here.staging.as<std::byte>() + static_cast<size_t>(r) * block;
      Copy(place, from, block, here.copies.get());
      sum.partial[r] = part(place);
    }
    if (exchange != Exchange::kSerial) here.copied.Record(here.copies.get());
    if (exchange == Exchange::kPieces) here.copied.Hold(stream);
    sum.partial[rank] = own;
    cuda::SumAddNorm(sum, stream);
    here.summed.Record(stream);
    Return(rank, stream);
  }
  bool TakesPieces() const override { return exchange == Exchange::kPieces; }
  void Made(int rank, int piece, cudaStream_t stream) override {
    of(rank).made[static_cast<size_t>(piece)].Record(stream);
    ++of(rank).num_made;
  }

  // Small rows: the choice of experts. It is this rank's own, repeated, so that the routing is
  // real.
  void GatherRows(int rank, const void* own, int num_rows, size_t row_bytes, void* all,
                  cudaStream_t stream) override {
    const RowRange mine = ShardOfRows(num_rows, rank, world());
    Rank& here = of(rank);
    if (row_bytes <= 64) {
      const size_t bytes = static_cast<size_t>(mine.count) * row_bytes;
      cuda::DeviceBuffer& kept = here.kept[{bytes, here.small_gathers++}];
      kept.Reserve(bytes);
      if (exchange == Exchange::kNone)
        Repeat(own, static_cast<int64_t>(bytes), kept.as<void>(), static_cast<int64_t>(bytes),
               stream);
      // By a kernel: a copy would queue behind the large ones on the copy engine.
      return Repeat(kept.as<void>(), static_cast<int64_t>(bytes), all,
                    static_cast<int64_t>(static_cast<size_t>(num_rows) * row_bytes), stream);
    }
    if (exchange == Exchange::kNone) {
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
    const void* theirs = Publish(rank, own, stream);
    const bool beside = exchange == Exchange::kOverlapped;
    if (beside) here.ready.Hold(here.copies.get());
    for (int r = 0; r < world(); ++r) {
      const RowRange rows = ShardOfRows(num_rows, r, world());
      Copy(static_cast<std::byte*>(all) + static_cast<size_t>(rows.begin) * row_bytes,
           r == rank ? own : theirs,
           static_cast<size_t>(std::min(rows.count, mine.count)) * row_bytes,
           beside ? here.copies.get() : stream);
    }
    if (beside) here.copied.Record(here.copies.get());
    Return(rank, stream);
  }

 private:
  struct Rank {
    cuda::Event ready, done, copied, summed;
    std::array<cuda::Event, cuda::kMaxRanks> made;
    int num_made = 0;
    cuda::Stream copies;
    cuda::DeviceBuffer staging;
    int small_gathers = 0;                                      // of the step
    std::map<std::pair<size_t, int>, cuda::DeviceBuffer> kept;  // by size and number
    std::map<const void*, size_t> filled;                       // bytes by buffer
    const void* pointer = nullptr;
  };
  Rank& of(int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  Rank& other(int rank) { return *ranks_[ranks_.size() - 1 - static_cast<size_t>(rank)]; }
  static void Copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    cuda::Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
  }
  // The other rank's pointer, once its stream has come as far as this one.
  const void* Publish(int rank, const void* pointer, cudaStream_t stream) {
    of(rank).pointer = pointer;
    of(rank).ready.Record(stream);
    meeting_.arrive_and_wait();
    const void* theirs = other(rank).pointer;
    if (of(rank).num_made > 0) return theirs;  // each piece is waited for
    if (exchange != Exchange::kOverlapped) other(rank).ready.Hold(stream);
    if (exchange != Exchange::kSerial) other(rank).ready.Hold(of(rank).copies.get());
    return theirs;
  }
  // Behind the exchange; where the next op waits for it, until the other rank has read.
  void Return(int rank, cudaStream_t stream) {
    const bool waits = exchange != Exchange::kOverlapped;
    if (waits) of(rank).done.Record(stream);
    meeting_.arrive_and_wait();  // what was published has been taken
    if (waits) other(rank).done.Hold(stream);
  }

  std::barrier<> meeting_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace statetap::bench
