#include "extractor/backend/cpu/shared_communicator.h"

#include <cstring>

namespace statetap::cpu {

void SharedGroup::Meet(int rank, const void* pointer) { Wait(rank, pointer); }

void SharedGroup::Wait(int rank, const void* pointer) {
  std::unique_lock lock(mutex_);
  if (rank >= 0) pointers_[static_cast<size_t>(rank)] = pointer;
  const uint64_t round = round_;
  if (++waiting_ == world()) {
    waiting_ = 0;
    ++round_;
    all_here_.notify_all();
  } else {
    all_here_.wait(lock, [&] { return round_ != round || aborted_; });
  }
  if (aborted_) throw RankAborted("another rank of the group has failed");
}

void SharedGroup::Abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  all_here_.notify_all();
}

void SharedCommunicator::SumRows(const float* partial, RowRange rows, int width, float* own) {
  group_->Meet(rank_, partial);
  const size_t count = static_cast<size_t>(rows.count) * static_cast<size_t>(width);
  for (int rank = 0; rank < world(); ++rank) {
    const float* from = static_cast<const float*>(group_->at(rank)) + int64_t{rows.begin} * width;
    if (rank == 0) {
      std::memcpy(own, from, count * sizeof(float));
    } else {
      for (size_t i = 0; i < count; ++i) own[i] += from[i];
    }
  }
  group_->Leave();
}

void SharedCommunicator::GatherRows(const void* own, int num_tokens, size_t row_bytes, void* all) {
  group_->Meet(rank_, own);
  for (int rank = 0; rank < world(); ++rank) {
    const RowRange rows = ShardOfRows(num_tokens, rank, world());
    auto* to = static_cast<std::byte*>(all) + static_cast<size_t>(rows.begin) * row_bytes;
    // A rank's own rows may already lie in place.
    if (to != group_->at(rank))
      std::memmove(to, group_->at(rank), static_cast<size_t>(rows.count) * row_bytes);
  }
  group_->Leave();
}

void SharedCommunicator::GatherBlocks(const void* own, size_t bytes, void* all) {
  group_->Meet(rank_, own);
  for (int rank = 0; rank < world(); ++rank) {
    std::memcpy(static_cast<std::byte*>(all) + static_cast<size_t>(rank) * bytes, group_->at(rank),
                bytes);
  }
  group_->Leave();
}

}  // namespace statetap::cpu
