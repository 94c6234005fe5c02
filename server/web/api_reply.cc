#include "server/web/api_reply.h"

#include <algorithm>
#include <cctype>

#include "extractor/text/utf8.h"

namespace statetap {
namespace {

struct Kind {
  int status;
  const char* type;
};
Kind KindOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument: return {400, "invalid_request_error"};
    case absl::StatusCode::kNotFound: return {404, "invalid_request_error"};
    case absl::StatusCode::kOutOfRange: return {413, "invalid_request_error"};
    case absl::StatusCode::kResourceExhausted: return {429, "rate_limit_error"};
    case absl::StatusCode::kUnavailable: return {503, "server_error"};
    default: return {500, "server_error"};
  }
}

// Our messages begin with the field: "stop: …", "options.seed: …".
Json FieldOf(std::string_view message) {
  std::string_view field = message.substr(0, message.find(": "));
  if (field.starts_with("options.")) field.remove_prefix(8);
  const bool named = field.size() < message.size() && field != "sample" &&
                     std::ranges::all_of(field, [](unsigned char c) {
                       return std::isalnum(c) != 0 || c == '_' || c == '.';
                     });
  return named ? Json(field) : Json();
}

// The token's text as the completions endpoint names it: bytes that are no text spelled out, so
// that two tokens never have one name for that.
std::string NameOf(const std::string& bytes) {
  if (CheckUtf8(bytes).ok()) return bytes;
  std::string name = "bytes:";
  for (const unsigned char byte : bytes) name += fmt::format("\\x{:02x}", byte);
  return name;
}

Json ChatToken(const std::string& bytes, float logprob) {
  Json values = Json::array();
  for (const unsigned char byte : bytes) values.push_back(byte);
  return {{"token", bytes}, {"logprob", logprob}, {"bytes", std::move(values)}};
}

}  // namespace

int HttpStatusOf(const absl::Status& status) { return KindOf(status).status; }

std::string ApiErrorBody(const absl::Status& status) {
  const std::string_view message = MessageOf(status);
  const Json field = FieldOf(message);
  return DumpJson({{"error",
                    {{"message", message},
                     {"type", KindOf(status).type},
                     {"param", field},
                     {"code", field == "model" ? Json("model_not_found") : Json()}}}});
}

Json ScoreList::Alternatives(int32_t id, const TokenScore& score) const {
  const std::string own = tokenizer_.DecodeBytes({&id, 1});
  const std::string best = tokenizer_.DecodeBytes({&score.best, 1});
  if (request_.chat) {
    return request_.alternatives == 0 ? Json::array()
                                      : Json::array({ChatToken(best, score.best_logprob)});
  }
  // The most likely first; the token itself is always there.
  Json all = Json::object();
  if (request_.alternatives > 0) all[NameOf(best)] = score.best_logprob;
  if (!all.contains(NameOf(own))) all[NameOf(own)] = score.logprob;
  return all;
}

void ScoreList::Add(int32_t id, const std::optional<TokenScore>& score, size_t text_offset) {
  if (!request_.scores) return;
  const std::string bytes = tokenizer_.DecodeBytes({&id, 1});
  if (request_.chat) {
    Json token = ChatToken(bytes, score->logprob);
    token["top_logprobs"] = Alternatives(id, *score);
    tokens_.push_back(std::move(token));
    return;
  }
  tokens_.push_back(NameOf(bytes));
  logprobs_.push_back(score ? Json(score->logprob) : Json());
  top_.push_back(score ? Alternatives(id, *score) : Json());
  offsets_.push_back(text_offset);
}

Json ScoreList::Take() {
  if (!request_.scores) return nullptr;
  Json taken = request_.chat ? Json{{"content", tokens_}}
                             : Json{{"tokens", tokens_},
                                    {"token_logprobs", logprobs_},
                                    {"top_logprobs", top_},
                                    {"text_offset", offsets_}};
  tokens_ = logprobs_ = top_ = offsets_ = Json::array();
  return taken;
}

}  // namespace statetap
