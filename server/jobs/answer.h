// One answer to a person, token by token: runs before the jobs' samples, nothing is stored. The
// engine's thread writes, a caller's thread reads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "extractor/engine/hidden_state_sink.h"

namespace statetap {

class Answer {
 public:
  explicit Answer(SampleTask task) : task_(std::move(task)) {}

  struct Token {
    int32_t id;
    TokenScore score;
  };
  // Blocks for the next token; nothing when the answer has ended. OK then, or why it ended.
  std::optional<Token> Next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ || !tokens_.empty(); });
    if (tokens_.empty()) return std::nullopt;
    const Token token = tokens_.front();
    tokens_.pop_front();
    return token;
  }
  absl::Status status() const {
    const std::lock_guard lock(mutex_);
    return status_;
  }
  FinishReason reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
  }
  const SampleTask& task() const { return task_; }
  bool abandoned() const { return abandoned_; }
  void Abandon() { abandoned_ = true; }

  void Add(Token token) {
    {
      const std::lock_guard lock(mutex_);
      tokens_.push_back(token);
    }
    changed_.notify_all();
  }
  void End(absl::Status status, FinishReason reason = FinishReason::kStop) {
    {
      const std::lock_guard lock(mutex_);
      if (ended_) return;
      ended_ = true;
      status_ = std::move(status);
      reason_ = reason;
    }
    changed_.notify_all();
  }

 private:
  const SampleTask task_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Token> tokens_;
  bool ended_ = false;
  std::atomic<bool> abandoned_{false};
  absl::Status status_;
  FinishReason reason_ = FinishReason::kStop;
};

}  // namespace statetap
