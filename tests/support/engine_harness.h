// Runs samples through an engine and keeps everything that comes out.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "extractor/engine/engine.h"
#include "tests/support/status_matchers.h"

namespace statetap::testing {

struct Captured {
  std::vector<int32_t> sampled;
  std::vector<TokenScore> sampled_scores;
  std::map<int64_t, TokenScore> scores;         // prefill: by position
  std::map<int, std::vector<uint16_t>> states;  // by boundary, bf16 [rows, hidden]
  std::optional<FinishReason> finished;
  std::optional<HiddenStateSink::Failure> failed;
};

// Hands out `tasks` in order; tickets are their places. Fails the test where rows come out of
// order, or anything after a sample's end.
class Harness final : public SampleSource, public HiddenStateSink {
 public:
  Harness(std::vector<SampleTask> tasks, int hidden)
      : tasks_(std::move(tasks)), hidden_(hidden), results_(tasks_.size()) {
    for (size_t i = 0; i < tasks_.size(); ++i) tasks_[i].ticket = i;
  }
  std::optional<SampleTask> Next() override {
    if (next_ == tasks_.size() || next_ - ended_ == at_once) return std::nullopt;
    return tasks_[next_++];
  }
  std::vector<uint64_t> TakeCancelled() override { return std::exchange(cancel, {}); }
  bool Wait() override { return false; }
  bool Stopping() override { return stop; }
  void OnStates(uint64_t ticket, int boundary, int64_t first_row,
                std::span<const uint16_t> states) override {
    const std::lock_guard lock(mutex_);  // of one sample's boundaries
    ExpectRuns(ticket);
    auto& all = results_[ticket].states[boundary];
    EXPECT_EQ(static_cast<int64_t>(all.size()), first_row * hidden_)
        << "sample " << ticket << " boundary " << boundary;
    all.insert(all.end(), states.begin(), states.end());
  }
  void OnToken(uint64_t ticket, int32_t id, TokenScore score) override {
    ExpectRuns(ticket);
    results_[ticket].sampled.push_back(id);
    results_[ticket].sampled_scores.push_back(score);
    if (on_token) on_token(ticket);
  }
  void OnScores(uint64_t ticket, int64_t first, std::span<const TokenScore> scores) override {
    ExpectRuns(ticket);
    for (size_t i = 0; i < scores.size(); ++i) {
      EXPECT_TRUE(
          results_[ticket].scores.emplace(first + static_cast<int64_t>(i), scores[i]).second);
    }
  }
  void OnFinished(uint64_t ticket, FinishReason reason) override {
    ExpectRuns(ticket);
    ++ended_;
    results_[ticket].finished = reason;
  }
  void OnFailed(uint64_t ticket, const Failure& failure) override {
    ExpectRuns(ticket);
    ++ended_;
    results_[ticket].failed = failure;
  }

  const std::vector<Captured>& results() const { return results_; }
  std::vector<uint64_t> cancel;
  bool stop = false;
  size_t at_once = SIZE_MAX;  // the next task waits while so many have not ended
  std::function<void(uint64_t)> on_token;

 private:
  void ExpectRuns(uint64_t ticket) const {
    EXPECT_FALSE(results_[ticket].finished || results_[ticket].failed)
        << "sample " << ticket << " has ended";
  }

  std::vector<SampleTask> tasks_;
  int hidden_;
  size_t next_ = 0, ended_ = 0;
  std::mutex mutex_;
  std::vector<Captured> results_;
};

inline std::vector<Captured> RunTasks(Engine& engine, std::vector<SampleTask> tasks, int hidden) {
  Harness harness(std::move(tasks), hidden);
  EXPECT_OK(engine.Run(harness, harness));
  return harness.results();
}

}  // namespace statetap::testing
