#include "server/jobs/admission.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "extractor/base/digest.h"
#include "extractor/base/json.h"
#include "extractor/base/text.h"

namespace statetap {
namespace {

constexpr size_t kMaxIdBytes = 1000;
constexpr size_t kMaxSourceBytes = 1000;
// A sample's meta travels in one message with its ids, and pages of samples with many.
constexpr size_t kMaxMetaBytes = size_t{64} << 10;
constexpr size_t kMostMessageBytes = 1000;  // a rejection may quote what it rejects

Rejection Input(std::string message) { return {"input", {}, {}, std::move(message)}; }

// Ids must survive in files and on terminals.
std::optional<Rejection> CheckFields(const v1::SampleInput& sample) {
  if (sample.id().size() > kMaxIdBytes)
    return Input(
        fmt::format("id has {} bytes; at most {} are allowed", sample.id().size(), kMaxIdBytes));
  if (sample.source().size() > kMaxSourceBytes)
    return Input(fmt::format("source has {} bytes; at most {} are allowed", sample.source().size(),
                             kMaxSourceBytes));
  if (sample.meta_json().size() > kMaxMetaBytes)
    return Input(
        fmt::format("meta has {} bytes of JSON; at most {} are allowed: keep what is long "
                    "in a file of your own, under the sample's id",
                    sample.meta_json().size(), kMaxMetaBytes));
  for (const std::string* text : {&sample.id(), &sample.source()}) {
    if (text->find('\0') != std::string::npos)
      return Input("id and source must not contain NUL characters");
  }
  if (sample.max_new_tokens() < 0)
    return Input(fmt::format("max_new_tokens is {}; give 1 or more, or leave it out",
                             sample.max_new_tokens()));
  if (sample.has_temperature() && !(sample.temperature() >= 0 && sample.temperature() <= 100))
    return Input(fmt::format("temperature is {}; give 0 (greedy) to 100", sample.temperature()));
  if (sample.has_top_p() && !(sample.top_p() > 0 && sample.top_p() <= 1))
    return Input(fmt::format("top_p is {}; give a number above 0, at most 1", sample.top_p()));
  if (sample.meta_json().empty()) return std::nullopt;
  const absl::StatusOr<Json> meta = ParseJson(sample.meta_json());
  if (!meta.ok()) return Input(fmt::format("meta: {}", MessageOf(meta.status())));
  if (!meta->is_object()) return Input("meta must be a JSON object of scalars");
  for (const auto& [key, value] : meta->items()) {
    if (value.is_structured()) return Input(fmt::format("meta.{} is not a scalar", key));
  }
  return std::nullopt;
}

std::optional<Rejection> CheckLength(SampleRow& row, const JobPlan& plan) {
  const auto tokens = static_cast<int64_t>(row.ids.size());
  const int64_t limit = plan.options.max_length();
  if (plan.text.generate) {
    if (tokens < limit) return std::nullopt;
    return Rejection{"too_long",
                     {},
                     {},
                     fmt::format("the prompt has {} tokens and leaves no room for an answer within "
                                 "max_length {}",
                                 tokens, limit)};
  }
  if (tokens <= limit) return std::nullopt;
  if (plan.options.too_long() == v1::TOO_LONG_TRUNCATE) {
    row.ids.resize(static_cast<size_t>(limit));
    row.mask.resize(static_cast<size_t>(limit));
    row.prompt_tokens = std::min<int32_t>(row.prompt_tokens, static_cast<int32_t>(limit));
    row.truncated = true;
    return std::nullopt;
  }
  return Rejection{
      "too_long", {}, {}, fmt::format("the text has {} tokens, max_length is {}", tokens, limit)};
}

std::string SplitOf(const std::string& id, double eval_fraction) {
  // 2^64 ids in order of their hash; the salt keeps the split apart from sampling keys.
  const std::string salted = "split:" + id;
  const auto hash = static_cast<double>(Xxh3Of(std::as_bytes(std::span(salted))));
  return hash < eval_fraction * 0x1p64 ? "eval" : "train";
}

bool EndsWithAnswer(const Json& messages) {
  if (!messages.is_array() || messages.empty()) return false;
  const Json* role = FindMember(messages.back(), "role");
  return role != nullptr && *role == "assistant";
}

bool HasAnswer(const Json& messages) {
  return std::any_of(messages.begin(), messages.end(), [](const Json& message) {
    const Json* role = FindMember(message, "role");
    return role != nullptr && *role == "assistant";
  });
}

// What can be rendered and yet gives no sample of a job.
absl::Status CheckForJob(const Json& messages, bool generate) {
  if (generate && EndsWithAnswer(messages)) {
    return absl::InvalidArgumentError(fmt::format(
        "messages[{}] is the assistant's, so there is nothing to answer; leave that turn out, or "
        "capture the chat as it is with mode prefill",
        messages.size() - 1));
  }
  if (!generate && messages.is_array() && !HasAnswer(messages)) {
    return absl::InvalidArgumentError(
        "no message is the assistant's, so no token would be supervised; use mode generate, or "
        "give "
        "the answer");
  }
  return CheckTextOnly(messages);  // nothing here could look at an image
}

RenderedSample RenderChatSample(const v1::SampleInput& sample, const TextPlan& plan,
                                const ServedModel& model, WithText with_text) {
  RenderedSample out;
  const absl::StatusOr<Json> messages = ParseJson(sample.chat().messages_json());
  if (!messages.ok()) {
    out.rejection = Input(fmt::format("messages: {}", MessageOf(messages.status())));
    return out;
  }
  absl::StatusOr<Json> tools = Json();
  if (!sample.chat().tools_json().empty()) tools = ParseJson(sample.chat().tools_json());
  if (!tools.ok()) {
    out.rejection = Input(fmt::format("tools: {}", MessageOf(tools.status())));
    return out;
  }
  RenderOptions options;
  options.kind = plan.kind;
  options.thinking = sample.has_thinking() ? sample.thinking() : plan.thinking;
  options.keep_reasoning = plan.keep_reasoning;
  options.generation_prompt = plan.generate;
  options.supervise_last = !plan.generate;
  if (with_text == WithText::kNo) {  // a sample of a job
    if (const absl::Status fits = CheckForJob(*messages, plan.generate); !fits.ok()) {
      out.rejection = Rejection{"template", {}, {}, std::string(MessageOf(fits))};
      return out;
    }
  }
  const auto segments = RenderChat(*messages, tools->is_null() ? nullptr : &*tools, options);
  if (!segments.ok()) {
    out.rejection = Rejection{"template", {}, {}, std::string(MessageOf(segments.status()))};
    return out;
  }
  if (with_text == WithText::kYes) out.text = TextOf(*segments);
  absl::StatusOr<EncodedText> encoded = EncodeSegments(*model.tokenizer, *segments);
  if (!encoded.ok()) {
    out.rejection = Input(std::string(MessageOf(encoded.status())));
    return out;
  }
  out.ids = std::move(encoded->ids);
  out.mask = std::move(encoded->loss_mask);
  return out;
}

RenderedSample RenderPrompt(const v1::SampleInput& sample, const ServedModel& model,
                            WithText with_text) {
  RenderedSample out;
  absl::StatusOr<std::vector<int32_t>> ids = model.tokenizer->Encode(sample.prompt());
  if (!ids.ok()) {
    out.rejection = Input(fmt::format("prompt: {}", MessageOf(ids.status())));
    return out;
  }
  out.ids = *std::move(ids);
  out.mask.assign(out.ids.size(), 1);
  if (with_text == WithText::kYes) out.text = sample.prompt();
  return out;
}

RenderedSample RenderIds(const v1::SampleInput& sample, const ServedModel& model,
                         WithText with_text) {
  RenderedSample out;
  const v1::TokenIds& tokens = sample.tokens();
  out.ids.assign(tokens.ids().begin(), tokens.ids().end());
  out.mask.assign(tokens.loss_mask().begin(), tokens.loss_mask().end());
  if (out.mask.empty()) out.mask.assign(out.ids.size(), 1);
  if (out.mask.size() != out.ids.size()) {
    out.rejection = Input(
        fmt::format("loss_mask has {} values for {} input_ids", out.mask.size(), out.ids.size()));
  } else if (std::any_of(out.mask.begin(), out.mask.end(), [](uint8_t m) { return m > 1; })) {
    out.rejection = Input("loss_mask holds values other than 0 and 1");
  }
  for (size_t i = 0; i < out.ids.size() && !out.rejection; ++i) {
    if (out.ids[i] >= 0 && out.ids[i] < model.config.vocab) continue;
    out.rejection = Rejection{"token_id",
                              {},
                              static_cast<int64_t>(i),
                              fmt::format("input_ids[{}] is {}, the vocabulary has ids 0 to {}", i,
                                          out.ids[i], model.config.vocab - 1)};
  }
  if (!out.rejection && with_text == WithText::kYes) out.text = model.tokenizer->Decode(out.ids);
  return out;
}

}  // namespace

bool DefaultsToGenerate(const v1::SampleInput& sample) {
  if (sample.has_tokens()) return false;
  if (!sample.has_chat()) return true;
  const absl::StatusOr<Json> messages = ParseJson(sample.chat().messages_json());
  return !messages.ok() || !EndsWithAnswer(*messages);
}

std::string ContentDigest(const v1::SampleInput& sample) {
  v1::SampleInput content = sample;
  content.clear_id();
  content.clear_source();
  content.clear_meta_json();
  content.clear_source_line();
  const std::string bytes = content.SerializeAsString();
  return HexOf(Xxh3Of(std::as_bytes(std::span(bytes))));
}

RenderedSample RenderSample(const v1::SampleInput& sample, const TextPlan& plan,
                            const ServedModel& model, WithText with_text) {
  RenderedSample out;
  switch (sample.content_case()) {
    case v1::SampleInput::kChat: out = RenderChatSample(sample, plan, model, with_text); break;
    case v1::SampleInput::kPrompt: out = RenderPrompt(sample, model, with_text); break;
    case v1::SampleInput::kTokens: out = RenderIds(sample, model, with_text); break;
    case v1::SampleInput::CONTENT_NOT_SET:
      out.rejection = Input("the sample has neither messages, prompt nor input_ids");
  }
  if (out.rejection) return out;
  if (out.ids.empty()) out.rejection = Input("the sample has no token");
  if (plan.generate) std::fill(out.mask.begin(), out.mask.end(), uint8_t{0});
  return out;
}

namespace {

SampleRow Admit(const v1::SampleInput& sample, const JobPlan& plan, const ServedModel& model,
                Lengths lengths) {
  SampleRow row;
  row.digest = ContentDigest(sample);
  row.id = sample.id();
  row.source = sample.source();
  row.meta_json = sample.meta_json();
  row.source_line = sample.source_line();
  row.rejection = CheckFields(sample);
  if (row.rejection) return row;
  row.max_new_tokens = sample.max_new_tokens();
  if (sample.has_top_p()) row.top_p = sample.top_p();
  if (sample.has_temperature()) {
    row.temperature = sample.temperature();
  } else if (sample.has_thinking() && !plan.temperature_given) {
    row.temperature = DefaultTemperature(sample.thinking());
  }
  RenderedSample rendered = RenderSample(sample, plan.text, model, WithText::kNo);
  row.rejection = std::move(rendered.rejection);
  if (row.rejection) return row;
  row.ids = std::move(rendered.ids);
  // What is not supervised before the first supervised token is the prompt.
  row.prompt_tokens = static_cast<int32_t>(
      std::find(rendered.mask.begin(), rendered.mask.end(), uint8_t{1}) - rendered.mask.begin());
  if (!plan.text.generate) row.mask = std::move(rendered.mask);
  if (lengths == Lengths::kCheck) row.rejection = CheckLength(row, plan);
  return row;
}

}  // namespace

SampleRow AdmitSample(const v1::SampleInput& sample, const JobPlan& plan, const ServedModel& model,
                      Lengths lengths) {
  SampleRow row = Admit(sample, plan, model, lengths);
  if (!row.rejection) return row;
  row.rejection->message = CutMiddle(row.rejection->message, kMostMessageBytes);
  // What is too long to be listed is not kept either: the source line tells which one it was.
  row.source = CutMiddle(row.source, kMaxSourceBytes);
  if (row.meta_json.size() > kMaxMetaBytes) row.meta_json.clear();
  return row;
}

absl::StatusOr<SampleAdmitter> SampleAdmitter::Begin(const ServedModel& model,
                                                     const v1::JobOptions& options) {
  // Whatever the mode will be, these options must be possible.
  STATETAP_RETURN_IF_ERROR(
      PlanJob(options, options.mode() != v1::JOB_MODE_PREFILL, model).status());
  return SampleAdmitter(model, options);
}

SampleAdmitter::SampleAdmitter(const ServedModel& model, const v1::JobOptions& options)
    : model_(&model),
      given_(options),
      workers_(std::make_unique<WorkerPool>(
          static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u)))) {}

absl::Status SampleAdmitter::ResolveMode(const v1::SampleInput& sample) {
  const bool given = given_.mode() != v1::JOB_MODE_UNSPECIFIED;
  const bool generate = given ? given_.mode() == v1::JOB_MODE_GENERATE : DefaultsToGenerate(sample);
  if (!plan_) {
    STATETAP_ASSIGN_OR_RETURN(plan_, PlanJob(given_, generate, *model_));
  } else if (generate != plan_->text.generate) {
    return absl::InvalidArgumentError(fmt::format(
        "options.mode: the sample of line {} is {}, those before it are not; submit them apart, or "
        "give the mode (generate or prefill) for all",
        sample.source_line(), generate ? "a prompt to answer" : "a finished text"));
  }
  return absl::OkStatus();
}

std::string SampleAdmitter::IdOf(const v1::SampleInput& sample, const std::string& digest) {
  // One that is too long was rejected for it; its digest stands for it.
  if (!sample.id().empty() && sample.id().size() <= kMaxIdBytes) return sample.id();
  const int64_t repeat = repeats_[digest]++;
  return repeat == 0 ? digest : fmt::format("{}#{}", digest, repeat);
}

absl::StatusOr<std::vector<SampleRow>> SampleAdmitter::Admit(const SampleBatch& samples,
                                                             Lengths lengths) {
  if (samples.size() > kMaxBatch) {
    return absl::InvalidArgumentError(
        fmt::format("samples: {} in one message; send at most {}", samples.size(), kMaxBatch));
  }
  for (const v1::SampleInput& sample : samples) STATETAP_RETURN_IF_ERROR(ResolveMode(sample));
  std::vector<SampleRow> rows(static_cast<size_t>(samples.size()));
  workers_->ParallelFor(samples.size(), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      rows[static_cast<size_t>(i)] =
          AdmitSample(samples[static_cast<int>(i)], *plan_, *model_, lengths);
  });
  for (int i = 0; i < samples.size(); ++i) {
    SampleRow& row = rows[static_cast<size_t>(i)];
    row.id = IdOf(samples[i], row.digest);
    row.split = SplitOf(row.id, plan_->options.eval_fraction());
  }
  return rows;
}

absl::StatusOr<Admission> Admission::Begin(JobStore& store, const ServedModel& model,
                                           const v1::JobOptions& options) {
  STATETAP_ASSIGN_OR_RETURN(SampleAdmitter admitter, SampleAdmitter::Begin(model, options));
  return Admission(store, model, options.name(), std::move(admitter));
}

absl::Status Admission::Add(const SampleBatch& samples) {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<SampleRow> rows,
                            admitter_.Admit(samples, Lengths::kCheck));
  if (rows.empty()) return absl::OkStatus();
  if (!open_) {
    STATETAP_ASSIGN_OR_RETURN(const int64_t key,
                              store_->CreateJob(ContentOf(admitter_.plan(), *model_)));
    open_.emplace(*store_, key);
  }
  for (const SampleRow& row : rows) {
    if (row.rejection) continue;
    ++samples_;
    tokens_ += static_cast<int64_t>(row.ids.size());
  }
  STATETAP_ASSIGN_OR_RETURN(const JobStore::Added added, store_->AddSamples(open_->key(), rows));
  duplicates_ += added.duplicates;
  return absl::OkStatus();
}

absl::StatusOr<JobStore::Published> Admission::Finish(int64_t free_bytes) {
  if (!open_) {
    return absl::InvalidArgumentError("samples: none came; a job needs at least one");
  }
  const int64_t bytes = ShardBytes(admitter_.plan(), *model_, tokens_, samples_);
  if (bytes > free_bytes) {
    return absl::ResourceExhaustedError(fmt::format(
        "the job's shards need at least {} bytes ({} tokens of {} samples before any answer) and "
        "{} "
        "are free; free space, start the server with other --shards, or submit fewer samples, "
        "fewer taps or --states fp8",
        bytes, tokens_, samples_, free_bytes));
  }
  const int64_t key = open_->Release();  // Publish removes what it refuses
  const auto difference = [&](std::string_view theirs) {
    v1::JobOptions other;
    other.ParseFromArray(theirs.data(), static_cast<int>(theirs.size()));
    return OptionDifferences(admitter_.plan().options, other);
  };
  return store_->PublishJob(key, name_, admitter_.plan().options.SerializeAsString(), difference);
}

}  // namespace statetap
