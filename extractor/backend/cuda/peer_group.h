// Ranks that read each other's device memory: on GPUs with peer access, or sharing one GPU. The
// host threads meet, the streams are joined by events; no kernel ever spins, so ranks that share a
// GPU cannot block each other.
#pragma once

#include <vector>

#include "extractor/backend/cuda/device_group.h"
#include "extractor/backend/cuda/owners.h"

namespace statetap::cuda {

class PeerGroup final : public DeviceGroup {
 public:
  explicit PeerGroup(int world);
  const char* name() const override { return "peer memory"; }
  void Join(int rank) override;
  Parts Share(int rank, const SharedRows& rows, cudaStream_t stream) override;
  void Release(int rank, cudaStream_t stream) override;
  void GatherRows(int rank, const void* own, int num_rows, size_t row_bytes, void* all,
                  cudaStream_t stream) override;

 private:
  struct Rank {
    std::unique_ptr<Event> ready, done;
    const std::byte* pointer = nullptr;
  };
  // What `stream` has made so far at `pointer` may be read by the others, theirs on `stream`.
  void Publish(int rank, const void* pointer, cudaStream_t stream);
  // Waits on the host for the other threads, not for the devices.
  void Meet(int rank);

  std::vector<Rank> ranks_;
  std::atomic<int> waiting_ = 0;
  std::atomic<uint64_t> round_ = 0;
};

}  // namespace statetap::cuda
