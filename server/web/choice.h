// One of a reply's choices: an answer on its way from tokens to JSON.
#pragma once

#include <string>
#include <vector>

#include "server/jobs/ask.h"
#include "server/web/api_reply.h"
#include "server/web/tool_calls.h"

namespace statetap {

// Text up to the first of some strings. What may be the beginning of one is held back.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  // What is certain to come before any of them. REQUIRES: !hit().
  std::string Add(std::string_view text);
  // What was held back.
  std::string Rest() { return std::exchange(held_, {}); }
  bool hit() const { return hit_; }

 private:
  const std::vector<std::string> stops_;
  std::string held_;
  bool hit_ = false;
};

class Choice {
 public:
  // The references outlive it.
  Choice(const ApiRequest& request, AnswerReader reader, const ServedModel& model);

  // The answer's next token, or its end. Waits at most so long.
  AnswerReader::Event Next(std::chrono::milliseconds patience);
  // OK, or why it has ended early.
  absl::Status status() const { return stopped_ ? absl::OkStatus() : reader_.status(); }
  int64_t prompt_tokens() const { return static_cast<int64_t>(reader_.task().input_ids.size()); }
  int64_t tokens() const { return tokens_; }
  // Whether there is something that no piece had.
  bool has_news() const { return !content_.empty() || !thought_.empty() || !calls_.empty(); }

  // The whole of it, of one that has ended.
  Json Whole(int index);
  // What came since the last piece. `last`: with the reason that it ended for.
  Json Piece(int index, bool last);
  // The first piece of a chat.
  static Json Opening(int index);

 private:
  void BeginAnswer();
  void AddToken(const AnswerReader::Token& token);
  void AddText(std::string_view text);
  void TakeTools();
  std::string_view finish_reason() const;

  const ApiRequest& request_;
  const ServedModel& model_;
  AnswerReader reader_;
  StopFilter stop_;
  ScoreList scores_;
  const int32_t think_, think_end_;  // −1 where the tokenizer has none
  bool begun_ = false, stopped_ = false, in_thought_ = false;
  ToolCallReader tools_;
  std::string thought_, content_;
  Json calls_ = Json::array();  // whole ones
  int64_t num_calls_ = 0;
  size_t characters_ = 0;  // of the choice's text up to the next token
  int64_t tokens_ = 0;
};

}  // namespace statetap
