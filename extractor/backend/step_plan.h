// What the engine asks of the ranks: one forward pass, on the host. Seen by device code too.
#pragma once

#include <cstdint>
#include <vector>

namespace statetap {

inline constexpr int kPageTokens = 64;  // of a KV page

// A forward pass over packed rows of several sequences, on the host. Every rank gets the same plan.
struct StepPlan {
  std::vector<int32_t> ids;        // [T]
  std::vector<int32_t> positions;  // [T]; within a sequence ascending by one
  std::vector<int32_t> sequence;   // [T]: which of num_seqs a token belongs to
  int num_seqs = 0;
  int pages_per_seq = 0;            // width of page_table
  std::vector<int32_t> page_table;  // [num_seqs, pages_per_seq]: KV pages that hold positions [0,
                                    // last]; −1 behind them
  // [num_seqs] or empty: 1 where the sequence's only row is a token that was just drawn. Backends
  // may attend such rows in another form than a prompt's, whose rounding differs.
  std::vector<uint8_t> decodes;
  std::vector<int32_t> logit_rows;  // [L] rows whose next token is drawn or scored
  struct Draw {
    double temperature = 0, top_p = 1;
    uint64_t seed = 0, key = 0;
    int64_t position = 0;  // of the token that is drawn
    int32_t given = -1;    // ≥ 0: no draw, score this id
  };
  std::vector<Draw> draws;      // [L]
  std::vector<int> boundaries;  // captured, ascending
  int num_tokens() const { return static_cast<int>(ids.size()); }
};

// What a logit row gave. Logarithms are natural and of the model's own distribution (temperature 1,
// whole vocabulary). Where a logit is not finite they are NaN and the ids 0.
struct ChosenToken {
  int32_t id = 0;  // drawn, or the given one
  float logprob = 0, entropy = 0;
  int32_t best = 0;  // the most likely one, ties to the lower id
  float best_logprob = 0;
};

}  // namespace statetap
