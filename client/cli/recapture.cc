#include "client/cli/recapture.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "client/cli/compare.h"

namespace statetap {
namespace {

v1::JobOptions OptionsFor(const std::vector<SampleStates>& samples) {
  const SampleStates& first = samples.front();
  v1::JobOptions options;
  options.set_name(fmt::format("check --model {:08x}", std::random_device()()));
  options.set_mode(v1::JOB_MODE_PREFILL);
  options.set_template_("none");
  options.set_no_final(first.boundaries.back() != first.layers);
  for (const int boundary : first.boundaries)
    if (boundary != first.layers) options.add_taps(boundary);
  size_t longest = 2;
  for (const SampleStates& sample : samples)
    longest = std::max(longest, sample.record.input_ids.size());
  options.set_max_length(static_cast<int32_t>(longest));
  return options;
}

absl::StatusOr<v1::Job> Submit(Client& client, const std::vector<SampleStates>& samples) {
  return client.CreateJob(
      OptionsFor(samples), [&](const Client::SendSamples& send) -> absl::Status {
        SampleBatcher batcher(send);
        for (const SampleStates& stored : samples) {
          v1::SampleInput sample;
          sample.set_id(stored.record.id);
          const SampleRecord& record = stored.record;
          sample.mutable_tokens()->mutable_ids()->Assign(record.input_ids.begin(),
                                                         record.input_ids.end());
          sample.mutable_tokens()->set_loss_mask(record.loss_mask.data(), record.loss_mask.size());
          STATETAP_RETURN_IF_ERROR(batcher.Add(std::move(sample)));
        }
        return batcher.Flush();
      });
}

absl::StatusOr<RecapturedSample> Compare(SampleSource& again, const SampleStates& stored,
                                         double max_error) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const absl::StatusOr<SampleStates> captured = again.Read(stored.record.id);
  if (absl::IsFailedPrecondition(captured.status()))  // rejected: not stored
    return RecapturedSample{.id = stored.record.id, .relative_error = kNan, .median_error = kNan};
  STATETAP_RETURN_IF_ERROR(captured.status());
  StatesComparison comparison(/*head_rows=*/0);
  STATETAP_RETURN_IF_ERROR(comparison.Add(stored, *captured, /*expected_pairs=*/1));
  const SampleDifference& found = comparison.samples().front();
  return RecapturedSample{.id = found.id,
                          .rows = found.rows,
                          .boundary = found.boundary,
                          .relative_error = found.relative_error,
                          .median_error = found.median_error,
                          .ok = found.median_error <= max_error};
}

}  // namespace

absl::StatusOr<Recapture> RecaptureSamples(Context& context, const Source& source,
                                           const RecaptureFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const auto stored, SampleSource::Open(context, source));
  STATETAP_ASSIGN_OR_RETURN(const auto ids, stored->Ids(/*where=*/""));
  std::vector<SampleStates> samples;
  for (const std::string& id : EvenlySpread(ids, flags.samples)) {
    STATETAP_ASSIGN_OR_RETURN(samples.emplace_back(), stored->Read(id));
  }
  if (samples.empty()) return absl::FailedPreconditionError("no stored sample to capture again");
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const v1::ModelDescription model, client->DescribeModel());
  Recapture recapture{samples.front().model_digest, model.weight_digest(), {}};
  STATETAP_ASSIGN_OR_RETURN(const v1::Job job, Submit(*client, samples));
  const auto compare = [&]() -> absl::Status {
    const auto progress = context.MakeProgress();
    const auto show = [&](const v1::Job& now) {
      progress->ShowCount("capturing again", now.counts().stored(),
                          static_cast<int64_t>(samples.size()));
      return !context.interrupted();
    };
    STATETAP_RETURN_IF_ERROR(client->WatchJob(job.id(), show, nullptr).status());
    STATETAP_ASSIGN_OR_RETURN(const auto again, SampleSource::Open(context, {.job = job.id()}));
    for (const SampleStates& sample : samples) {
      STATETAP_ASSIGN_OR_RETURN(recapture.samples.emplace_back(),
                                Compare(*again, sample, flags.max_error));
    }
    return absl::OkStatus();
  };
  const absl::Status compared = compare();
  const absl::Status deleted = client->DeleteJob(job.id()).status();
  STATETAP_RETURN_IF_ERROR(compared);
  STATETAP_RETURN_IF_ERROR(deleted);
  return recapture;
}

}  // namespace statetap
