// What the engine asks for and what it hands out. The server implements both; tests implement them
// in ten lines.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "extractor/base/status.h"

namespace statetap {

struct SamplingOptions {
  double temperature = 0;  // 0: the most likely token
  double top_p = 1;        // (0, 1]
  // The draw at a position depends on (seed, key, position) alone: not on batch, chunk, rank or
  // restart.
  uint64_t seed = 0;
  uint64_t key = 0;  // a digest of the sample's id
};

// One sample to run.
struct SampleTask {
  uint64_t ticket = 0;  // the source's name for it, unique among those that run
  std::vector<int32_t>
      input_ids;                  // the prompt, or the whole text; at least one, each in [0, vocab)
  bool generate = false;          // false: prefill, no token is sampled
  int max_new_tokens = 0;         // generate: at least 1
  int max_length = 0;             // prompt plus answer; generate stops with kLength there
  std::vector<int32_t> stop_ids;  // sampling one ends the answer; it is part of it
  SamplingOptions sampling;
  bool token_scores = false;    // of sampled tokens, or in prefill of every token but the first
  bool prompt_scores = false;   // generate: of the prompt's tokens too, but the first
  std::vector<int> boundaries;  // captured, ascending, each in [0, layers]; may be empty
};

enum class FinishReason { kStop, kLength, kPrefill };

// A token's score under the model's own distribution (temperature 1, whole vocabulary), natural
// logarithm.
struct TokenScore {
  float logprob;
  float entropy;      // of that distribution
  int32_t best = -1;  // the most likely token in its place, ties to the lower id
  float best_logprob = 0;
};

// Where samples come from. Called on the engine's thread.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  // The next sample to start, or nothing for now. A non-blocking look.
  virtual std::optional<SampleTask> Next() = 0;
  // Tickets to give up since the last call; the sink hears CANCELLED for each that still runs.
  virtual std::vector<uint64_t> TakeCancelled() = 0;
  // Called when nothing runs and Next() had nothing: blocks until that may have changed. False ends
  // Engine::Run.
  virtual bool Wait() = 0;
  // True: Engine::Run ends soon, giving up what runs (the sink hears CANCELLED).
  virtual bool Stopping() = 0;
};

// Where results go. Called on the engine's thread, OnStates on threads of the engine's as well,
// while the next step runs; a call that blocks makes the engine wait.
class HiddenStateSink {
 public:
  virtual ~HiddenStateSink() = default;
  // Rows [first_row, first_row + states.size() / hidden) of the residual stream at a boundary, bf16
  // [rows, hidden], all finite. Each row of each boundary of the task comes once, rows of a
  // boundary in order; several boundaries and tickets may come at the same time.
  virtual void OnStates(uint64_t ticket, int boundary, int64_t first_row,
                        std::span<const uint16_t> states) = 0;
  // A sampled token, at position prompt + k for the k-th call. `score` is NaN where not asked for.
  virtual void OnToken(uint64_t ticket, int32_t id, TokenScore score) = 0;
  // Prefill with token_scores, or prompt_scores: scores of tokens [first, first + scores.size()).
  virtual void OnScores(uint64_t ticket, int64_t first, std::span<const TokenScore> scores) = 0;
  // Every row of the sample was handed out: prompt + sampled tokens of them.
  virtual void OnFinished(uint64_t ticket, FinishReason reason) = 0;
  // It ended early: CANCELLED; INVALID_ARGUMENT or RESOURCE_EXHAUSTED for a task that can never
  // run; DATA_LOSS for a non-finite state, with the first boundary and token where it was found.
  // Nothing more comes for this ticket.
  struct Failure {
    absl::Status status;
    int boundary = -1;
    int64_t token = -1;
  };
  virtual void OnFailed(uint64_t ticket, const Failure& failure) = 0;
};

}  // namespace statetap
