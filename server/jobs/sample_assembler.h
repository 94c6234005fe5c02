// Collects what the engine hands out of one sample and checks it: every row of every boundary once
// and in order. Rows of different boundaries may be added at the same time; all else is for the
// engine's thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "extractor/base/recycled_memory.h"
#include "extractor/engine/hidden_state_sink.h"
#include "extractor/shard/sample_filter.h"
#include "server/jobs/job_plan.h"
#include "server/store/job_store.h"

namespace statetap {

struct FinishedSample {
  SampleRecord record;
  std::vector<RecycledVector<uint16_t>> states;  // by boundary, bf16 [tokens, hidden]
};

// The loss mask of a generated answer: all of it but for what is left out here.
struct AnswerMask {
  bool thought = true, stop = true;  // supervised or not
  int32_t think_id = -1, think_end_id = -1;
};

class SampleAssembler {
 public:
  // Collects [rows, hidden] for each of `boundaries`, at most `max_rows` of them. With `answer` the
  // sample's ids are a prompt, else the whole text under the sample's own mask.
  SampleAssembler(SampleRow sample, std::optional<AnswerMask> answer,
                  std::span<const int> boundaries, int hidden, int64_t max_rows);

  void AddStates(int boundary, int64_t first_row, std::span<const uint16_t> states);
  void AddToken(int32_t id, TokenScore score);
  void AddScores(int64_t first, std::span<const TokenScore> scores);
  // INTERNAL where rows did not come in order, or rows and tokens differ in number.
  absl::StatusOr<FinishedSample> Finish(FinishReason reason);

  int64_t index() const { return sample_.index; }

 private:
  std::vector<uint8_t> MaskOf(FinishReason reason) const;
  size_t ThoughtEnd() const;

  SampleRow sample_;
  const std::optional<AnswerMask> answer_;
  const std::vector<int> boundaries_;
  const int hidden_;
  struct Boundary {
    RecycledVector<uint16_t> states;
    int64_t astray = -1;  // the first row that came where another was next
  };
  std::vector<Boundary> collected_;  // by boundary
  std::vector<int32_t> ids_;
  std::vector<float> logprobs_, entropies_;  // [tokens] or empty
  bool any_score_ = false;
};

// Nothing for a job whose samples are whole texts.
std::optional<AnswerMask> AnswerMaskOf(const JobPlan& plan, const ServedModel& model);

// What the store notes of a stored sample, position and row left out.
StoredSample StoredFacts(const SampleRecord& record);

}  // namespace statetap
