// One thread a rank. RunAll is the fault boundary: an exception on any rank ends the group.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "extractor/backend/backend.h"
#include "extractor/base/status.h"

namespace statetap {

class RankGroup {
 public:
  // Borrows the backends, one a rank.
  explicit RankGroup(std::span<const std::unique_ptr<Backend>> backends);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  // Calls body(rank) on every rank's thread and waits for all. UNAVAILABLE with the first fault's
  // message once a rank has thrown: its group is aborted then, and every later call returns the
  // same status.
  absl::Status RunAll(const std::function<void(int rank)>& body);

 private:
  void Work(int rank);
  void Fail(int rank, const std::string& what);

  std::span<const std::unique_ptr<Backend>> backends_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int)>* body_ = nullptr;
  uint64_t round_ = 0;
  int running_ = 0;
  bool stop_ = false;
  absl::Status status_;
  std::vector<std::thread> threads_;
};

}  // namespace statetap
