// An engine without a model, for tests of what lies above it: states are a function of the ids up
// to a row, the boundary and the hidden index; tokens of (seed, key, position). Like the real one
// it advances several samples together, so that their rows interleave.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "extractor/base/dtype.h"
#include "extractor/engine/engine.h"

namespace statetap::testing {

class FakeEngine : public Engine {
 public:
  struct Faults {
    int32_t bad_token = -1;             // the state of this id is not finite
    int bad_boundary = 0;               // from this boundary on
    int zero_boundary = -1;             // its states are all zero
    int short_boundary = -1;            // the last of its rows of a text is lost
    int32_t short_token = -1;           // of a text that begins with this id
    std::atomic<bool> fail{false};      // Run returns INTERNAL at its next step
    std::atomic<bool> hang{false};      // a step does not end while this is set
    std::chrono::microseconds step{0};  // time of a step
    bool at_once = false;               // states of all boundaries at the same time
  };
  FakeEngine(int hidden, int vocab, int max_seq_len) : hidden_(hidden), vocab_(vocab) {
    info_.max_seq_len = max_seq_len;
    info_.kv_tokens = int64_t{8} * max_seq_len;
    options_.max_running = 8;
  }
  Faults faults;
  std::atomic<int64_t> steps{0};
  std::atomic<int> most_running{0};
  std::atomic<bool> hangs{false};  // it does

  const EngineInfo& info() const override { return info_; }
  const EngineOptions& options() const override { return options_; }

  absl::Status Run(SampleSource& source, HiddenStateSink& sink) override {
    std::map<uint64_t, State> running;
    while (true) {
      for (const uint64_t ticket : source.TakeCancelled()) {
        if (running.erase(ticket) > 0) sink.OnFailed(ticket, {absl::CancelledError("cancelled")});
      }
      while (running.size() < static_cast<size_t>(options_.max_running)) {
        auto task = source.Next();
        if (!task) break;
        const uint64_t ticket = task->ticket;
        running.emplace(ticket, State{*std::move(task)});
      }
      most_running = std::max(most_running.load(), static_cast<int>(running.size()));
      if (source.Stopping()) break;
      if (faults.fail) return absl::InternalError("a rank has failed");
      if (running.empty()) {
        if (!source.Wait()) break;
        continue;
      }
      ++steps;
      if (faults.step.count() > 0) std::this_thread::sleep_for(faults.step);
      hangs = faults.hang.load();
      while (faults.hang) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      hangs = false;
      for (auto it = running.begin(); it != running.end();) {
        it = Step(it->first, it->second, sink) ? std::next(it) : running.erase(it);
      }
    }
    for (const auto& [ticket, state] : running)
      sink.OnFailed(ticket, {absl::CancelledError("stopping")});
    return absl::OkStatus();
  }

 private:
  struct State {
    SampleTask task;
    int64_t rows = 0;
    uint64_t hash = 0;
    int new_tokens = 0;
  };
  static uint64_t Mix(uint64_t x) {
    x ^= x >> 31;
    x *= 0x9e3779b97f4a7c15ull;
    return x ^ (x >> 29);
  }

  // At most 16 rows a step; false: it has ended.
  bool Step(uint64_t ticket, State& state, HiddenStateSink& sink) {
    SampleTask& task = state.task;
    const auto tokens = static_cast<int64_t>(task.input_ids.size());
    const int64_t rows = std::min<int64_t>(16, tokens - state.rows);
    std::vector<std::vector<uint16_t>> states(task.boundaries.size());
    for (int64_t row = state.rows; row < state.rows + rows; ++row) {
      const int32_t id = task.input_ids[static_cast<size_t>(row)];
      state.hash = Mix(state.hash ^ static_cast<uint64_t>(id + 1));
      const auto bad =
          std::lower_bound(task.boundaries.begin(), task.boundaries.end(), faults.bad_boundary);
      if (id == faults.bad_token && bad != task.boundaries.end()) {
        sink.OnFailed(ticket, {absl::DataLossError("a state is not finite"), *bad, row});
        return false;
      }
      for (size_t b = 0; b < states.size(); ++b) {
        for (int h = 0; h < hidden_; ++h) {
          const uint64_t bits =
              Mix(state.hash + static_cast<uint64_t>(task.boundaries[b] * 131 + h));
          float value = static_cast<float>(bits >> 40) * 0x1p-23f - 1.0f;
          if (task.boundaries[b] == faults.zero_boundary) value = 0;
          states[b].push_back(FloatToBf16(value));
        }
      }
    }
    for (size_t b = 0; b < states.size(); ++b) {
      const bool lost = task.input_ids.front() == faults.short_token &&
                        task.boundaries[b] == faults.short_boundary && state.rows + rows == tokens;
      if (lost) states[b].resize(states[b].size() - static_cast<size_t>(hidden_));
      if (!faults.at_once) sink.OnStates(ticket, task.boundaries[b], state.rows, states[b]);
    }
    std::vector<std::thread> threads;
    for (size_t b = 0; faults.at_once && b < states.size(); ++b) {
      threads.emplace_back(
          [&, b] { sink.OnStates(ticket, task.boundaries[b], state.rows, states[b]); });
    }
    for (std::thread& thread : threads) thread.join();
    state.rows += rows;
    if (state.rows < static_cast<int64_t>(task.input_ids.size())) return true;
    return task.generate ? Sample(ticket, state, sink) : Finish(ticket, state, sink);
  }

  bool Finish(uint64_t ticket, State& state, HiddenStateSink& sink) {
    if (state.task.token_scores)
      sink.OnScores(ticket, 1,
                    std::vector<TokenScore>(state.task.input_ids.size() - 1, {-1, 2, 0, -1}));
    sink.OnFinished(ticket, FinishReason::kPrefill);
    return false;
  }

  bool Sample(uint64_t ticket, State& state, HiddenStateSink& sink) {
    SampleTask& task = state.task;
    const int64_t tokens = state.rows;
    if (task.prompt_scores && state.new_tokens == 0)
      sink.OnScores(ticket, 1, std::vector<TokenScore>(task.input_ids.size() - 1, {-1, 2, 0, -1}));
    const auto stops = [&](int32_t id) {
      return std::find(task.stop_ids.begin(), task.stop_ids.end(), id) != task.stop_ids.end();
    };
    if (state.new_tokens > 0 && stops(task.input_ids.back())) {
      sink.OnFinished(ticket, FinishReason::kStop);
      return false;
    }
    if (state.new_tokens >= task.max_new_tokens || tokens >= task.max_length) {
      sink.OnFinished(ticket, FinishReason::kLength);
      return false;
    }
    const uint64_t draw =
        Mix(Mix(task.sampling.seed + 7) ^ Mix(task.sampling.key) ^ static_cast<uint64_t>(tokens));
    const bool stop = draw % 13 == 0 && !task.stop_ids.empty();
    const int32_t id = stop ? task.stop_ids[draw % task.stop_ids.size()]
                            : static_cast<int32_t>(draw % static_cast<uint64_t>(vocab_));
    task.input_ids.push_back(id);
    ++state.new_tokens;
    sink.OnToken(ticket, id,
                 task.token_scores ? TokenScore{-0.5f, 1.5f, id, -0.5f}
                                   : TokenScore{std::nanf(""), std::nanf("")});
    return true;
  }

  const int hidden_, vocab_;

 protected:
  EngineInfo info_;
  EngineOptions options_;
};

}  // namespace statetap::testing
