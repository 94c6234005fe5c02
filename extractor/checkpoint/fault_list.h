// Faults of one sort: the first few by name, the rest as a count.
#pragma once

#include <fmt/ranges.h>

#include <cstdint>
#include <string>
#include <vector>

namespace statetap {

class FaultList {
 public:
  void Add(std::string fault) {
    if (shown_.size() < kShown) shown_.push_back(std::move(fault));
    ++count_;
  }
  bool empty() const { return count_ == 0; }
  int64_t count() const { return count_; }
  // "a, b, c and 7 more"
  std::string Text() const {
    std::string text = fmt::format("{}", fmt::join(shown_, ", "));
    const int64_t more = count_ - static_cast<int64_t>(shown_.size());
    if (more > 0) text += fmt::format(" and {} more", more);
    return text;
  }

 private:
  static constexpr size_t kShown = 4;
  std::vector<std::string> shown_;
  int64_t count_ = 0;
};

}  // namespace statetap
