// Tokens a second over the last minute. Thread safe.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace statetap {

class RateMeter {
 public:
  using Clock = std::chrono::steady_clock;

  void Add(int64_t tokens) {
    const std::lock_guard lock(mutex_);
    const int64_t second = Now();
    if (first_ < 0) first_ = second;
    Bucket& bucket = buckets_[static_cast<size_t>(second % kSeconds)];
    if (bucket.second != second) bucket = {second, 0};
    bucket.tokens += tokens;
  }

  // 0 before the first token.
  double PerSecond() const {
    const std::lock_guard lock(mutex_);
    if (first_ < 0) return 0;
    const int64_t now = Now();
    int64_t tokens = 0;
    for (const Bucket& bucket : buckets_) {
      if (bucket.second > now - kSeconds) tokens += bucket.tokens;
    }
    return static_cast<double>(tokens) /
           static_cast<double>(std::clamp<int64_t>(now - first_ + 1, 1, kSeconds));
  }

 private:
  static constexpr int64_t kSeconds = 60;
  struct Bucket {
    int64_t second = -kSeconds, tokens = 0;
  };
  int64_t Now() const {
    return std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - start_).count();
  }

  mutable std::mutex mutex_;
  const Clock::time_point start_ = Clock::now();
  std::array<Bucket, kSeconds> buckets_;
  int64_t first_ = -1;
};

}  // namespace statetap
