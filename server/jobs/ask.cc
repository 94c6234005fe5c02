#include "server/jobs/ask.h"

#include "server/jobs/admission.h"

namespace statetap {

absl::StatusOr<SampleTask> TaskOfQuestion(const v1::SampleInput& sample,
                                          const v1::JobOptions& options, bool generate,
                                          const ServedModel& model, int repeat) {
  STATETAP_ASSIGN_OR_RETURN(const JobPlan plan, PlanJob(options, generate, model, Capture::kNo));
  const SampleRow row = AdmitSample(sample, plan, model)[0];
  if (row.rejection) {
    return absl::InvalidArgumentError(
        fmt::format("sample: {}: {}", row.rejection->reason, row.rejection->message));
  }
  std::string id = row.id.empty() ? row.digest : row.id;
  if (repeat > 0) id += fmt::format("#{}", repeat);
  return TaskOf(plan, row, id, model);
}

AnswerReader::Event AnswerReader::Next(std::chrono::milliseconds patience, Token* token) {
  if (!answer_->WaitFor(patience)) return Event::kNothingYet;
  const std::optional<Answer::Token> next = answer_->Next();
  if (!next) return Event::kEnd;
  *token = {next->id, next->score, model_.IsStop(next->id) ? "" : decoder_.Add(next->id)};
  return Event::kToken;
}

}  // namespace statetap
