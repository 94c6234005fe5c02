// A question of a person or a program and the answer to it, which is not stored: what
// Model.Generate and the HTTP completions share. From sample and options to the engine's task, and
// from the answer's tokens to text.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "server/jobs/answer.h"
#include "server/jobs/served_model.h"
#include "statetap/v1/jobs.pb.h"

namespace statetap {

// `generate`: else the sample is the whole text, to be scored (options.logprobs). `repeat`: how
// many samples of the same content the caller has asked about before with this seed; each draws
// tokens of its own. INVALID_ARGUMENT names the field, the value and the remedy.
absl::StatusOr<SampleTask> TaskOfQuestion(const v1::SampleInput& sample,
                                          const v1::JobOptions& options, bool generate,
                                          const ServedModel& model, int repeat = 0);

// An answer as it comes. Gives it up when it is destroyed. One thread.
class AnswerReader {
 public:
  AnswerReader(std::shared_ptr<Answer> answer, const ServedModel& model)
      : answer_(std::move(answer)), model_(model), decoder_(*model.tokenizer) {}
  AnswerReader(AnswerReader&&) noexcept = default;
  ~AnswerReader() {
    if (answer_ != nullptr) GiveUp();
  }

  struct Token {
    int32_t id = -1;
    TokenScore score{};
    // What became complete with it; never half a character. The token that ends the answer has
    // none.
    std::string text;
  };
  enum class Event { kToken, kEnd, kNothingYet };
  // Waits at most so long.
  Event Next(std::chrono::milliseconds patience, Token* token);

  // No more of it is wanted.
  void GiveUp() { answer_->Abandon(); }
  // Of the prompt, or of the whole text that is scored, without its first token. REQUIRES: a token
  // or the end came.
  std::vector<TokenScore> PromptScores() const { return answer_->prompt_scores(); }
  const SampleTask& task() const { return answer_->task(); }
  // What follows are of an answer that has ended: why it could not be finished, if so; text that is
  // left, incomplete characters as U+FFFD; "stop" or "length" (of a scored text too).
  absl::Status status() const { return answer_->status(); }
  std::string Rest() { return decoder_.Finish(); }
  std::string_view finish_reason() const {
    return answer_->reason() == FinishReason::kStop ? "stop" : "length";
  }

 private:
  std::shared_ptr<Answer> answer_;
  const ServedModel& model_;
  StreamDecoder decoder_;
};

}  // namespace statetap
