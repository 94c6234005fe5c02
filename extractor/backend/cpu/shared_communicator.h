// Ranks as threads of one process that read each other's memory.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "extractor/backend/communicator.h"

namespace statetap::cpu {

// What the ranks share: where each one's data lies, and a barrier that an abort opens.
class SharedGroup {
 public:
  explicit SharedGroup(int world) : pointers_(static_cast<size_t>(world)) {}
  // Publishes this rank's pointer and waits until all have; at(r) is valid until this rank's Leave.
  void Meet(int rank, const void* pointer);
  // Waits until every rank is done with what the others published.
  void Leave() { Wait(-1, nullptr); }
  const void* at(int rank) const { return pointers_[static_cast<size_t>(rank)]; }
  int world() const { return static_cast<int>(pointers_.size()); }
  void Abort();

 private:
  void Wait(int rank, const void* pointer);

  std::vector<const void*> pointers_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  int waiting_ = 0;
  uint64_t round_ = 0;
  bool aborted_ = false;
};

class SharedCommunicator final : public Communicator {
 public:
  SharedCommunicator(int rank, std::shared_ptr<SharedGroup> group)
      : rank_(rank), group_(std::move(group)) {}
  int rank() const override { return rank_; }
  int world() const override { return group_->world(); }
  // own[i] = sum over ranks, in rank order, of their partial[(rows.begin + i)], i in [0,
  // rows.count). fp32 [num_tokens, width]. Sharded ranges give a reduce-scatter, the whole range on
  // every rank an all-reduce. `own` may not overlap any partial.
  void SumRows(const float* partial, RowRange rows, int width, float* own);
  // all[t] for every row t of the step from the rank that owns it: ShardOfRows(num_tokens, r,
  // world). Rows of `row_bytes`. `own` may be all + begin * row_bytes.
  void GatherRows(const void* own, int num_tokens, size_t row_bytes, void* all);
  // all[r * bytes …] = rank r's own. Blocks of the same size.
  void GatherBlocks(const void* own, size_t bytes, void* all);
  void Abort() override { group_->Abort(); }

 private:
  int rank_;
  std::shared_ptr<SharedGroup> group_;
};

}  // namespace statetap::cpu
