// shards, check.
#include <algorithm>

#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/json_list.h"
#include "client/cli/local_shards.h"
#include "client/cli/recapture.h"
#include "client/cli/table.h"
#include "proto/messages/shard_check.h"

namespace statetap {
namespace {

absl::StatusOr<v1::ListShardsResponse> ShardsOf(Context& context, const Source& source) {
  if (!source.job.empty()) {
    STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
    return client->ListShards(source.job);
  }
  v1::ListShardsResponse response;
  STATETAP_RETURN_IF_ERROR(ForEachShard(source.paths, [&](const ShardReader& shard) {
    *response.add_shards() = ShardMessage(shard);
    return absl::OkStatus();
  }));
  return response;
}

absl::StatusOr<int> Shards(Context& context, const std::vector<std::string>& words) {
  STATETAP_ASSIGN_OR_RETURN(const Source source, ParseSource(words));
  STATETAP_ASSIGN_OR_RETURN(const v1::ListShardsResponse response, ShardsOf(context, source));
  if (context.json) {
    context.PrintJson(JsonOf(response));
    return kExitDone;
  }
  if (response.shards().empty()) {
    context.Say("no committed shards yet");
    return kExitDone;
  }
  Table table({Left("shard"), Right("samples"), Right("rows"), Right("size"), Whole("digest"),
               Left("path")});
  for (const v1::Shard& shard : response.shards())
    table.Add({shard.name(), FormatCount(shard.samples()), FormatCount(shard.rows()),
               FormatBytes(shard.bytes()), shard.digest(), shard.path()});
  context.out << table.Format(context.table_width());
  return kExitDone;
}

v1::CheckResult CheckFile(const std::filesystem::path& path) {
  v1::CheckResult result;
  const absl::StatusOr<std::unique_ptr<ShardReader>> shard = ShardReader::Open(path);
  if (shard.ok()) {
    result = CheckShard(**shard);
  } else {
    result.set_message(std::string(MessageOf(shard.status())));
  }
  result.set_shard(path.string());
  return result;
}

absl::StatusOr<v1::CheckShardsResponse> CheckSource(Context& context, const Source& source) {
  if (!source.job.empty()) {
    STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
    return client->CheckShards(source.job);
  }
  v1::CheckShardsResponse response;
  const auto progress = context.MakeProgress();
  for (const std::filesystem::path& path : source.paths) {
    if (context.interrupted()) return absl::CancelledError("interrupted");
    progress->ShowCount("checking shards", response.results_size(),
                        static_cast<int64_t>(source.paths.size()));
    *response.add_results() = CheckFile(path);
  }
  return response;
}

struct CheckFlags {
  std::vector<std::string> source;
  bool model = false;
  RecaptureFlags recapture;
};

void PrintResults(Context& context, const v1::CheckShardsResponse& response, int damaged) {
  Table table({Left("shard"), Whole("result"), Left("damaged samples"), Left("message")});
  for (const v1::CheckResult& result : response.results())
    table.Add(
        {result.shard(), result.ok() ? "ok" : "DAMAGED",
         result.damaged().empty() ? "-" : fmt::format("{}", fmt::join(result.damaged(), ", ")),
         result.message()});
  // Names of damaged samples are never cut.
  context.out << table.Format(damaged == 0 ? context.table_width() : 0);
  context.out << fmt::format("{} of {} shards verified\n", response.results_size() - damaged,
                             response.results_size());
}

void PrintRecapture(Context& context, const Recapture& recapture) {
  Table table({Left("captured again"), Whole("result"), Right("rows"), Right("boundary"),
               Right("relative error"), Right("median of rows")});
  for (const RecapturedSample& sample : recapture.samples)
    table.Add({sample.id, sample.ok ? "ok" : "DIFFERS", FormatCount(sample.rows),
               std::to_string(sample.boundary), FormatNumber(sample.relative_error),
               FormatNumber(sample.median_error)});
  context.out << '\n' << table.Format(context.table_width());
  if (recapture.model_here != recapture.model_there)
    context.out << fmt::format("the states are of weights {}, the server has {}\n",
                               recapture.model_here, recapture.model_there);
}

Json RecaptureJson(const Recapture& recapture) {
  Json samples = Json::array();
  for (const RecapturedSample& sample : recapture.samples)
    samples.push_back({{"id", sample.id},
                       {"ok", sample.ok},
                       {"rows", sample.rows},
                       {"boundary", sample.boundary},
                       {"relative_error", JsonNumber(sample.relative_error)},
                       {"median_error", JsonNumber(sample.median_error)}});
  return {{"model_here", recapture.model_here},
          {"model_there", recapture.model_there},
          {"samples", std::move(samples)}};
}

absl::StatusOr<int> Check(Context& context, const CheckFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const Source source, ParseSource(flags.source));
  STATETAP_ASSIGN_OR_RETURN(const v1::CheckShardsResponse response, CheckSource(context, source));
  int damaged = 0;
  for (const v1::CheckResult& result : response.results()) damaged += result.ok() ? 0 : 1;
  std::optional<Recapture> recapture;
  if (flags.model && damaged == 0 && !response.results().empty()) {
    STATETAP_ASSIGN_OR_RETURN(recapture, RecaptureSamples(context, source, flags.recapture));
  }
  if (context.json) {
    Json json = JsonOf(response);
    if (flags.model) json["model"] = recapture ? RecaptureJson(*recapture) : Json(nullptr);
    context.PrintJson(json);
  }
  if (response.results().empty())
    return absl::FailedPreconditionError("no committed shards yet, so nothing was verified");
  if (!context.json) PrintResults(context, response, damaged);
  if (!context.json && recapture) PrintRecapture(context, *recapture);
  const bool same = !recapture || std::ranges::all_of(recapture->samples, &RecapturedSample::ok);
  return damaged == 0 && same ? kExitDone : kExitFailed;
}

void AddSource(CLI::App& app, std::vector<std::string>& words) {
  app.add_option("SOURCE", words, "One job, or any number of shard files and folders")->required();
}

Runner DeclareShards(CLI::App& app) {
  auto words = std::make_shared<std::vector<std::string>>();
  AddSource(app, *words);
  return [=](Context& context) { return Shards(context, *words); };
}

Runner DeclareCheck(CLI::App& app) {
  auto flags = std::make_shared<CheckFlags>();
  AddSource(app, flags->source);
  auto* model = app.add_flag("--model", flags->model,
                             "Have the server capture a few samples again, and compare the states");
  app.add_option("--samples", flags->recapture.samples, "How many, evenly spread [4]")
      ->check(AtLeastOne)
      ->needs(model);
  app.add_option("--max-error", flags->recapture.max_error,
                 "A sample differs where more than half of its rows are further away, relatively, "
                 "at some boundary [0.1]")
      ->check(RefuseNegative)
      ->needs(model);
  return [=](Context& context) { return Check(context, *flags); };
}

}  // namespace

std::vector<Command> ShardCommands() {
  return {
      {"shards", "Shards of a job or here: samples, rows, bytes, digest",
       "Examples:\n  statetap shards prompts.jsonl\n  statetap shards /data/shards --json",
       DeclareShards},
      {"check",
       "Reads shards again: verifies every checksum, names damaged samples, makes statistics again",
       "Exit 1 on damage, or where there is no shard.\n\nExamples:\n  statetap check "
       "prompts.jsonl\n"
       "  statetap check copy/of/shards\n"
       "  statetap check prompts.jsonl --model --samples 8    # captured again by the server",
       DeclareCheck}};
}

}  // namespace statetap
