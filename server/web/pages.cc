#include "server/web/pages.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "extractor/base/log.h"
#include "extractor/base/text.h"
#include "proto/messages/html.h"
#include "proto/messages/statistics.h"
#include "proto/messages/statistics_html.h"
#include "proto/messages/surprise.h"
#include "server/jobs/job_plan.h"
#include "statetap/v1/jobs.pb.h"

namespace statetap {
namespace {

constexpr int64_t kRowsAPage = 100;

// A page that changes asks for itself every two seconds and takes the new <main>, unless nobody
// looks, or something is selected or opened. What had the focus keeps it.
constexpr std::string_view kScript = R"js("use strict";
setInterval(async () => {
  const main = document.querySelector("main[data-live]");
  if (!main || document.hidden || String(getSelection()) || main.querySelector("details[open]")) return;
  const reachable = "a, button, summary, [tabindex]";
  try {
    const answer = await fetch(location.href);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.querySelector("main");
    if (answer.ok && fresh && fresh.innerHTML !== main.innerHTML) {
      const focused = [...main.querySelectorAll(reachable)].indexOf(document.activeElement);
      main.replaceWith(fresh);
      if (focused >= 0) fresh.querySelectorAll(reachable)[focused]?.focus({preventScroll: true});
    }
    document.getElementById("state").textContent = "";
  } catch (error) {
    document.getElementById("state").textContent = "The server does not answer.";
  }
}, 2000);
)js";

// For a link: everything but letters and digits as %XX.
std::string EscapeUrl(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    out += plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

std::string Link(std::string_view target, std::string_view text) {
  return fmt::format("<a href=\"{}\">{}</a>", target, EscapeHtml(text));
}

std::string JobLink(const JobRecord& job) {
  return Link(fmt::format("/job?id={}", EscapeUrl(job.id)), job.name);
}

std::string Progress(const JobRecord& job) {
  const JobCounts& c = job.counts;
  return fmt::format("<progress max=\"{}\" value=\"{}\" aria-label=\"done\"></progress>",
                     std::max<int64_t>(1, c.submitted), c.submitted - c.to_do);
}

std::string NumberOrNone(const std::optional<int64_t>& number) {
  return number ? fmt::format("{}", *number) : "–";
}

std::string Row(std::string_view name, std::string_view html) {
  return fmt::format("<tr><th>{}</th><td class=\"wide\">{}</td></tr>\n", name, html);
}

}  // namespace

HttpReply Pages::Whole(int status, const Page& page, const HttpRequest& request) const {
  return {
      .status = status,
      .body = HtmlPage(
          fmt::format("{} · Statetap", page.title), "<script src=\"/page.js\" defer></script>\n",
          fmt::format("<p class=\"dim\"><a href=\"/\">Jobs</a> <span id=\"state\" class=\"bad\" "
                      "role=\"status\"></span></p>\n<main{}>\n<h1>{}</h1>\n{}</main>\n{}",
                      page.live == Live::kYes ? " data-live" : "", EscapeHtml(page.title),
                      page.body, access_.UnlockForm(request)))};
}

HttpReply Pages::NotShown(const absl::Status& status, const HttpRequest& request) const {
  int code = 500;
  if (absl::IsNotFound(status)) code = 404;
  if (absl::IsPermissionDenied(status)) code = 403;
  if (absl::IsFailedPrecondition(status)) code = 409;
  if (absl::IsUnavailable(status)) code = 503;
  return Whole(code,
               Page("Not shown", Live::kNo,
                    fmt::format("<p class=\"bad\">{}</p>", EscapeHtml(MessageOf(status)))),
               request);
}

HttpReply Pages::Handle(const HttpRequest& request) {
  const std::string& path = request.path;
  if (request.method == "POST") return Post(request);
  if (path == "/page.js") return {.type = "text/javascript", .body = std::string(kScript)};
  absl::StatusOr<Page> page = absl::NotFoundError("there is no such page");
  if (path == "/") page = Jobs();
  if (path == "/job") page = Job(request.Value("id"), access_.Unlocked(request));
  if (path == "/samples") page = Samples(request.Value("job"), request.Value("after"));
  if (path == "/sample") page = Sample(request.Value("job"), request.Value("id"));
  return page.ok() ? Whole(200, *page, request) : NotShown(page.status(), request);
}

HttpReply Pages::Post(const HttpRequest& request) {
  if (request.path == "/unlock") return access_.Unlock(request);
  if (request.path == "/lock") return access_.Lock(request);
  if (request.path != "/act")
    return NotShown(absl::NotFoundError("there is no such page"), request);
  auto fields = FormFields(request.body);
  absl::Status status;
  if (access_.MayChange(request)) {
    status = Act(fields["do"], fields["job"]);
  } else if (access_.possible()) {
    status = absl::PermissionDeniedError("nothing was changed: give the server's token below");
  } else {
    status = absl::PermissionDeniedError(
        "this page only reads: the server was started without --http-token");
  }
  if (!status.ok()) return NotShown(status, request);
  return RedirectTo(fmt::format("/job?id={}", EscapeUrl(fields["job"])));
}

absl::Status Pages::Act(const std::string& what, const std::string& id) {
  STATETAP_ASSIGN_OR_RETURN(const JobRecord job, store_.GetJob(id));
  LogInfo("{} \"{}\": {} from the web page", job.id, job.name, CutMiddle(what, 20));
  if (what == "pause") return runner_.Pause(job);
  if (what == "resume") return runner_.Resume(job);
  if (what == "cancel") return runner_.Cancel(job);
  return absl::NotFoundError("there are pause, resume and cancel");
}

// What can be done with it now. Cancelling takes two steps: there is no way back.
std::string Pages::Actions(const JobRecord& job) const {
  if (HasEnded(job.state)) return "";
  const std::string_view act = job.state == JobState::kPaused ? "resume" : "pause";
  return fmt::format(
      "<form method=\"post\" action=\"/act\">{}<input type=\"hidden\" name=\"job\" value=\"{}\">"
      "<button name=\"do\" value=\"{}\">{}</button>"
      "<details><summary>Cancel</summary><button name=\"do\" value=\"cancel\">Cancel what is to "
      "do: {} samples</button></details></form>\n",
      access_.KeyField(), EscapeHtml(job.id), act, act == "pause" ? "Pause" : "Resume",
      job.counts.to_do);
}

Pages::Page Pages::Jobs() {
  const absl::StatusOr<std::vector<JobRecord>> jobs = store_.ListJobs();
  std::string body = fmt::format("<p>{}, {} layers of hidden {}</p>\n", EscapeHtml(model_.name),
                                 model_.config.num_layers, model_.config.hidden);
  if (const absl::Status engine = runner_.engine_status(); !engine.ok()) {
    body += fmt::format("<p class=\"bad\">The engine has stopped: {}</p>\n",
                        EscapeHtml(MessageOf(engine)));
  }
  if (!jobs.ok()) {
    return Page("Jobs", Live::kYes,
                fmt::format("<p class=\"bad\">{}</p>", EscapeHtml(MessageOf(jobs.status()))));
  }
  if (jobs->empty()) body += "<p>No jobs yet: <code>statetap submit prompts.jsonl</code></p>\n";
  std::vector<std::vector<std::string>> rows;
  for (const JobRecord& job : *jobs) {
    const JobRunner::Live live = runner_.LiveOf(job.key);
    const JobCounts& c = job.counts;
    rows.push_back({JobLink(job), std::string(NameOf(job.state)), Progress(job),
                    fmt::format("{}", c.submitted), fmt::format("{}", c.stored),
                    fmt::format("{}", c.rejected), fmt::format("{}", c.cancelled),
                    fmt::format("{}", c.to_do), fmt::format("{}", job.tokens),
                    FormatBytes(job.bytes),
                    HasEnded(job.state) ? "–" : fmt::format("{:.0f}", live.tokens_per_second)});
  }
  if (!rows.empty()) {
    body += HtmlTable({"job", "state", "done", "#submitted", "#stored", "#rejected", "#cancelled",
                       "#to do", "#tokens", "#bytes", "#tok/s"},
                      rows);
  }
  return Page("Jobs", Live::kYes, body);
}

std::string Pages::JobFacts(const JobRecord& job, std::span<const ShardRow> shards) {
  const JobRunner::Live live = runner_.LiveOf(job.key);
  const JobCounts& c = job.counts;
  v1::JobOptions options;
  options.ParseFromString(job.options);
  std::string rows = Row("state", fmt::format("{} {}", NameOf(job.state), Progress(job)));
  if (!job.message.empty()) rows += Row("message", EscapeHtml(job.message));
  rows +=
      Row("samples", fmt::format("{} submitted = {} stored + {} rejected + {} cancelled + {} to "
                                 "do; of the stored {} excluded, {} evicted",
                                 c.submitted, c.stored, c.rejected, c.cancelled, c.to_do,
                                 c.excluded, c.evicted));
  rows += Row("tokens", fmt::format("{}, {} of them generated; {}", job.tokens, job.generated,
                                    FormatBytes(job.bytes)));
  if (!HasEnded(job.state))
    rows += Row("rate", fmt::format("{:.0f} tok/s", live.tokens_per_second));
  const std::vector<int> boundaries = BoundariesOf(options, model_.config.num_layers);
  std::vector<int> outputs;
  for (const int boundary : boundaries) outputs.push_back(boundary - 1);
  rows += Row("boundaries", fmt::format("{} (outputs of layers {})", fmt::join(boundaries, ", "),
                                        fmt::join(outputs, ", ")));
  rows += Row("sampling", fmt::format("temperature {}, top-p {}, seed {}", options.temperature(),
                                      options.top_p(), options.seed()));
  std::vector<std::string> folders;
  for (const auto& folder : folders_.FoldersWith(job.id, shards))
    folders.push_back(folder.string());
  rows += Row("shards in", EscapeHtml(fmt::format("{}", fmt::join(folders, ", "))));
  return "<table>" + rows + "</table>\n";
}

std::string Pages::ShardsTable(std::span<const ShardRow> shards) {
  if (shards.empty()) return "<p>No committed shards yet.</p>\n";
  std::vector<std::vector<std::string>> rows;
  for (const ShardRow& shard : shards) {
    rows.push_back({EscapeHtml(folders_.FromStored(shard.path).filename().string()),
                    fmt::format("{}", shard.samples), fmt::format("{}", shard.rows),
                    FormatBytes(shard.bytes), EscapeHtml(shard.digest),
                    shard.evicted ? "evicted" : ""});
  }
  return HtmlTable({"shard", "#samples", "#rows", "#bytes", "digest", ""}, rows);
}

std::string Pages::RejectedTable(const JobRecord& job) {
  const absl::StatusOr<std::vector<SampleListing>> rejected =
      store_.Rejected(job.key, -1, kRowsAPage);
  if (!rejected.ok() || rejected->empty()) return "<p>None.</p>\n";
  std::vector<std::vector<std::string>> rows;
  for (const SampleListing& listing : *rejected) {
    const Rejection rejection = listing.sample.rejection.value_or(Rejection{});
    rows.push_back({EscapeHtml(listing.sample.id), fmt::format("{}", listing.sample.source_line),
                    EscapeHtml(rejection.reason), NumberOrNone(rejection.layer),
                    NumberOrNone(rejection.token), EscapeHtml(rejection.message)});
  }
  std::string html = HtmlTable({"id", "#line", "reason", "#boundary", "#token", "~message"}, rows);
  if (job.counts.rejected > kRowsAPage) {
    html += fmt::format("<p>The first {} of {}; <code>statetap rejected</code> lists all.</p>\n",
                        kRowsAPage, job.counts.rejected);
  }
  return html;
}

absl::StatusOr<Pages::Page> Pages::Job(const std::string& id, bool may_change) {
  STATETAP_ASSIGN_OR_RETURN(const JobRecord job, store_.GetJob(id));
  const std::vector<ShardRow> shards = store_.Shards(job.key).value_or(std::vector<ShardRow>());
  std::string body = JobFacts(job, shards);
  if (may_change) body += Actions(job);
  if (job.counts.stored > 0) {
    body += fmt::format("<p>{}</p>\n", Link(fmt::format("/samples?job={}", EscapeUrl(job.id)),
                                            "Samples, token by token"));
  }
  const auto statistics = shards_.Statistics(job);
  if (!statistics.ok()) {
    body += fmt::format("<p class=\"bad\">{}</p>\n", EscapeHtml(MessageOf(statistics.status())));
  } else if (!statistics->statistics.empty()) {
    body += StatisticsHtml(StatisticsMessage(*statistics, Channels::kNo));
  }
  body += fmt::format("<h2>Shards</h2>\n{}<h2>Rejected</h2>\n{}", ShardsTable(shards),
                      RejectedTable(job));
  return Page(job.name, HasEnded(job.state) ? Live::kNo : Live::kYes, body);
}

absl::StatusOr<Pages::Page> Pages::Samples(const std::string& id, const std::string& after) {
  STATETAP_ASSIGN_OR_RETURN(const JobRecord job, store_.GetJob(id));
  int64_t from = -1;
  std::from_chars(after.data(), after.data() + after.size(), from);
  STATETAP_ASSIGN_OR_RETURN(const auto listings, store_.Stored(job.key, from, kRowsAPage));
  std::vector<std::vector<std::string>> rows;
  for (const SampleListing& listing : listings) {
    const StoredSample& stored = listing.stored;
    rows.push_back(
        {Link(fmt::format("/sample?job={}&id={}", EscapeUrl(job.id), EscapeUrl(listing.sample.id)),
              listing.sample.id),
         EscapeHtml(listing.sample.source), EscapeHtml(listing.sample.split),
         fmt::format("{}", listing.sample.prompt_tokens), fmt::format("{}", stored.rows),
         fmt::format("{}", stored.supervised), EscapeHtml(stored.finish),
         stored.mean_logprob ? fmt::format("{:.3f}", *stored.mean_logprob) : "–",
         listing.excluded ? "excluded" : ""});
  }
  std::string body = fmt::format("<p>{}</p>\n", JobLink(job)) +
                     HtmlTable({"id", "source", "split", "#prompt", "#tokens", "#supervised",
                                "finish", "#mean log p", ""},
                               rows);
  if (static_cast<int64_t>(listings.size()) == kRowsAPage) {
    body +=
        fmt::format("<p>{}</p>\n", Link(fmt::format("/samples?job={}&after={}", EscapeUrl(job.id),
                                                    listings.back().sample.index),
                                        "Next"));
  }
  return Page(fmt::format("Samples of {}", job.name), Live::kNo, body);
}

// Supervised tokens marked, surprising ones coloured; each token tells its id and log-probability
// when pointed at, and in a table for those who do not point.
absl::StatusOr<std::string> Pages::Tokens(const SampleRecord& record) {
  std::string html = "<div class=\"tokens\">";
  std::vector<std::vector<std::string>> rows;
  StreamDecoder decoder(*model_.tokenizer);
  for (size_t t = 0; t < record.input_ids.size(); ++t) {
    const int32_t id = record.input_ids[t];
    if (id < 0 || id >= model_.tokenizer->vocab()) {
      return absl::FailedPreconditionError(
          fmt::format("token {} is {}: the sample is of another tokenizer", t, id));
    }
    const bool scored = t < record.logprobs.size() && std::isfinite(record.logprobs[t]);
    const std::string score = scored ? fmt::format("{:.3f}", record.logprobs[t]) : "–";
    const std::string text = EscapeHtml(decoder.Add(id));
    html += fmt::format("<span class=\"{} p{}\" title=\"token {}, id {}{}\">{}</span>",
                        record.loss_mask[t] ? "s" : "", scored ? SurpriseOf(record.logprobs[t]) : 0,
                        t, id, scored ? ", log p " + score : "", text);
    rows.push_back({fmt::format("{}", t), fmt::format("{}", id), score,
                    record.loss_mask[t] ? "supervised" : "",
                    fmt::format("<span class=\"tokens\">{}</span>", text)});
  }
  return html + fmt::format(
                    "<span>{}</span></div>\n<details><summary>Token by token</summary>\n{}"
                    "</details>\n",
                    EscapeHtml(decoder.Finish()),
                    HtmlTable({"#token", "#id", "#log p", "", "text"}, rows));
}

absl::StatusOr<Pages::Page> Pages::Sample(const std::string& job_id, const std::string& id) {
  STATETAP_ASSIGN_OR_RETURN(const JobRecord job, store_.GetJob(job_id));
  STATETAP_ASSIGN_OR_RETURN(const IndexedSample sample, store_.FindStored(job.key, id));
  STATETAP_ASSIGN_OR_RETURN(const ShardRow row, store_.GetShard(job.key, sample.shard));
  STATETAP_ASSIGN_OR_RETURN(const auto shard, shards_.Open(row));
  STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard->ReadRecord(sample.position));
  STATETAP_ASSIGN_OR_RETURN(const std::string tokens, Tokens(record));
  return Page(
      record.id, Live::kNo,
      fmt::format(
          "<p>{}: source {}, split {}, {} tokens, {} of them prompt, {} supervised "
          "(<span class=\"tokens\"><span class=\"s\">marked</span></span>), finish {}. The model "
          "gave a token a probability <span class=\"tokens\"><span class=\"p1\">below 50 %</span>, "
          "<span class=\"p2\">below 10 %</span>, <span class=\"p3\">below 1 "
          "%</span></span>.</p>\n{}",
          JobLink(job), EscapeHtml(record.source), EscapeHtml(record.split),
          record.input_ids.size(), record.prompt_tokens,
          std::ranges::count(record.loss_mask, uint8_t{1}), EscapeHtml(record.finish_reason),
          tokens));
}

}  // namespace statetap
