// Replies of the OpenAI shape: the pieces of an answer as JSON.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "extractor/base/json.h"
#include "extractor/engine/hidden_state_sink.h"
#include "extractor/text/tokenizer.h"
#include "server/web/api_request.h"

namespace statetap {

// {"error": {…}}: `param` is the field that the status names, if it names one.
std::string ApiErrorBody(const absl::Status& status);
int HttpStatusOf(const absl::Status& status);

// The scores of one choice, in the shape of its endpoint, gathered token by token.
class ScoreList {
 public:
  ScoreList(const ApiRequest& request, const Tokenizer& tokenizer)
      : request_(request), tokenizer_(tokenizer) {}
  // `score`: none for a text's first token. `text`: where the token's text begins in the choice's,
  // in characters.
  void Add(int32_t id, const std::optional<TokenScore>& score, size_t text_offset);
  bool empty() const { return tokens_.empty(); }
  // What was gathered since the last call; null where none are wanted.
  Json Take();

 private:
  Json Alternatives(int32_t id, const TokenScore& score) const;
  const ApiRequest& request_;
  const Tokenizer& tokenizer_;
  Json tokens_ = Json::array(), logprobs_ = Json::array(), top_ = Json::array(),
       offsets_ = Json::array();
};

}  // namespace statetap
