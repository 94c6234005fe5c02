// A job's options, checked against the served model and with every default filled in.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "proto/messages/sample_text.h"
#include "server/jobs/served_model.h"
#include "statetap/v1/jobs.pb.h"

namespace statetap {

struct JobPlan {
  v1::JobOptions options;  // every default filled in
  TextPlan text;
  bool temperature_given = false;  // else a sample with other thinking has another default
  std::vector<int> boundaries;     // ascending, the final one included if stored
};

// INVALID_ARGUMENT names the field, the value and the remedy.
enum class Capture { kYes, kNo };  // kNo: an answer without states; taps are not looked at
absl::StatusOr<JobPlan> PlanJob(const v1::JobOptions& options, bool generate,
                                const ServedModel& model, Capture capture = Capture::kYes);
// Of a stored job, whose defaults were filled in when it was made.
absl::StatusOr<JobPlan> PlanOfStored(std::string_view serialized_options, const ServedModel& model);

// The captured ones of options with their taps filled in: the taps and, unless it is left out, the
// final one (`layers`).
std::vector<int> BoundariesOf(const v1::JobOptions& options, int layers);

// What the job's content depends on besides its options.
ContentConfig ContentOf(const JobPlan& plan, const ServedModel& model);

// What the engine is asked for. `id`: the sample's, which its random numbers depend on.
SampleTask TaskOf(const JobPlan& plan, const SampleRow& sample, std::string_view id,
                  const ServedModel& model);
// Of a prompt: its own limit or the job's, and what max_length leaves.
int32_t MaxNewTokens(const JobPlan& plan, const SampleRow& sample);

StatesDtype DtypeOf(const JobPlan& plan);
// Expected bytes of the job's shard files.
int64_t ShardBytes(const JobPlan& plan, const ServedModel& model, int64_t tokens, int64_t samples);

double DefaultTemperature(bool thinking);

// The options as one JSON object, field names as in the contract, enums in lower case ("generate");
// and "field: a here, b there; …" for those that differ.
std::string OptionsJson(const v1::JobOptions& options);
std::string OptionDifferences(const v1::JobOptions& mine, const v1::JobOptions& theirs);

}  // namespace statetap
