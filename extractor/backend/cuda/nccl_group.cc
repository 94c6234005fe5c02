// NCCL as the carrier of rows, between GPUs that cannot read each other's memory (or where that is
// asked for). Only sends and receives: NCCL's own sums round in bf16 at every hop, in an order that
// depends on the size.
#include <nccl.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/device_group.h"
#include "extractor/backend/cuda/owners.h"

namespace statetap::cuda {
namespace {

constexpr int kPollsBetweenLooks = 1024;

void CheckNccl(ncclResult_t code, std::source_location where = std::source_location::current()) {
  if (code != ncclSuccess && code != ncclInProgress)
    Fail(std::string("NCCL: ") + ncclGetErrorString(code), where);
}

class NcclGroup final : public DeviceGroup {
 public:
  explicit NcclGroup(const std::vector<int>& devices)
      : DeviceGroup(static_cast<int>(devices.size())), ranks_(devices.size()) {
    // Multicast can put the GPUs of a shared host out of service; other settings stay as they are.
    setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/1);
    ncclUniqueId id;
    CheckNccl(ncclGetUniqueId(&id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // or a rank that does not come holds the others for ever
    CheckNccl(ncclGroupStart());
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      Check(cudaSetDevice(devices[rank]));
      CheckNccl(
          ncclCommInitRankConfig(&ranks_[rank].comm, world(), id, static_cast<int>(rank), &config));
    }
    CheckNccl(ncclGroupEnd());
    for (size_t rank = 0; rank < devices.size(); ++rank) Await(static_cast<int>(rank));
  }
  ~NcclGroup() override {
    for (const Rank& rank : ranks_) {
      if (rank.comm != nullptr) ncclCommAbort(rank.comm);  // nothing is under way any more
    }
  }
  const char* name() const override { return "NCCL"; }
  void Join(int) override {}

  void Reserve(int rank, const SharedRows& rows) override {
    const int wanted = rows.sharded ? ShardOfRows(rows.num_rows, 0, world()).count : rows.num_rows;
    of(rank).staging.Reserve(static_cast<size_t>(wanted) * rows.row_bytes *
                             static_cast<size_t>(world() - 1));
  }

  Parts Share(int rank, const SharedRows& rows, cudaStream_t stream) override {
    const auto wanted = [&](int r) {
      return rows.sharded ? ShardOfRows(rows.num_rows, r, world()) : RowRange{0, rows.num_rows};
    };
    const auto* own = static_cast<const std::byte*>(rows.own);
    const RowRange mine = wanted(rank);
    const size_t block = static_cast<size_t>(mine.count) * rows.row_bytes,
                 skipped = static_cast<size_t>(mine.begin) * rows.row_bytes;
    Parts parts{};
    Batch batch(*this, rank);
    auto* staging = of(rank).staging.as<std::byte>();
    for (int r = 0; r < world(); ++r) {
      if (r == rank) {
        parts[static_cast<size_t>(r)] = own;
        continue;
      }
      const RowRange theirs = wanted(r);
      batch.Send(own + static_cast<size_t>(theirs.begin) * rows.row_bytes,
                 static_cast<size_t>(theirs.count) * rows.row_bytes, r, stream);
      batch.Receive(staging, block, r, stream);
      parts[static_cast<size_t>(r)] = staging - skipped;
      staging += block;
    }
    batch.End();
    return parts;
  }

  // A stream's next Share comes after what reads this one.
  void Release(int, cudaStream_t) override {}

  void GatherRows(int rank, const void* own, int num_rows, size_t row_bytes, void* all,
                  cudaStream_t stream) override {
    const auto place = [&](const RowRange& rows) {
      return static_cast<std::byte*>(all) + static_cast<size_t>(rows.begin) * row_bytes;
    };
    const RowRange mine = ShardOfRows(num_rows, rank, world());
    const size_t block = static_cast<size_t>(mine.count) * row_bytes;
    if (block > 0 && place(mine) != own)
      Check(cudaMemcpyAsync(place(mine), own, block, cudaMemcpyDeviceToDevice, stream));
    Batch batch(*this, rank);
    for (int r = 0; r < world(); ++r) {
      if (r == rank) continue;
      const RowRange theirs = ShardOfRows(num_rows, r, world());
      batch.Send(own, block, r, stream);
      batch.Receive(place(theirs), static_cast<size_t>(theirs.count) * row_bytes, r, stream);
    }
    batch.End();
  }

 protected:
  void End(int rank) override {
    // Its kernels that wait for others come to an end with it.
    if (ncclComm_t& comm = of(rank).comm; comm != nullptr) ncclCommAbort(std::exchange(comm, {}));
  }

 private:
  struct Rank {
    ncclComm_t comm = nullptr;
    DeviceBuffer staging;  // the others' rows, one behind the other
  };

  // The sends and receives of one exchange.
  class Batch {
   public:
    Batch(NcclGroup& group, int rank) : group_(group), rank_(rank) {
      group.ThrowIfAborted(rank);
      CheckNccl(ncclGroupStart());
    }
    void Send(const void* from, size_t bytes, int to, cudaStream_t stream) {
      if (bytes > 0) CheckNccl(ncclSend(from, bytes, ncclUint8, to, comm(), stream));
    }
    void Receive(void* to, size_t bytes, int from, cudaStream_t stream) {
      if (bytes > 0) CheckNccl(ncclRecv(to, bytes, ncclUint8, from, comm(), stream));
    }
    // All is enqueued when it returns.
    void End() {
      CheckNccl(ncclGroupEnd());
      group_.Await(rank_);
    }

   private:
    ncclComm_t comm() const { return group_.of(rank_).comm; }
    NcclGroup& group_;
    const int rank_;
  };

  Rank& of(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  void Await(int rank) {
    for (int poll = 1;; ++poll) {
      ncclResult_t state;
      CheckNccl(ncclCommGetAsyncError(of(rank).comm, &state));
      CheckNccl(state);
      if (state == ncclSuccess) return;
      if (poll % kPollsBetweenLooks != 0) continue;
      ThrowIfAborted(rank);
      std::this_thread::yield();
    }
  }

  std::vector<Rank> ranks_;
};

}  // namespace

std::shared_ptr<DeviceGroup> MakeNcclGroup(const std::vector<int>& devices) {
  return std::make_shared<NcclGroup>(devices);
}

}  // namespace statetap::cuda
