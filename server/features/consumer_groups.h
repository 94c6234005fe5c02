// Who has which sample: within a job and group a sample goes to one stream at a time, until it is
// acknowledged (the store remembers that) or its stream ends. Thread safe.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>

namespace statetap {

class ConsumerGroups {
 public:
  // False: another stream has it.
  bool Lease(int64_t job, const std::string& group, int64_t index) {
    const std::lock_guard lock(mutex_);
    return leased_[{job, group}].insert(index).second;
  }
  // Acknowledged: nobody gets them again.
  void Release(int64_t job, const std::string& group, std::span<const int64_t> indices) {
    const std::lock_guard lock(mutex_);
    Erase(job, group, indices);
    ++releases_;
  }
  // Changes when samples were acknowledged: what was read of the store before may be out of date.
  uint64_t releases() const {
    const std::lock_guard lock(mutex_);
    return releases_;
  }
  // Gives up a lease that was never used.
  void Withdraw(int64_t job, const std::string& group, int64_t index) {
    const std::lock_guard lock(mutex_);
    Erase(job, group, {&index, 1});
  }
  // A stream ended before they were acknowledged: others may take them.
  void Return(int64_t job, const std::string& group, std::span<const int64_t> indices) {
    const std::lock_guard lock(mutex_);
    Erase(job, group, indices);
    if (!indices.empty()) ++returns_;
  }
  // Changes when samples came back.
  uint64_t returns() const {
    const std::lock_guard lock(mutex_);
    return returns_;
  }

 private:
  void Erase(int64_t job, const std::string& group, std::span<const int64_t> indices) {
    const auto found = leased_.find({job, group});
    if (found == leased_.end()) return;
    for (const int64_t index : indices) found->second.erase(index);
    if (found->second.empty()) leased_.erase(found);
  }

  mutable std::mutex mutex_;
  uint64_t returns_ = 0, releases_ = 0;
  std::map<std::pair<int64_t, std::string>, std::set<int64_t>> leased_;
};

}  // namespace statetap
