// The final norm and the output head of a checkpoint, on the CPU and without its other weights:
// what the model's next token would have been, from a stored final state.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "extractor/checkpoint/checkpoint_index.h"

namespace statetap {

class OutputHead {
 public:
  // A checkpoint's folder, whole or with these two tensors alone (`statetap export --to head`).
  // Reads headers and the norm; the head's rows are read when they are used, each time anew.
  // NOT_FOUND names a tensor that is not there, INVALID_ARGUMENT one of another shape or type.
  static absl::StatusOr<OutputHead> Open(const std::filesystem::path& folder);
  static absl::StatusOr<OutputHead> Open(const CheckpointIndex& checkpoint);

  int hidden() const { return static_cast<int>(norm_.size()); }
  int vocab() const { return vocab_; }

  // Logits in fp32 of final states before the norm, bf16 [rows, hidden], in pieces of the
  // vocabulary, ascending: visit(first token, logits [rows, tokens of the piece]). Reads the whole
  // head once: 2.3 GB for Kimi-K2.5, and 1.2 G multiply-adds a row, on
  // at most eight threads.
  using Visit = std::function<void(int64_t first_token, std::span<const float> logits)>;
  absl::Status ForEachPiece(std::span<const uint16_t> states, const Visit& visit) const;

  // Natural log of the probability that the head gives `tokens[i]` behind row i. OUT_OF_RANGE for a
  // token that is not in the vocabulary.
  absl::StatusOr<std::vector<double>> LogProbabilities(std::span<const uint16_t> states,
                                                       std::span<const int32_t> tokens) const;

 private:
  struct Place;
  OutputHead() = default;
  static absl::StatusOr<OutputHead> OpenAt(const Place& place);
  std::vector<float> Normed(std::span<const uint16_t> states) const;

  std::vector<float> norm_;  // [hidden]
  double eps_ = 0;
  int vocab_ = 0;
  std::filesystem::path file_;  // that holds the head, bf16 [vocab, hidden] from `offset_` on
  int64_t offset_ = 0;
};

// log(sum(exp(x))) of numbers that come one by one.
class LogSumExp {
 public:
  void Add(double x);
  double value() const;

 private:
  double most_ = -std::numeric_limits<double>::infinity(), sum_ = 0;
};

}  // namespace statetap
