#include "server/web/completions.h"

#include <chrono>
#include <ctime>
#include <map>
#include <memory>
#include <random>

#include "extractor/base/digest.h"
#include "extractor/base/text.h"
#include "server/jobs/ask.h"
#include "server/web/api_reply.h"
#include "server/web/choice.h"

namespace statetap {
namespace {

// How often a reply that waits looks whether its client is still there. It can look once it has
// begun, and its status is known then: what is wrong with the answer at once shows there.
constexpr std::chrono::milliseconds kPatience{200}, kBeginAfter{1000};

uint64_t RandomBits() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

HttpReply JsonReply(const Json& json) {
  return {.type = "application/json", .body = DumpJson(json)};
}

std::string Event(std::string_view data) { return fmt::format("data: {}\n\n", data); }

// A request and its answers, until the last byte is out.
class Exchange {
 public:
  Exchange(ApiRequest request, const ServedModel& model, std::atomic<int>& at_once)
      : request_(std::move(request)), model_(model), at_once_(at_once) {}
  ~Exchange() { --at_once_; }

  absl::Status Begin(JobRunner& runner);
  HttpReply Reply(std::shared_ptr<Exchange> self);

 private:
  bool WriteWhole(HttpSink& sink);
  bool WriteStream(HttpSink& sink);
  bool WriteChunks(HttpSink& sink, Choice& choice, int index);
  // Until something came or the answer ended; false where the client has gone.
  bool Advance(HttpSink& sink, Choice& choice, bool* ended);
  Json Envelope(std::string_view object) const;
  Json Usage() const;

  const ApiRequest request_;
  const ServedModel& model_;
  std::atomic<int>& at_once_;
  const std::string id_ = HexOf(RandomBits());
  const int64_t created_ = std::time(nullptr);
  std::vector<std::unique_ptr<Choice>> choices_;
};

absl::Status Exchange::Begin(JobRunner& runner) {
  std::vector<SampleTask> tasks;
  std::map<uint64_t, int> repeats;
  for (const v1::SampleInput& prompt : request_.prompts) {
    STATETAP_ASSIGN_OR_RETURN(SampleTask task,
                              TaskOfQuestion(prompt, request_.options, request_.generate, model_,
                                             repeats[ContentHash(prompt)]++));
    task.prompt_scores = request_.echo && request_.scores;
    tasks.push_back(std::move(task));
  }
  for (SampleTask& task : tasks) {
    STATETAP_ASSIGN_OR_RETURN(std::shared_ptr<Answer> answer, runner.Ask(std::move(task)));
    choices_.push_back(
        std::make_unique<Choice>(request_, AnswerReader(std::move(answer), model_), model_));
  }
  if (request_.stream) return absl::OkStatus();
  choices_[0]->Next(kBeginAfter);
  return choices_[0]->status();
}

HttpReply Exchange::Reply(std::shared_ptr<Exchange> self) {
  HttpReply reply;
  reply.type = request_.stream ? "text/event-stream" : "application/json";
  reply.write = [self](HttpSink& sink) {
    return self->request_.stream ? self->WriteStream(sink) : self->WriteWhole(sink);
  };
  return reply;
}

Json Exchange::Envelope(std::string_view object) const {
  return {{"id", fmt::format("{}-{}", request_.chat ? "chatcmpl" : "cmpl", id_)},
          {"object", object},
          {"created", created_},
          {"model", model_.name},
          {"system_fingerprint", model_.digest}};
}

Json Exchange::Usage() const {
  int64_t prompt = 0, answer = 0;
  for (const auto& choice : choices_) {
    prompt += choice->prompt_tokens();
    answer += choice->tokens();
  }
  return {
      {"prompt_tokens", prompt}, {"completion_tokens", answer}, {"total_tokens", prompt + answer}};
}

bool Exchange::Advance(HttpSink& sink, Choice& choice, bool* ended) {
  while (true) {
    const AnswerReader::Event event = choice.Next(kPatience);
    if (event != AnswerReader::Event::kNothingYet) {
      *ended = event == AnswerReader::Event::kEnd;
      return true;
    }
    if (sink.Gone()) return false;
  }
}

bool Exchange::WriteWhole(HttpSink& sink) {
  Json list = Json::array();
  for (const auto& choice : choices_) {
    int since = 0;
    for (bool ended = false; !ended;) {
      if (!Advance(sink, *choice, &ended)) return false;
      // Tokens may come faster than it ever has to wait.
      if (++since % 64 == 0 && sink.Gone()) return false;
    }
    if (!choice->status().ok()) return false;
    list.push_back(choice->Whole(static_cast<int>(list.size())));
  }
  Json reply = Envelope(request_.chat ? "chat.completion" : "text_completion");
  reply["choices"] = std::move(list);
  reply["usage"] = Usage();
  return sink.Write(DumpJson(reply));
}

bool Exchange::WriteChunks(HttpSink& sink, Choice& choice, int index) {
  bool ended = false;
  const auto write = [&](Json piece) {
    Json chunk = Envelope(request_.chat ? "chat.completion.chunk" : "text_completion");
    chunk["choices"] = Json::array({std::move(piece)});
    if (request_.stream_usage) chunk["usage"] = nullptr;
    return sink.Write(Event(DumpJson(chunk)));
  };
  if (request_.chat && !write(Choice::Opening(index))) return false;
  while (!ended) {
    if (!Advance(sink, choice, &ended)) return false;
    if (ended && !choice.status().ok()) {
      sink.Write(Event(ApiErrorBody(choice.status())));
      return false;
    }
    if (!ended && !choice.has_news()) continue;
    if (!write(choice.Piece(index, ended))) return false;
  }
  return true;
}

bool Exchange::WriteStream(HttpSink& sink) {
  for (size_t i = 0; i < choices_.size(); ++i) {
    if (!WriteChunks(sink, *choices_[i], static_cast<int>(i))) return false;
  }
  if (request_.stream_usage) {
    Json chunk = Envelope(request_.chat ? "chat.completion.chunk" : "text_completion");
    chunk["choices"] = Json::array();
    chunk["usage"] = Usage();
    if (!sink.Write(Event(DumpJson(chunk)))) return false;
  }
  return sink.Write(Event("[DONE]"));
}

}  // namespace

absl::StatusOr<HttpReply> Completions::Tokenize(const HttpRequest& request) const {
  STATETAP_ASSIGN_OR_RETURN(const auto ids, ParseTokenizeRequest(request.body, model_));
  return JsonReply({{"count", ids.size()}, {"max_model_len", most_tokens_}, {"tokens", ids}});
}

absl::StatusOr<HttpReply> Completions::Detokenize(const HttpRequest& request) const {
  STATETAP_ASSIGN_OR_RETURN(const auto ids, ParseDetokenizeRequest(request.body, model_));
  return JsonReply({{"prompt", model_.tokenizer->Decode(ids)}});
}

absl::StatusOr<HttpReply> Completions::Complete(const HttpRequest& request, bool chat) {
  const ApiDefaults defaults{model_, most_tokens_, RandomBits()};
  STATETAP_ASSIGN_OR_RETURN(ApiRequest parsed,
                            chat ? ParseChatRequest(request.body, defaults)
                                 : ParseCompletionRequest(request.body, defaults));
  const bool room = ++at_once_ <= kMostAtOnce;
  // Counts down when it goes.
  const auto exchange = std::make_shared<Exchange>(std::move(parsed), model_, at_once_);
  if (!room) {
    return absl::ResourceExhaustedError(
        fmt::format("{} requests are being answered; try again when one has ended", kMostAtOnce));
  }
  STATETAP_RETURN_IF_ERROR(exchange->Begin(runner_));
  return exchange->Reply(exchange);
}

absl::StatusOr<HttpReply> Completions::Models(const std::string& name) const {
  const Json model = {{"id", model_.name},
                      {"object", "model"},
                      {"created", 0},
                      {"owned_by", "statetap"},
                      {"max_model_len", most_tokens_}};
  if (name.empty()) return JsonReply({{"object", "list"}, {"data", Json::array({model})}});
  if (name == model_.name) return JsonReply(model);
  return absl::NotFoundError(fmt::format("model: \"{}\" is not served here; \"{}\" is",
                                         CutMiddle(name, 200), model_.name));
}

// The token that ends a text: the vendor's name where the tokenizer has it.
HttpReply Completions::TokenizerInfo() const {
  const Tokenizer& tokenizer = *model_.tokenizer;
  const auto named = tokenizer.SpecialId("[EOS]");
  const int32_t eos = named ? *named : model_.stop_ids.empty() ? -1 : model_.stop_ids[0];
  return JsonReply({{"tokenizer_class", "tiktoken"},
                    {"eos_token", eos < 0 ? Json() : Json(tokenizer.Decode({&eos, 1}))},
                    {"digest", tokenizer.digest()}});
}

std::optional<absl::StatusOr<HttpReply>> Completions::Route(const HttpRequest& request) {
  constexpr std::string_view kModels = "/v1/models";
  const std::string& path = request.path;
  if (request.method == "GET") {
    if (path == kModels) return Models("");
    if (path.starts_with("/v1/models/")) return Models(path.substr(kModels.size() + 1));
    if (path == "/tokenizer_info") return TokenizerInfo();
  } else if (request.method == "POST") {
    if (request.body_too_large)
      return absl::OutOfRangeError(
          "the request: its body has more bytes than this server takes at once; ask for fewer "
          "prompts at a time");
    if (path == "/v1/completions") return Complete(request, /*chat=*/false);
    if (path == "/v1/chat/completions") return Complete(request, /*chat=*/true);
    if (path == "/tokenize") return Tokenize(request);
    if (path == "/detokenize") return Detokenize(request);
  }
  if (!path.starts_with("/v1/")) return std::nullopt;
  return absl::NotFoundError(fmt::format(
      "there is no {} {}; GET /v1/models, POST /v1/completions and POST /v1/chat/completions are "
      "answered",
      request.method, CutMiddle(path, 200)));
}

std::optional<HttpReply> Completions::Handle(const HttpRequest& request) {
  std::optional<absl::StatusOr<HttpReply>> reply = Route(request);
  if (!reply) return std::nullopt;
  if (reply->ok()) return **std::move(reply);
  return HttpReply{.status = HttpStatusOf(reply->status()),
                   .type = "application/json",
                   .body = ApiErrorBody(reply->status())};
}

}  // namespace statetap
