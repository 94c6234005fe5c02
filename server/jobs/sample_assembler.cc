#include "server/jobs/sample_assembler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace statetap {
namespace {

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

std::string_view NameOf(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kPrefill: return "prefill";
  }
  return "?";
}

}  // namespace

SampleAssembler::SampleAssembler(SampleRow sample, std::optional<AnswerMask> answer,
                                 std::span<const int> boundaries, int hidden, int64_t max_rows)
    : sample_(std::move(sample)),
      answer_(answer),
      boundaries_(boundaries.begin(), boundaries.end()),
      hidden_(hidden),
      collected_(boundaries.size()),
      ids_(sample_.ids) {
  // Whole at once: the pages are taken as rows arrive, and no row is copied twice.
  for (Boundary& one : collected_) one.states.reserve(static_cast<size_t>(max_rows * hidden));
}

void SampleAssembler::AddStates(int boundary, int64_t first_row, std::span<const uint16_t> states) {
  const auto found = std::find(boundaries_.begin(), boundaries_.end(), boundary);
  if (found == boundaries_.end()) return;
  Boundary& mine = collected_[static_cast<size_t>(found - boundaries_.begin())];
  if (static_cast<int64_t>(mine.states.size()) != first_row * hidden_) {
    if (mine.astray < 0) mine.astray = first_row;
    return;
  }
  mine.states.insert(mine.states.end(), states.begin(), states.end());
}

void SampleAssembler::AddToken(int32_t id, TokenScore score) {
  logprobs_.resize(ids_.size(), kNone);
  entropies_.resize(ids_.size(), kNone);
  ids_.push_back(id);
  logprobs_.push_back(score.logprob);
  entropies_.push_back(score.entropy);
  any_score_ = any_score_ || !std::isnan(score.logprob);
}

void SampleAssembler::AddScores(int64_t first, std::span<const TokenScore> scores) {
  logprobs_.resize(ids_.size(), kNone);
  entropies_.resize(ids_.size(), kNone);
  for (size_t i = 0; i < scores.size(); ++i) {
    const size_t token = static_cast<size_t>(first) + i;
    if (token >= ids_.size()) break;
    logprobs_[token] = scores[i].logprob;
    entropies_[token] = scores[i].entropy;
  }
  any_score_ = any_score_ || !scores.empty();
}

// Where the answer's thought ends: behind </think>, or with the answer where it never came. The
// prompt opened the thought, or the answer does.
size_t SampleAssembler::ThoughtEnd() const {
  const size_t begin = sample_.ids.size();
  const bool opened = (begin > 0 && ids_[begin - 1] == answer_->think_id) ||
                      (begin < ids_.size() && ids_[begin] == answer_->think_id);
  if (!opened) return begin;
  const auto end =
      std::find(ids_.begin() + static_cast<ptrdiff_t>(begin), ids_.end(), answer_->think_end_id);
  return static_cast<size_t>(end - ids_.begin()) + (end == ids_.end() ? 0 : 1);
}

std::vector<uint8_t> SampleAssembler::MaskOf(FinishReason reason) const {
  if (!answer_) return sample_.mask;
  std::vector<uint8_t> mask(answer_->thought ? sample_.ids.size() : ThoughtEnd(), 0);
  mask.resize(ids_.size(), 1);
  if (!answer_->stop && reason == FinishReason::kStop) mask.back() = 0;
  return mask;
}

absl::StatusOr<FinishedSample> SampleAssembler::Finish(FinishReason reason) {
  FinishedSample out;
  for (size_t i = 0; i < collected_.size(); ++i) {
    Boundary& one = collected_[i];
    const size_t rows = one.states.size() / static_cast<size_t>(hidden_);
    if (one.astray >= 0) {
      return absl::InternalError(
          fmt::format("row {} of boundary {} came out of order", one.astray, boundaries_[i]));
    }
    if (one.states.size() != ids_.size() * static_cast<size_t>(hidden_)) {
      return absl::InternalError(
          fmt::format("boundary {} has {} rows for {} tokens", boundaries_[i], rows, ids_.size()));
    }
    out.states.push_back(std::move(one.states));
  }
  SampleRecord& record = out.record;
  record.id = std::move(sample_.id);
  record.source = std::move(sample_.source);
  record.meta_json = std::move(sample_.meta_json);
  record.split = std::move(sample_.split);
  record.digest = std::move(sample_.digest);
  record.prompt_tokens = sample_.prompt_tokens;
  record.finish_reason = std::string(NameOf(reason));
  record.truncated = sample_.truncated;
  record.source_index = sample_.index;
  record.loss_mask = MaskOf(reason);
  record.input_ids = std::move(ids_);
  if (any_score_) {
    record.logprobs = std::move(logprobs_);
    record.entropies = std::move(entropies_);
  }
  return out;
}

std::optional<AnswerMask> AnswerMaskOf(const JobPlan& plan, const ServedModel& model) {
  if (!plan.text.generate) return std::nullopt;
  const Supervision& supervision = plan.text.render.supervision;
  return AnswerMask{supervision.thought, supervision.stop,
                    model.tokenizer->SpecialId("<think>").value_or(-1),
                    model.tokenizer->SpecialId("</think>").value_or(-1)};
}

StoredSample StoredFacts(const SampleRecord& record) {
  const SampleFacts facts = FactsOf(record);
  return {.index = facts.index,
          .rows = facts.tokens,
          .finish = record.finish_reason,
          .truncated = facts.truncated,
          .mean_logprob = facts.logprob,
          .supervised = facts.supervised_tokens,
          .generated = facts.generated_tokens};
}

}  // namespace statetap
