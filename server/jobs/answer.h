// One answer to a person, token by token: runs before the jobs' samples, nothing is stored. The
// engine's thread writes, a caller's thread reads.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "extractor/engine/hidden_state_sink.h"

namespace statetap {

class Answer {
 public:
  // `abandoned`: called when the reader wants no more of it, from the reader's thread.
  Answer(SampleTask task, std::function<void()> abandoned)
      : task_(std::move(task)), tell_abandoned_(std::move(abandoned)) {}

  struct Token {
    int32_t id;
    TokenScore score;
  };
  // Whether Next would not block, after at most so long.
  bool WaitFor(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [&] { return ended_ || !tokens_.empty(); });
  }
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
  // As the task asked for them: without the first token. Complete once a token came or it ended.
  std::vector<TokenScore> prompt_scores() const {
    const std::lock_guard lock(mutex_);
    return prompt_scores_;
  }
  const SampleTask& task() const { return task_; }
  bool abandoned() const { return abandoned_; }
  void Abandon() {
    {
      const std::lock_guard lock(mutex_);
      if (ended_) return;
    }
    abandoned_ = true;
    tell_abandoned_();
  }

  // In order.
  void AddPromptScores(std::span<const TokenScore> scores) {
    const std::lock_guard lock(mutex_);
    prompt_scores_.insert(prompt_scores_.end(), scores.begin(), scores.end());
  }
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
  const std::function<void()> tell_abandoned_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Token> tokens_;
  std::vector<TokenScore> prompt_scores_;
  bool ended_ = false;
  std::atomic<bool> abandoned_{false};
  absl::Status status_;
  FinishReason reason_ = FinishReason::kStop;
};

}  // namespace statetap
