// One thread a rank. A round is the fault boundary: an exception on any rank, or a rank that does
// not come to an end, ends the group.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "extractor/backend/backend.h"
#include "extractor/base/status.h"

namespace statetap {

class RankGroup {
 public:
  // Borrows the backends, one a rank. `patience`: how long a round may take from Wait on; 0: any
  // time.
  explicit RankGroup(std::span<const std::unique_ptr<Backend>> backends,
                     std::chrono::milliseconds patience = {});
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  // Calls body(rank) on every rank's thread. Each Start is followed by a Wait, which waits for all.
  // UNAVAILABLE with the first fault's message once a rank has thrown or patience is at an end: the
  // group is aborted then, and every later Wait returns the same status. A thread that does not
  // come back even then is left behind with its copy of `body`: what that refers to must live as
  // long as the copy.
  void Start(std::function<void(int rank)> body);
  absl::Status Wait();
  absl::Status RunAll(std::function<void(int rank)> body) {
    Start(std::move(body));
    return Wait();
  }

 private:
  struct State;
  static void Work(const std::shared_ptr<State>& state, int rank);

  const std::chrono::milliseconds patience_;
  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
};

}  // namespace statetap
