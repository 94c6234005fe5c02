// Collects what the engine hands out of one sample and checks it: every row of every boundary once
// and in order, every value finite. Engine's thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "extractor/engine/hidden_state_sink.h"
#include "extractor/shard/sample_filter.h"
#include "server/store/job_store.h"

namespace statetap {

struct FinishedSample {
  SampleRecord record;
  std::vector<std::vector<uint16_t>> states;  // by boundary, bf16 [tokens, hidden]
};

class SampleAssembler {
 public:
  // Collects [rows, hidden] for each of `boundaries`, at most `max_rows` of them.
  SampleAssembler(SampleRow sample, bool generate, std::span<const int> boundaries, int hidden,
                  int64_t max_rows);

  // A rejection (non_finite, with boundary and token) ends the sample.
  std::optional<Rejection> AddStates(int boundary, int64_t first_row,
                                     std::span<const uint16_t> states);
  void AddToken(int32_t id, TokenScore score);
  void AddScores(int64_t first, std::span<const TokenScore> scores);
  // INTERNAL where rows and tokens differ in number.
  absl::StatusOr<FinishedSample> Finish(FinishReason reason);

  int64_t index() const { return sample_.index; }

 private:
  SampleRow sample_;
  const bool generate_;
  const std::vector<int> boundaries_;
  const int hidden_;
  std::vector<std::vector<uint16_t>> states_;
  std::vector<int32_t> ids_;
  std::vector<float> logprobs_, entropies_;  // [tokens] or empty
  bool any_score_ = false;
};

// What the store notes of a stored sample, position and row left out.
StoredSample StoredFacts(const SampleRecord& record);

}  // namespace statetap
