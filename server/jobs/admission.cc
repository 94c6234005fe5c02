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
  if (!sample.split().empty() && sample.split() != "train" && sample.split() != "eval")
    return Input(fmt::format("split is \"{}\"; give train or eval, or leave it out",
                             CutMiddle(sample.split(), 40)));
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

// All but the text.
SampleRow FieldsOf(const v1::SampleInput& sample, const JobPlan& plan) {
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
  return row;
}

void SetText(SampleText text, const JobPlan& plan, Lengths lengths, SampleRow& row) {
  row.turn = text.turn;
  if (text.refusal) {
    row.rejection = Rejection{text.refusal->reason, {}, text.refusal->token, text.refusal->message};
    return;
  }
  row.text = text.counts;
  row.ids = std::move(text.ids);
  // What is not supervised before the first supervised token is the prompt.
  row.prompt_tokens = static_cast<int32_t>(
      std::find(text.mask.begin(), text.mask.end(), uint8_t{1}) - text.mask.begin());
  if (!plan.text.generate) row.mask = std::move(text.mask);
  if (lengths == Lengths::kCheck) row.rejection = CheckLength(row, plan);
}

// What is too long to be listed is not kept: the source line tells which sample it was.
void Shorten(SampleRow& row) {
  row.rejection->message = CutMiddle(row.rejection->message, kMostMessageBytes);
  row.source = CutMiddle(row.source, kMaxSourceBytes);
  if (row.meta_json.size() > kMaxMetaBytes) row.meta_json.clear();
}

}  // namespace

std::vector<SampleRow> AdmitSample(const v1::SampleInput& sample, const JobPlan& plan,
                                   const ServedModel& model, Lengths lengths) {
  std::vector<SampleRow> rows;
  const SampleRow fields = FieldsOf(sample, plan);
  if (fields.rejection) {
    rows.push_back(fields);
  } else {
    for (SampleText& text : TextsOf(sample, plan.text, model.text(), TextPurpose::kJob)) {
      rows.push_back(fields);
      SetText(std::move(text), plan, lengths, rows.back());
    }
  }
  for (SampleRow& row : rows) {
    if (row.rejection) Shorten(row);
  }
  return rows;
}

absl::StatusOr<SampleAdmitter> SampleAdmitter::Begin(const ServedModel& model,
                                                     const v1::JobOptions& options) {
  // Whatever the mode will be, these options must be possible.
  STATETAP_RETURN_IF_ERROR(PlanJob(options, MayGenerate(options), model).status());
  return SampleAdmitter(model, options);
}

SampleAdmitter::SampleAdmitter(const ServedModel& model, const v1::JobOptions& options)
    : model_(&model),
      given_(options),
      workers_(std::make_unique<WorkerPool>(
          static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u)))) {}

absl::Status SampleAdmitter::ResolveMode(const v1::SampleInput& sample) {
  const bool given = given_.mode() != v1::JOB_MODE_UNSPECIFIED;
  const bool generate =
      given ? given_.mode() == v1::JOB_MODE_GENERATE : DefaultsToGenerate(sample, given_);
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
  std::vector<std::vector<SampleRow>> admitted(static_cast<size_t>(samples.size()));
  workers_->ParallelFor(samples.size(), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      admitted[static_cast<size_t>(i)] =
          AdmitSample(samples[static_cast<int>(i)], *plan_, *model_, lengths);
  });
  std::vector<SampleRow> rows;
  for (int i = 0; i < samples.size(); ++i) {
    std::vector<SampleRow>& turns = admitted[static_cast<size_t>(i)];
    const std::string id = IdOf(samples[i], turns[0].digest);
    // The turns of a chat stay on one side of the split: they share their text.
    const std::string split = samples[i].split().empty()
                                  ? SplitOf(id, plan_->options.eval_fraction())
                                  : samples[i].split();
    for (SampleRow& row : turns) {
      row.id = IdOfTurn(id, row.turn);
      row.split = split;
      rows.push_back(std::move(row));
    }
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
    const Gate gate = admitter_.plan().options.gate() > 0 ? Gate::kAhead : Gate::kNone;
    STATETAP_ASSIGN_OR_RETURN(const int64_t key,
                              store_->CreateJob(ContentOf(admitter_.plan(), *model_), gate));
    open_.emplace(*store_, key);
  }
  STATETAP_ASSIGN_OR_RETURN(const JobStore::Added added, store_->AddSamples(open_->key(), rows));
  samples_ += added.to_do;
  tokens_ += added.tokens;
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
