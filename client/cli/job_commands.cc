// list, show, watch, pause, resume, cancel, retry, delete.
#include "client/cli/commands.h"
#include "client/cli/job_text.h"
#include "client/cli/table.h"
#include "client/cli/text_width.h"
#include "client/lib/proto_json.h"
#include "extractor/base/json.h"

namespace statetap {
namespace {

std::shared_ptr<std::string> AddJob(CLI::App& app) {
  auto job = std::make_shared<std::string>();
  app.add_option("JOB", *job, "Job's id or name")->required();
  return job;
}

void PrintJob(Context& context, const v1::Job& job) {
  if (context.json) {
    context.PrintJson(JsonOf(job));
  } else {
    context.out << DescribeJob(job);
  }
}

absl::StatusOr<int> List(Context& context) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const std::vector<v1::Job> jobs, client->ListJobs());
  if (context.json) {
    Json list = Json::array();
    for (const v1::Job& job : jobs) list.push_back(JsonOf(job));
    context.PrintJson({{"jobs", std::move(list)}});
    return kExitDone;
  }
  if (jobs.empty()) {
    context.Say("no jobs; make one with `statetap submit FILE --wait`");
    return kExitDone;
  }
  Table table({Whole("job"), Left("name"), Whole("state"), Right("stored"), Right("of"),
               Right("rejected"), Right("tokens"), Right("size"), Right("tok/s"),
               Whole("created")});
  for (const v1::Job& job : jobs) {
    table.Add({job.id(), job.name(), StateName(job.state()), FormatCount(job.counts().stored()),
               FormatCount(job.counts().submitted()), FormatCount(job.counts().rejected()),
               FormatCount(job.tokens()), FormatBytes(job.bytes()),
               FormatRate(job.tokens_per_second()), FormatTime(job.created_unix_ms())});
  }
  context.out << table.Format(context.table_width());
  return kExitDone;
}

absl::StatusOr<int> Show(Context& context, const std::string& job) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const v1::Job state, client->GetJob(job));
  PrintJob(context, state);
  return kExitDone;
}

template <absl::StatusOr<v1::Job> (Client::*act)(const std::string&)>
absl::StatusOr<int> Control(Context& context, const std::string& job) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const v1::Job state, (client->*act)(job));
  PrintJob(context, state);
  return kExitDone;
}

absl::StatusOr<int> Retry(Context& context, const std::string& job) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const v1::RetryJobResponse answer, client->RetryJob(job));
  if (context.json) {
    context.PrintJson(JsonOf(answer));
    return kExitDone;
  }
  context.out << DescribeJob(answer.job());
  context.Say(fmt::format("{} samples run again; follow them with `statetap watch {}`",
                          FormatCount(answer.retried()), job));
  if (answer.kept() > 0)
    context.Say(
        fmt::format("{} stay rejected: they were refused as they came in; mend them and "
                    "submit them as a new job",
                    FormatCount(answer.kept())));
  return kExitDone;
}

absl::StatusOr<int> Evict(Context& context, const std::string& job) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const v1::EvictJobResponse answer, client->EvictJob(job));
  if (context.json) {
    context.PrintJson(JsonOf(answer));
    return kExitDone;
  }
  context.out << fmt::format(
      "{} given back; ids, masks, log-probabilities and statistics of {} "
      "samples are kept\n",
      FormatBytes(answer.bytes()), FormatCount(answer.job().counts().evicted()));
  context.Say(fmt::format("capture again with `statetap submit --from {}`", job));
  return kExitDone;
}

absl::StatusOr<int> Delete(Context& context, const std::string& job, bool yes) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  if (!yes) {
    STATETAP_ASSIGN_OR_RETURN(const v1::Job state, client->GetJob(job));
    STATETAP_ASSIGN_OR_RETURN(const bool confirmed,
                              context.Confirm(fmt::format(
                                  "Delete {} \"{}\" with {} stored samples, {} in {}?", state.id(),
                                  Printable(state.name()), FormatCount(state.counts().stored()),
                                  FormatBytes(state.bytes()), ShardsPaths(state))));
    if (!confirmed) {
      context.Say("nothing was deleted");
      return kExitFailed;
    }
  }
  STATETAP_ASSIGN_OR_RETURN(const v1::DeleteJobResponse gone, client->DeleteJob(job));
  if (context.json) {
    context.PrintJson(JsonOf(gone));
  } else {
    context.out << fmt::format("deleted; {} shards, {}\n", FormatCount(gone.shards()),
                               FormatBytes(gone.bytes()));
  }
  return kExitDone;
}

// docs/decisions/jobs-keep-their-samples.md
absl::Status DeleteSome(const std::string& job, const std::string& where) {
  return absl::InvalidArgumentError(fmt::format(
      "--where {0}: a job keeps its samples, because readers count on its rows; leave these out of "
      "streams and exports with `statetap exclude {1} --where '{0}'`, and to be rid of their bytes "
      "capture the others as a job of their own (`statetap submit --from {1}` takes no excluded "
      "ones) and delete {1}",
      where, job));
}

absl::StatusOr<int> Watch(Context& context, const std::string& job, const std::string& allowed) {
  STATETAP_ASSIGN_OR_RETURN(const Allowance max_rejected, ParseAllowance(allowed));
  std::function<void(const v1::Job&)> each;
  if (context.json) each = [&](const v1::Job& state) { context.PrintJson(JsonOf(state)); };
  STATETAP_ASSIGN_OR_RETURN(const v1::Job ended, FollowJob(context, job, each));
  if (!context.json) context.out << DescribeJob(ended);
  return ExitCodeOf(ended, max_rejected);
}

Command JobCommand(std::string name, std::string help, std::string examples,
                   absl::StatusOr<int> (*run)(Context&, const std::string&)) {
  return {std::move(name), std::move(help), std::move(examples), [run](CLI::App& app) -> Runner {
            const auto job = AddJob(app);
            return [=](Context& context) { return run(context, *job); };
          }};
}

}  // namespace

std::vector<Command> JobCommands() {
  Command list{"list", "All jobs, newest first", "Example:\n  statetap list --json",
               [](CLI::App&) -> Runner { return List; }};
  Command watch{"watch", "Follows a job until it ends and exits as `submit --wait` does",
                "A server that goes away, or stops answering, has two minutes to come back.\n\n"
                "Examples:\n  statetap watch prompts.jsonl\n"
                "  statetap watch JOB --json          # a line of JSON for every change",
                [](CLI::App& app) -> Runner {
                  const auto job = AddJob(app);
                  auto allowed = std::make_shared<std::string>("0");
                  app.add_option("--max-rejected", *allowed,
                                 "More rejected samples than N or P% exit with 3 [0]");
                  return [=](Context& context) { return Watch(context, *job, *allowed); };
                }};
  Command remove{
      "delete", "Removes a job, its samples and its shards; asks first",
      "Examples:\n  statetap delete JOB\n  statetap delete JOB --yes", [](CLI::App& app) -> Runner {
        const auto job = AddJob(app);
        auto yes = std::make_shared<bool>(false);
        app.add_flag("--yes", *yes, "Do not ask");
        auto where = std::make_shared<std::string>();
        app.add_option("--where", *where)->group("");  // known, so that its refusal helps
        return [=](Context& context) -> absl::StatusOr<int> {
          if (!where->empty()) return DeleteSome(*job, *where);
          return Delete(context, *job, *yes);
        };
      }};
  return {
      list,
      JobCommand("show", "A job's state, counts, tokens, rate and shards",
                 "Example:\n  statetap show prompts.jsonl", Show),
      watch,
      JobCommand("pause",
                 "Stops a job until `resume`; what is complete is stored, the rest begins again",
                 "Example:\n  statetap pause JOB", Control<&Client::PauseJob>),
      JobCommand("resume", "Goes on with a paused job", "Example:\n  statetap resume JOB",
                 Control<&Client::ResumeJob>),
      JobCommand("cancel", "Ends a job; stored samples stay", "Example:\n  statetap cancel JOB",
                 Control<&Client::CancelJob>),
      JobCommand("retry", "Runs a job's rejected samples again",
                 "Example:\n  statetap rejected JOB && statetap retry JOB", Retry),
      JobCommand(
          "evict", "Drops a job's states and keeps its tokens; `submit --from` captures again",
          "Example:\n  statetap evict JOB && statetap submit --from JOB --taps 1,4,6", Evict),
      remove};
}

}  // namespace statetap
