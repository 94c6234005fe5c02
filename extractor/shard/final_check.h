// Whether the final states of shards belong to their tokens: the head, over a stored final state,
// has to give the next token the log-probability that was stored with it. A final state that was
// normed, moved by a row, or comes from another model does not.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "extractor/shard/shard_reader.h"

namespace statetap {

// Natural log of the probability that the model's head gives `tokens[i]` behind the final state
// `states[i]`, bf16 [rows, hidden], before the final norm. OutputHead::LogProbabilities is one.
using TokenScorer = std::function<absl::StatusOr<std::vector<double>>(
    std::span<const uint16_t> states, std::span<const int32_t> tokens)>;

class FinalCheck {
 public:
  // Takes the 16 tokens of the shard that surprised the model most, of those with a probability
  // below 0.999: they tell most. Nothing of a shard without final states or without
  // log-probabilities, and nothing behind the 32nd shard: their rows are kept here.
  // `records`: of all its samples.
  absl::Status Take(const ShardReader& shard, std::span<const SampleRecord> records);
  // Compares what was taken since the last call.
  absl::Status Score(const TokenScorer& scorer);

  struct Shard {
    std::string name;
    StatesDtype dtype;
    std::vector<uint16_t> states;  // [tokens, hidden]
    std::vector<int32_t> tokens;   // the next ones
    std::vector<double> stored;    // their log-probabilities
    // Mean of |log-odds stored − log-odds scored|: how far logits are away, whether the model is
    // sure or not. None before Score.
    std::optional<double> error;
  };
  const std::vector<Shard>& shards() const { return shards_; }

 private:
  std::vector<Shard> shards_;
};

}  // namespace statetap
