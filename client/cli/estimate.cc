// estimate: what a job would come to, before it is submitted.
#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/input_faults.h"
#include "client/cli/job_flags.h"
#include "client/cli/table.h"
#include "client/lib/proto_json.h"

namespace statetap {
namespace {

struct EstimateFlags {
  std::vector<std::string> files;
  std::string from;
  bool skip_bad = false;
  JobFlags job;
};

std::string Time(double seconds) { return seconds > 0 ? FormatSeconds(seconds) : "-"; }
int64_t Tokens(const v1::LengthEstimate& estimate) {
  return estimate.prompt_tokens() + static_cast<int64_t>(estimate.answer_tokens());
}

void Print(Context& context, const v1::EstimateResponse& response) {
  const v1::LengthEstimate& asked = response.estimate();
  context.out << fmt::format("{} samples, {} tokens ({} of them answers), {}, {}\n",
                             FormatCount(asked.samples()), FormatCount(Tokens(asked)),
                             FormatCount(static_cast<int64_t>(asked.answer_tokens())),
                             FormatBytes(asked.bytes()),
                             asked.seconds() > 0 ? "about " + FormatSeconds(asked.seconds())
                                                 : "time unknown: no job has run yet");
  if (asked.rejected() > 0)
    context.out << fmt::format("{} samples would be rejected\n", FormatCount(asked.rejected()));
  if (asked.answer_tokens() > 0 && response.pilot_answers() == 0) {
    context.out
        << "answers are taken as long as the limits allow: at most this; --from a pilot job "
           "takes their lengths from there\n";
  } else if (response.pilot_answers() > 0) {
    context.out << fmt::format("lengths of answers by source from {} answers\n",
                               FormatCount(response.pilot_answers()));
    if (response.pilot_capped() > 0)
      context.out << fmt::format(
          "{} of them ended at the pilot's limit: under longer limits this is a lower bound\n",
          FormatCount(response.pilot_capped()));
  }
  if (response.tokens_per_second() > 0)
    context.out << fmt::format("{} tok/s as measured on {}\n",
                               FormatRate(response.tokens_per_second()), response.rate_from());
  context.out << fmt::format("{} free where shards go{}\n\n", FormatBytes(response.free_bytes()),
                             asked.bytes() > response.free_bytes() ? ": NOT ENOUGH" : "");
  Table table({Right("max length"), Right("samples"), Right("rejected"), Right("cut"),
               Right("tokens"), Right("size"), Right("time")});
  for (const v1::LengthEstimate& row : response.by_max_length()) {
    table.Add({FormatCount(row.max_length()), FormatCount(row.samples()),
               FormatCount(row.rejected()), FormatCount(static_cast<int64_t>(row.cut() + 0.5)),
               FormatCount(Tokens(row)), FormatBytes(row.bytes()), Time(row.seconds())});
  }
  context.out << table.Format(context.table_width());
}

absl::StatusOr<int> Estimate(Context& context, const EstimateFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const v1::JobOptions options, OptionsFrom(flags.job));
  STATETAP_ASSIGN_OR_RETURN(const auto files, OpenInput(flags.files));
  STATETAP_ASSIGN_OR_RETURN(const InputSummary summary,
                            CheckInput(context, *files, flags.skip_bad));
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  const auto progress = context.MakeProgress();
  const auto send_all = [&](const Client::SendSamples& send) -> absl::Status {
    int64_t sent = 0;
    SampleBatcher batcher(send);
    STATETAP_RETURN_IF_ERROR(files->ForEach(
        [&](InputLine line) -> absl::Status {
          if (context.interrupted()) return absl::CancelledError("interrupted");
          if (!line.parsed.ok()) return absl::OkStatus();  // named by the check, to be skipped
          progress->ShowCount("rendering", ++sent, summary.samples);
          return batcher.Add(std::move(line.parsed->sample));
        },
        nullptr));
    return batcher.Flush();
  };
  const absl::StatusOr<v1::EstimateResponse> response =
      client->Estimate(options, flags.from, send_all);
  progress->Clear();
  STATETAP_RETURN_IF_ERROR(response.status());
  if (context.json) {
    context.PrintJson(JsonOf(*response));
  } else {
    Print(context, *response);
  }
  return kExitDone;
}

}  // namespace

Command EstimateCommand() {
  return {"estimate", "Tokens, bytes and time that a job of these files would take",
          "Examples:\n  statetap estimate chats.jsonl --from pilot\n"
          "  statetap estimate chats.jsonl --states fp8 --max-length 4096 --json",
          [](CLI::App& app) -> Runner {
            auto flags = std::make_shared<EstimateFlags>();
            app.add_option("FILE", flags->files, "JSON lines; - is standard input")->required();
            app.add_option("--from", flags->from,
                           "A job that says how long answers are, by source, and how fast it goes");
            app.add_flag("--skip-bad", flags->skip_bad, "Leave out lines that are no samples");
            AddTextFlags(app, flags->job);
            AddSamplingFlags(app, flags->job);
            AddCaptureFlags(app, flags->job);
            return [=](Context& context) { return Estimate(context, *flags); };
          }};
}

}  // namespace statetap
