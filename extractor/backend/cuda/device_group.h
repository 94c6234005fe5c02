// How the ranks of a CUDA group pass rows to each other. One object a group, shared by its ranks;
// a rank calls from its own thread, and all ranks make the same calls in the same order. Nothing
// is added here: what the others made is brought into reach, and the rank adds it up itself, in
// rank order. So every way of passing rows gives the same bits.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "extractor/backend/backend.h"
#include "extractor/backend/cuda/rows.h"

namespace statetap::cuda {

// Rows of a step that every rank has in whole: its partial sums.
struct SharedRows {
  const void* own;  // [num_rows, row_bytes]
  int num_rows;
  size_t row_bytes;
  // Each rank reads its own shard of them; else each reads all.
  bool sharded;
  int half = -1;  // of a step: Step::half
};

class DeviceGroup {
 public:
  explicit DeviceGroup(int world);
  virtual ~DeviceGroup() = default;
  int world() const { return world_; }
  virtual const char* name() const = 0;

  // By each rank on its construction, its device current.
  virtual void Join(int rank) = 0;
  // Before the first Share of a step, all ranks having ended the step before; nothing is allocated
  // on any rank from then on.
  virtual void BeginStep(int /*rank*/) {}
  // Room for the exchange of such rows (own: null). May allocate: not in the layer loop.
  virtual void Reserve(int rank, const SharedRows& rows);

  // What comes next on `stream` may read, of every rank r's rows, those that this rank asked for:
  // row i lies at parts[r] + i · row_bytes. Until Release, what `stream` made at `own` stays.
  using Parts = std::array<const std::byte*, kMaxRanks>;
  virtual Parts Share(int rank, const SharedRows& rows, cudaStream_t stream) = 0;
  virtual void Release(int rank, cudaStream_t stream) = 0;
  // SumAddNorm of `rows` (sum.partial and sum.world are filled in here), which may change behind
  // it.
  virtual void ExchangeAddNorm(int rank, const SharedRows& rows, SumAddNormParams sum,
                               cudaStream_t stream);
  // What one half of a step exchanges travels beside the other half's ops: its partial sums from
  // Send to its ExchangeAddNorm, and no other half's at the same time; gathered rows from
  // GatherBeside to Arrive, until when `own` stays.
  virtual bool Overlaps() const { return false; }
  virtual void Send(int /*rank*/, const SharedRows& /*rows*/, cudaStream_t /*stream*/) {}
  virtual void GatherBeside(int rank, int /*half*/, std::span<const GatherParams> arrays,
                            int num_rows, cudaStream_t stream) {
    for (const GatherParams& p : arrays)
      GatherRows(rank, p.own, num_rows, p.row_bytes, p.all, stream);
  }
  virtual void Arrive(int /*rank*/, int /*half*/, cudaStream_t /*stream*/) {}
  // Whether exchanges of up to so many bytes a rank, in multiples of `unit`, go without the host,
  // so that a graph can hold them.
  virtual bool Recordable(size_t /*bytes*/, size_t /*unit*/) const { return world_ == 1; }
  // all[t] = the row of the rank that owns it: ShardOfRows(num_rows, r, world).
  virtual void GatherRows(int rank, const void* own, int num_rows, size_t row_bytes, void* all,
                          cudaStream_t stream) = 0;

  // Calls that wait, now or later, throw RankAborted. From any thread.
  void Abort() {
    aborted_.store(true);
    OnAbort();
  }
  // On the rank's own thread: ends what the group still runs on the rank's device, then throws.
  void ThrowIfAborted(int rank);

 protected:
  virtual void End(int /*rank*/) {}
  virtual void OnAbort() {}

 private:
  const int world_;
  std::atomic<bool> aborted_ = false;
};

class DeviceCommunicator final : public Communicator {
 public:
  DeviceCommunicator(int rank, std::shared_ptr<DeviceGroup> group)
      : rank_(rank), group_(std::move(group)) {}
  int rank() const override { return rank_; }
  int world() const override { return group_->world(); }
  void Abort() override { group_->Abort(); }

  void ExchangeAddNorm(const SharedRows& rows, const SumAddNormParams& sum,
                       cudaStream_t stream) const {
    group_->ExchangeAddNorm(rank_, rows, sum, stream);
  }
  void Send(const SharedRows& rows, cudaStream_t stream) const {
    group_->Send(rank_, rows, stream);
  }
  void GatherRows(const void* own, int num_rows, size_t row_bytes, void* all,
                  cudaStream_t stream) const {
    group_->GatherRows(rank_, own, num_rows, row_bytes, all, stream);
  }
  void GatherBeside(int half, std::span<const GatherParams> arrays, int num_rows,
                    cudaStream_t stream) const {
    group_->GatherBeside(rank_, half, arrays, num_rows, stream);
  }
  void Arrive(int half, cudaStream_t stream) const {
    if (half >= 0) group_->Arrive(rank_, half, stream);
  }
  void ThrowIfAborted() const { group_->ThrowIfAborted(rank_); }
  DeviceGroup& group() const { return *group_; }

 private:
  int rank_;
  std::shared_ptr<DeviceGroup> group_;
};

// Ranks of one process, rank r on devices[r], which differ: NCCL has no two ranks on a GPU.
// NVLink multicast stays off. Only where the build has NCCL.
std::shared_ptr<DeviceGroup> MakeNcclGroup(const std::vector<int>& devices);

}  // namespace statetap::cuda
