#include "server/jobs/job_plan.h"

#include <algorithm>

#include "extractor/base/digest.h"
#include "extractor/base/json.h"
#include "extractor/base/text.h"
#include "proto/messages/enum_name.h"

namespace statetap {
namespace {

constexpr size_t kMaxNameCharacters = 200;
constexpr int kDefaultMaxLength = 8192;
constexpr uint64_t kDefaultShardBytes = uint64_t{4} << 30;
constexpr uint64_t kLeastShardBytes = uint64_t{1} << 20;

template <typename T>
absl::Status Invalid(std::string_view field, const T& value, std::string_view remedy) {
  return absl::InvalidArgumentError(
      fmt::format("options.{}: {} is not possible; {}", field, value, remedy));
}

absl::StatusOr<std::vector<int>> CheckedTaps(const v1::JobOptions& options,
                                             const ServedModel& model) {
  std::vector<int> taps(options.taps().begin(), options.taps().end());
  const int layers = model.config.num_layers;
  if (taps.empty()) taps = model.DefaultTaps();
  if (taps.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("options.taps: {} has {} layers, too few for the default taps; give boundaries "
                    "in [0, {}]",
                    model.name, layers, layers));
  }
  for (size_t i = 0; i < taps.size(); ++i) {
    if (taps[i] < 0 || taps[i] > layers) {
      return Invalid("taps", taps[i],
                     fmt::format("{} has {} layers: boundaries are 0 (embedding) to {} (after the "
                                 "last layer)",
                                 model.name, layers, layers));
    }
    if (i > 0 && taps[i] <= taps[i - 1]) {
      return Invalid("taps", fmt::format("{} behind {}", taps[i], taps[i - 1]),
                     "give them ascending, each once");
    }
  }
  return taps;
}

absl::Status FillLengths(v1::JobOptions& options, const ServedModel& model) {
  if (options.max_length() == 0)
    options.set_max_length(std::min(kDefaultMaxLength, model.max_seq_len));
  if (options.max_length() < 2 || options.max_length() > model.max_seq_len) {
    return Invalid("max_length", options.max_length(),
                   fmt::format("give 2 to {}, the server's --max-seq-len", model.max_seq_len));
  }
  if (options.max_new_tokens() < 0)
    return Invalid("max_new_tokens", options.max_new_tokens(), "give 1 or more, or 0 for no limit");
  if (!v1::TooLong_IsValid(options.too_long()))
    return Invalid("too_long", static_cast<int>(options.too_long()), "give reject or truncate");
  if (options.too_long() == v1::TOO_LONG_UNSPECIFIED) options.set_too_long(v1::TOO_LONG_REJECT);
  if (options.shard_bytes() == 0) options.set_shard_bytes(kDefaultShardBytes);
  if (options.shard_bytes() < kLeastShardBytes)
    return Invalid("shard_bytes", options.shard_bytes(), "give 1048576 (1 MiB) or more");
  return absl::OkStatus();
}

absl::Status FillSampling(v1::JobOptions& options, const TextPlan& text) {
  if (!options.has_temperature()) options.set_temperature(DefaultTemperature(text.render.thinking));
  if (!(options.temperature() >= 0 && options.temperature() <= 100))
    return Invalid("temperature", options.temperature(), "give 0 (greedy) to 100");
  if (!options.has_top_p()) options.set_top_p(0.95);
  if (!(options.top_p() > 0 && options.top_p() <= 1))
    return Invalid("top_p", options.top_p(), "give a number above 0, at most 1");
  if (!options.has_logprobs()) options.set_logprobs(text.generate);
  return absl::OkStatus();
}

Json FieldJson(const google::protobuf::Message& message,
               const google::protobuf::FieldDescriptor* field) {
  using google::protobuf::FieldDescriptor;
  const auto* reflection = message.GetReflection();
  if (field->is_repeated()) {
    Json list = Json::array();
    for (int i = 0; i < reflection->FieldSize(message, field); ++i)
      list.push_back(reflection->GetRepeatedInt32(message, field, i));
    return list;
  }
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return reflection->GetInt32(message, field);
    case FieldDescriptor::CPPTYPE_INT64: return reflection->GetInt64(message, field);
    case FieldDescriptor::CPPTYPE_UINT64: return reflection->GetUInt64(message, field);
    case FieldDescriptor::CPPTYPE_DOUBLE: return reflection->GetDouble(message, field);
    case FieldDescriptor::CPPTYPE_BOOL: return reflection->GetBool(message, field);
    case FieldDescriptor::CPPTYPE_ENUM: return EnumName(*reflection->GetEnum(message, field));
    default: return reflection->GetString(message, field);
  }
}

}  // namespace

double DefaultTemperature(bool thinking) { return thinking ? 1.0 : 0.6; }

absl::StatusOr<JobPlan> PlanJob(const v1::JobOptions& given, bool generate,
                                const ServedModel& model, Capture capture) {
  JobPlan plan;
  plan.options = given;
  v1::JobOptions& options = plan.options;
  if (const size_t count = CountCharacters(options.name()); count > kMaxNameCharacters)
    return Invalid("name", fmt::format("a name of {} characters", count), "give 1 to 200");
  STATETAP_ASSIGN_OR_RETURN(plan.text, PlanText(given, generate, model.template_kind));
  FillTextOptions(plan.text, &options);
  plan.temperature_given = given.has_temperature();
  STATETAP_RETURN_IF_ERROR(FillLengths(options, model));
  STATETAP_RETURN_IF_ERROR(FillSampling(options, plan.text));
  if (options.states().empty()) options.set_states("bf16");
  if (options.states() != "bf16" && options.states() != "fp8")
    return Invalid("states", fmt::format("\"{}\"", options.states()), "give bf16 or fp8");
  if (options.gate() < 0) return Invalid("gate", options.gate(), "give 0 (no look) or more");
  if (options.priority() < -100 || options.priority() > 100)
    return Invalid("priority", options.priority(), "give -100 to 100");
  if (!(options.eval_fraction() >= 0 && options.eval_fraction() < 1))
    return Invalid("eval_fraction", options.eval_fraction(), "give 0 or more, below 1");
  if (capture == Capture::kNo) return plan;
  STATETAP_ASSIGN_OR_RETURN(const std::vector<int> taps, CheckedTaps(given, model));
  options.mutable_taps()->Assign(taps.begin(), taps.end());
  plan.boundaries = BoundariesOf(options, model.config.num_layers);
  return plan;
}

std::vector<int> BoundariesOf(const v1::JobOptions& options, int layers) {
  std::vector<int> boundaries(options.taps().begin(), options.taps().end());
  if (!options.no_final() && (boundaries.empty() || boundaries.back() != layers))
    boundaries.push_back(layers);
  return boundaries;
}

StatesDtype DtypeOf(const JobPlan& plan) {
  return plan.options.states() == "fp8" ? StatesDtype::kFp8 : StatesDtype::kBf16;
}

int64_t ShardBytes(const JobPlan& plan, const ServedModel& model, int64_t tokens, int64_t samples) {
  ShardConfig config;
  config.hidden = model.config.hidden;
  config.boundaries = plan.boundaries;
  config.dtype = DtypeOf(plan);
  return ExpectedShardBytes(config, tokens, samples,
                            static_cast<int64_t>(plan.options.shard_bytes()));
}

absl::StatusOr<JobPlan> PlanOfStored(std::string_view serialized_options,
                                     const ServedModel& model) {
  v1::JobOptions options;
  if (!options.ParseFromArray(serialized_options.data(),
                              static_cast<int>(serialized_options.size())))
    return absl::DataLossError("the job's stored options cannot be read");
  // The limit of the server that took the job may have been higher; whether that matters depends on
  // what is to do (JobRunner looks).
  const int32_t max_length = options.max_length();
  options.set_max_length(std::min(max_length, model.max_seq_len));
  STATETAP_ASSIGN_OR_RETURN(JobPlan plan,
                            PlanJob(options, options.mode() == v1::JOB_MODE_GENERATE, model));
  plan.options.set_max_length(max_length);
  return plan;
}

ContentConfig ContentOf(const JobPlan& plan, const ServedModel& model) {
  ContentConfig content = model.Content(plan.text.render.kind);
  if (!plan.text.generate) content.stop_ids.clear();
  return content;
}

int32_t MaxNewTokens(const JobPlan& plan, const SampleRow& sample) {
  const auto room = plan.options.max_length() - static_cast<int32_t>(sample.ids.size());
  const int32_t wanted =
      sample.max_new_tokens > 0 ? sample.max_new_tokens : plan.options.max_new_tokens();
  return wanted > 0 ? std::min(wanted, room) : room;
}

SampleTask TaskOf(const JobPlan& plan, const SampleRow& sample, std::string_view id,
                  const ServedModel& model) {
  const v1::JobOptions& options = plan.options;
  SampleTask task;
  task.input_ids = sample.ids;
  task.generate = plan.text.generate;
  task.max_length = options.max_length();
  if (task.generate) {
    task.max_new_tokens = MaxNewTokens(plan, sample);
    task.stop_ids = model.stop_ids;
  }
  task.sampling.temperature = sample.temperature.value_or(options.temperature());
  task.sampling.top_p = sample.top_p.value_or(options.top_p());
  task.sampling.seed = options.seed();
  task.sampling.key = Xxh3Of(std::as_bytes(std::span(id)));
  task.token_scores = options.logprobs();
  task.boundaries = plan.boundaries;
  return task;
}

std::string OptionsJson(const v1::JobOptions& options) {
  Json object = Json::object();
  const auto* descriptor = options.GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i)
    object[descriptor->field(i)->name()] = FieldJson(options, descriptor->field(i));
  return DumpJson(object);
}

std::string OptionDifferences(const v1::JobOptions& mine, const v1::JobOptions& theirs) {
  std::string differences;
  const auto* descriptor = mine.GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const auto* field = descriptor->field(i);
    const Json a = FieldJson(mine, field), b = FieldJson(theirs, field);
    if (a == b) continue;
    differences += fmt::format("{}{}: {} here, {} there", differences.empty() ? "" : "; ",
                               field->name(), DumpJson(a), DumpJson(b));
  }
  return differences;
}

}  // namespace statetap
