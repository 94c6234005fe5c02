#include "client/cli/job_text.h"

#include "client/cli/text_width.h"
#include "client/lib/proto_json.h"

namespace statetap {
namespace {

void Line(std::string& text, std::string_view name, std::string_view value) {
  if (!value.empty()) text += fmt::format("  {:<10} {}\n", name, value);
}

std::string DescribeCounts(const v1::Counts& counts) {
  std::string text = fmt::format("{} submitted = {} stored + {} rejected + {} cancelled + {} to do",
                                 FormatCount(counts.submitted()), FormatCount(counts.stored()),
                                 FormatCount(counts.rejected()), FormatCount(counts.cancelled()),
                                 FormatCount(counts.to_do()));
  if (counts.running() > 0) text += fmt::format(" ({} running)", FormatCount(counts.running()));
  if (counts.excluded() > 0)
    text += fmt::format("; {} stored are excluded", FormatCount(counts.excluded()));
  if (counts.evicted() > 0) text += fmt::format("; {} evicted", FormatCount(counts.evicted()));
  return text;
}

std::string DescribeTokens(const v1::Job& job) {
  std::string text = fmt::format("{} stored", FormatCount(job.tokens()));
  if (job.generated_tokens() > 0)
    text += fmt::format(", {} of them generated", FormatCount(job.generated_tokens()));
  if (job.tokens_per_second() > 0)
    text += fmt::format("; {} tok/s", FormatRate(job.tokens_per_second()));
  if (!IsTerminal(job.state()) && job.eta_seconds() > 0)
    text += fmt::format("; ETA {}", FormatSeconds(job.eta_seconds()));
  return text;
}

std::string DescribeTimes(const v1::Job& job) {
  std::string text = fmt::format("created {}", FormatTime(job.created_unix_ms()));
  if (job.started_unix_ms() != 0) text += ", started " + FormatTime(job.started_unix_ms());
  if (job.ended_unix_ms() != 0) {
    const int64_t start =
        job.started_unix_ms() != 0 ? job.started_unix_ms() : job.created_unix_ms();
    text += fmt::format(", ended {} (took {})", FormatTime(job.ended_unix_ms()),
                        FormatSeconds(static_cast<double>(job.ended_unix_ms() - start) / 1000));
  }
  return text;
}

}  // namespace

std::string StateName(v1::JobState state) {
  const auto* value = v1::JobState_descriptor()->FindValueByNumber(state);
  return value == nullptr ? std::to_string(state) : EnumName(*value);
}

std::string DescribeJob(const v1::Job& job) {
  std::string text =
      fmt::format("job {} ({}) {}\n", job.id(), Printable(job.name()), StateName(job.state()));
  Line(text, "message", Printable(job.message()));
  Line(text, "samples", DescribeCounts(job.counts()));
  Line(text, "tokens", DescribeTokens(job));
  Line(text, "times", DescribeTimes(job));
  if (job.bytes() > 0)
    Line(text, "shards", fmt::format("{} ({})", job.shards_path(), FormatBytes(job.bytes())));
  if (job.boundaries_size() > 0)
    Line(text, "boundaries",
         fmt::format("{} (outputs of layers {})", fmt::join(job.boundaries(), ", "),
                     fmt::join(job.layer_outputs(), ", ")));
  Line(text, "digest", job.digest());
  return text;
}

int ExitCodeOf(const v1::Job& job, const Allowance& max_rejected) {
  if (job.state() != v1::JOB_STATE_SUCCEEDED) return kExitFailed;
  return max_rejected.Allows(job.counts().rejected(), job.counts().submitted()) ? kExitDone
                                                                                : kExitRejected;
}

absl::StatusOr<v1::Job> FollowJob(Context& context, const std::string& job,
                                  const std::function<void(const v1::Job&)>& each) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  const auto progress = context.MakeProgress();
  const auto on_change = [&](const v1::Job& state) {
    if (each != nullptr) each(state);
    progress->Show(state);
    return true;
  };
  const auto on_lost = [&](const absl::Status&) {
    progress->Say("lost the server; trying again (the job is safe there)");
  };
  absl::StatusOr<v1::Job> ended = client->WatchJob(job, on_change, on_lost);
  progress->Clear();
  if (absl::IsCancelled(ended.status()))
    context.Say(
        fmt::format("the job goes on; follow it with `statetap watch {0}`, stop it with "
                    "`statetap cancel {0}`",
                    job));
  if (ended.ok() && ended->counts().rejected() > 0)
    context.Say(fmt::format("{} rejected; why: `statetap rejected {}`",
                            FormatCount(ended->counts().rejected()), ended->id()));
  return ended;
}

}  // namespace statetap
