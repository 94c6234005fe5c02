// /v1/models, /v1/completions, /v1/chat/completions as a stock OpenAI client and lm-eval ask them,
// and /tokenize, /detokenize, /tokenizer_info as vLLM has them. Answers take precedence over jobs;
// nothing is stored.
#pragma once

#include <atomic>
#include <optional>

#include "server/jobs/job_runner.h"
#include "server/web/http_message.h"

namespace statetap {

class Completions {
 public:
  // `most_tokens`: that a prompt and its answer can have together. All outlive this, and this the
  // replies.
  Completions(JobRunner& runner, const ServedModel& model, int most_tokens)
      : runner_(runner), model_(model), most_tokens_(most_tokens) {}

  // How many requests are answered at once; more are refused with 429.
  static constexpr int kMostAtOnce = 256;

  // Nothing for a path that is none of the above. Waits a second at most for an answer to begin;
  // one that fails later ends its stream with an error, or cuts the connection. Thread safe.
  std::optional<HttpReply> Handle(const HttpRequest& request);

 private:
  std::optional<absl::StatusOr<HttpReply>> Route(const HttpRequest& request);
  absl::StatusOr<HttpReply> Complete(const HttpRequest& request, bool chat);
  absl::StatusOr<HttpReply> Models(const std::string& name) const;
  HttpReply TokenizerInfo() const;
  absl::StatusOr<HttpReply> Tokenize(const HttpRequest& request) const;
  absl::StatusOr<HttpReply> Detokenize(const HttpRequest& request) const;

  JobRunner& runner_;
  const ServedModel& model_;
  const int most_tokens_;
  std::atomic<int> at_once_{0};
};

}  // namespace statetap
