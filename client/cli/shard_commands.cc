// shards, check.
#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/json_list.h"
#include "client/cli/local_shards.h"
#include "client/cli/table.h"

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
  result.set_shard(path.string());
  const absl::StatusOr<std::unique_ptr<ShardReader>> shard = ShardReader::Open(path);
  if (!shard.ok()) {
    result.set_message(std::string(MessageOf(shard.status())));
    return result;
  }
  const absl::StatusOr<std::vector<int64_t>> damaged = (*shard)->Verify();
  if (!damaged.ok()) {
    result.set_message(std::string(MessageOf(damaged.status())));
    return result;
  }
  for (const int64_t sample : *damaged)
    result.add_damaged((*shard)->samples()[static_cast<size_t>(sample)].id);
  result.set_ok(damaged->empty());
  if (!damaged->empty()) result.set_message("checksums differ from what was stored");
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

absl::StatusOr<int> Check(Context& context, const std::vector<std::string>& words) {
  STATETAP_ASSIGN_OR_RETURN(const Source source, ParseSource(words));
  STATETAP_ASSIGN_OR_RETURN(const v1::CheckShardsResponse response, CheckSource(context, source));
  int damaged = 0;
  for (const v1::CheckResult& result : response.results()) damaged += result.ok() ? 0 : 1;
  if (context.json) context.PrintJson(JsonOf(response));
  if (response.results().empty())
    return absl::FailedPreconditionError("no committed shards yet, so nothing was verified");
  if (context.json) return damaged == 0 ? kExitDone : kExitFailed;
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
  return damaged == 0 ? kExitDone : kExitFailed;
}

Runner Declare(CLI::App& app,
               absl::StatusOr<int> (*run)(Context&, const std::vector<std::string>&)) {
  auto words = std::make_shared<std::vector<std::string>>();
  app.add_option("SOURCE", *words, "One job, or any number of shard files and folders")->required();
  return [=](Context& context) { return run(context, *words); };
}

}  // namespace

std::vector<Command> ShardCommands() {
  return {{"shards", "Shards of a job or here: samples, rows, bytes, digest",
           "Examples:\n  statetap shards prompts.jsonl\n  statetap shards /data/shards --json",
           [](CLI::App& app) { return Declare(app, Shards); }},
          {"check", "Reads shards again, verifies every checksum, names damaged samples",
           "Exit 1 on damage, or where there is no shard.\n\nExamples:\n  statetap check "
           "prompts.jsonl\n"
           "  statetap check copy/of/shards",
           [](CLI::App& app) { return Declare(app, Check); }}};
}

}  // namespace statetap
