#include "server/web/choice.h"

#include <algorithm>

#include "extractor/base/text.h"

namespace statetap {

std::string StopFilter::Add(std::string_view text) {
  held_ += text;
  size_t cut = std::string::npos, keep = 0;
  for (const std::string& stop : stops_) {
    cut = std::min(cut, held_.find(stop));
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
      if (held_.ends_with(std::string_view(stop).substr(0, n))) keep = n;
    }
  }
  hit_ = cut != std::string::npos;
  const std::string certain = held_.substr(0, hit_ ? cut : held_.size() - keep);
  held_.erase(0, hit_ ? held_.size() : certain.size());
  return certain;
}

Choice::Choice(const ApiRequest& request, AnswerReader reader, const ServedModel& model)
    : request_(request),
      model_(model),
      reader_(std::move(reader)),
      stop_(request.stop),
      scores_(request, *model.tokenizer),
      think_(model.tokenizer->SpecialId("<think>").value_or(-1)),
      think_end_(model.tokenizer->SpecialId("</think>").value_or(-1)),
      tools_(*model.tokenizer) {
  in_thought_ = request.chat && reader_.task().input_ids.back() == think_;
}

AnswerReader::Event Choice::Next(std::chrono::milliseconds patience) {
  if (stopped_) return AnswerReader::Event::kEnd;
  AnswerReader::Token token;
  const AnswerReader::Event event = reader_.Next(patience, &token);
  if (event == AnswerReader::Event::kNothingYet) return event;
  if (!std::exchange(begun_, true)) BeginAnswer();
  if (event == AnswerReader::Event::kToken) {
    AddToken(token);
  } else {
    AddText(reader_.Rest());
    tools_.Finish();
    TakeTools();
    content_ += stop_.Rest();
  }
  return event;
}

// The prompt before the answer, where it was asked for.
void Choice::BeginAnswer() {
  if (!request_.echo) return;
  const std::vector<TokenScore> scores = reader_.PromptScores();
  StreamDecoder decoder(*model_.tokenizer);
  for (size_t i = 0; i < reader_.task().input_ids.size(); ++i) {
    const int32_t id = reader_.task().input_ids[i];
    const bool scored = i > 0 && i <= scores.size();
    scores_.Add(id, scored ? std::optional(scores[i - 1]) : std::nullopt, characters_);
    const std::string text = decoder.Add(id);
    characters_ += CountCharacters(text);
    content_ += text;
  }
  const std::string rest = decoder.Finish();
  characters_ += CountCharacters(rest);
  content_ += rest;
}

void Choice::AddToken(const AnswerReader::Token& token) {
  ++tokens_;
  scores_.Add(token.id, token.score, characters_);
  characters_ += CountCharacters(token.text);
  const bool opens = request_.chat && tokens_ == 1 && token.id == think_;
  const bool closes = in_thought_ && token.id == think_end_;
  if (opens || closes) {
    in_thought_ = opens;
  } else if (request_.chat && !in_thought_ && tools_.Take(token.id, token.text)) {
    TakeTools();
  } else {
    AddText(token.text);
  }
}

void Choice::TakeTools() {
  AddText(tools_.TakeBroken());
  for (Json& call : tools_.TakeCalls()) {
    calls_.push_back(std::move(call));
    ++num_calls_;
  }
}

std::string_view Choice::finish_reason() const {
  if (stopped_) return "stop";
  const std::string_view reason = reader_.finish_reason();
  return reason == "stop" && num_calls_ > 0 ? "tool_calls" : reason;
}

void Choice::AddText(std::string_view text) {
  if (in_thought_) {
    thought_ += text;
    return;
  }
  if (!stop_.hit()) content_ += stop_.Add(text);
  stopped_ = stop_.hit();
  if (stopped_) reader_.GiveUp();
}

Json Choice::Whole(int index) {
  Json choice = {{"index", index}};
  if (request_.chat) {
    // A chat that ended inside its thought, or that calls tools alone, has no content: that is not
    // an empty one.
    const bool none = in_thought_ || (content_.empty() && !calls_.empty());
    Json& message =
        choice["message"] = {{"role", "assistant"},
                             {"content", none ? Json() : Json(content_)},
                             {"reasoning_content", thought_.empty() ? Json() : Json(thought_)}};
    if (!calls_.empty()) message["tool_calls"] = calls_;
  } else {
    choice["text"] = content_;
  }
  choice["logprobs"] = scores_.Take();
  choice["finish_reason"] = finish_reason();
  return choice;
}

Json Choice::Opening(int index) {
  return {{"index", index},
          {"delta", {{"role", "assistant"}, {"content", ""}}},
          {"logprobs", nullptr},
          {"finish_reason", nullptr}};
}

Json Choice::Piece(int index, bool last) {
  Json choice = {{"index", index}};
  const std::string thought = std::exchange(thought_, {}), content = std::exchange(content_, {});
  if (request_.chat) {
    Json& delta = choice["delta"] = Json::object();
    if (!thought.empty()) delta["reasoning_content"] = thought;
    if (!content.empty()) delta["content"] = content;
    if (!calls_.empty()) {
      int64_t place = num_calls_ - static_cast<int64_t>(calls_.size());
      for (Json& call : calls_) call["index"] = place++;
      delta["tool_calls"] = std::exchange(calls_, Json::array());
    }
  } else {
    choice["text"] = content;
  }
  choice["logprobs"] = scores_.empty() ? Json() : scores_.Take();
  choice["finish_reason"] = last ? Json(finish_reason()) : Json();
  return choice;
}

}  // namespace statetap
