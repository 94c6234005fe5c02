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

// "1,204 left out of 3,310: 1,100 of earlier answers, 104 of tool turns (keep_reasoning last)".
std::string DescribeThoughts(const v1::Job& job) {
  const v1::TextReport& text = job.text();
  const std::pair<int64_t, std::string_view> dropped[] = {
      {text.dropped_earlier(), "earlier answers"},
      {text.dropped_tool_turns(), "earlier turns that call tools"},
      {text.dropped_last(), "last answers"}};
  int64_t total = 0;
  std::string places;
  for (const auto& [count, place] : dropped) {
    total += count;
    if (count > 0)
      places += fmt::format("{}{} of {}", places.empty() ? "" : ", ", FormatCount(count), place);
  }
  if (text.thoughts() == 0) return "";
  if (total == 0) return fmt::format("all {} kept", FormatCount(text.thoughts()));
  return fmt::format("{} of {} left out: {} (keep_reasoning {}, thinking {})", FormatCount(total),
                     FormatCount(text.thoughts()), places, job.options().keep_reasoning(),
                     job.options().thinking() ? "on" : "off");
}

std::string DescribeToolIds(const v1::TextReport& text) {
  if (text.odd_tool_ids() == 0) return "";
  return fmt::format("{} of {} calls have an id that is not functions.NAME:N, as the model writes",
                     FormatCount(text.odd_tool_ids()), FormatCount(text.tool_calls()));
}

std::string DescribeSpecials(const v1::Job& job) {
  if (job.text().spelled_specials() == 0) return "";
  return fmt::format(
      "{} spelled in assistants' text, {}", FormatCount(job.text().spelled_specials()),
      job.options().assistant_specials() == "parsed" ? "read as tokens" : "kept as text");
}

}  // namespace

std::string StateName(v1::JobState state) {
  const auto* value = v1::JobState_descriptor()->FindValueByNumber(state);
  return value == nullptr ? std::to_string(state) : EnumName(*value);
}

std::string ShardsPaths(const v1::Job& job) {
  return fmt::format("{}", fmt::join(job.shards_paths(), ", "));
}

std::string DescribeJob(const v1::Job& job) {
  std::string text =
      fmt::format("job {} ({}) {}\n", job.id(), Printable(job.name()), StateName(job.state()));
  Line(text, "message", Printable(job.message()));
  Line(text, "samples", DescribeCounts(job.counts()));
  Line(text, "tokens", DescribeTokens(job));
  Line(text, "thoughts", DescribeThoughts(job));
  Line(text, "tool ids", DescribeToolIds(job.text()));
  Line(text, "specials", DescribeSpecials(job));
  Line(text, "times", DescribeTimes(job));
  if (job.bytes() > 0)
    Line(text, "shards", fmt::format("{} ({})", ShardsPaths(job), FormatBytes(job.bytes())));
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
  const auto on_lost = [&](const absl::Status&) { progress->Say(kLostServer); };
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
