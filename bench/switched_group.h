// One carrier of rows at a time, changed between steps; the ranks keep their weights.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "extractor/backend/cuda/device_group.h"

namespace statetap::bench {

class SwitchedGroup final : public cuda::DeviceGroup {
 public:
  using Groups = std::vector<std::shared_ptr<cuda::DeviceGroup>>;
  explicit SwitchedGroup(Groups groups)
      : DeviceGroup(groups.at(0)->world()), groups_(std::move(groups)), now_(groups_[0].get()) {}
  // No step runs.
  void Use(size_t group) { now_ = groups_.at(group).get(); }

  const char* name() const override { return now_->name(); }
  void Join(int rank) override {
    for (const auto& group : groups_) group->Join(rank);
  }
  void BeginStep(int rank) override { now_->BeginStep(rank); }
  void Reserve(int rank, const cuda::SharedRows& rows) override {
    for (const auto& group : groups_) group->Reserve(rank, rows);
  }
  Parts Share(int rank, const cuda::SharedRows& rows, cudaStream_t stream) override {
    return now_->Share(rank, rows, stream);
  }
  void Release(int rank, cudaStream_t stream) override { now_->Release(rank, stream); }
  void ExchangeAddNorm(int rank, const cuda::SharedRows& rows, cuda::SumAddNormParams sum,
                       cudaStream_t stream) override {
    now_->ExchangeAddNorm(rank, rows, sum, stream);
  }
  bool Overlaps() const override { return now_->Overlaps(); }
  void Send(int rank, const cuda::SharedRows& rows, cudaStream_t stream) override {
    now_->Send(rank, rows, stream);
  }
  void GatherBeside(int rank, int half, std::span<const GatherParams> arrays, int num_rows,
                    cudaStream_t stream) override {
    now_->GatherBeside(rank, half, arrays, num_rows, stream);
  }
  void Arrive(int rank, int half, cudaStream_t stream) override {
    now_->Arrive(rank, half, stream);
  }
  bool Recordable(size_t bytes, size_t unit) const override {
    return now_->Recordable(bytes, unit);
  }
  void GatherRows(int rank, const void* own, int num_rows, size_t row_bytes, void* all,
                  cudaStream_t stream) override {
    now_->GatherRows(rank, own, num_rows, row_bytes, all, stream);
  }

 protected:
  void End(int rank) override { now_->ThrowIfAborted(rank); }
  void OnAbort() override {
    for (const auto& group : groups_) group->Abort();
  }

 private:
  const Groups groups_;
  cuda::DeviceGroup* now_;
};

}  // namespace statetap::bench
