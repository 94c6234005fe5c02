// samples, rejected, exclude.
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/json_list.h"
#include "client/cli/local_shards.h"
#include "client/cli/table.h"
#include "client/lib/proto_json.h"
#include "extractor/base/file.h"

namespace statetap {
namespace {

constexpr int kRowsPerTable = 1000;  // long lists are aligned and printed piece by piece

using VisitSample = std::function<absl::Status(const v1::Sample&)>;

absl::Status ForEachSampleOf(Context& context, const Source& source, const std::string& where,
                             const VisitSample& visit) {
  STATETAP_ASSIGN_OR_RETURN(const SampleFilter filter, SampleFilter::Parse(where));
  if (!source.job.empty()) {
    STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
    return client->ForEachSample(source.job, where, visit);
  }
  return ForEachShard(source.paths, [&](const ShardReader& shard) -> absl::Status {
    for (size_t i = 0; i < shard.samples().size(); ++i) {
      if (context.interrupted()) return absl::CancelledError("interrupted");
      STATETAP_ASSIGN_OR_RETURN(const SampleRecord record,
                                shard.ReadRecord(static_cast<int64_t>(i)));
      if (!filter.Holds(FactsOf(record))) continue;
      STATETAP_RETURN_IF_ERROR(visit(SampleMessage(shard, shard.samples()[i], record)));
    }
    return absl::OkStatus();
  });
}

// Rows that are printed in tables of bounded size.
class RowPrinter {
 public:
  RowPrinter(Context& context, std::vector<Column> columns)
      : context_(context), columns_(std::move(columns)), table_(columns_) {}
  ~RowPrinter() { Flush(); }
  void Add(const std::vector<std::string>& cells) {
    table_.Add(cells);
    if (++rows_ % kRowsPerTable == 0) Flush();
  }
  int64_t rows() const { return rows_; }

 private:
  void Flush() {
    if (table_.empty()) return;
    context_.out << table_.Format(context_.table_width());
    table_ = Table(columns_);
  }
  Context& context_;
  std::vector<Column> columns_;
  Table table_;
  int64_t rows_ = 0;
};

absl::Status PrintSamples(Context& context, const Source& source, const std::string& where) {
  RowPrinter rows(context,
                  {Whole("id"), Left("source"), Left("split"), Right("prompt"), Right("tokens"),
                   Right("supervised"), Left("finish"), Right("logprob"), Left("shard")});
  STATETAP_RETURN_IF_ERROR(ForEachSampleOf(context, source, where, [&](const v1::Sample& sample) {
    rows.Add({sample.id(), sample.source(), sample.split(), FormatCount(sample.prompt_tokens()),
              FormatCount(sample.tokens()), FormatCount(sample.supervised_tokens()),
              sample.finish_reason() + (sample.truncated() ? ", truncated" : "") +
                  (sample.excluded() ? ", excluded" : ""),
              sample.has_mean_logprob() ? FormatFixed(sample.mean_logprob(), 3) : "-",
              sample.shard()});
    return absl::OkStatus();
  }));
  if (rows.rows() == 0)
    context.Say(where.empty() ? "no stored samples yet" : "--where holds for no stored sample");
  return absl::OkStatus();
}

absl::StatusOr<int> Samples(Context& context, const std::vector<std::string>& words,
                            const std::string& where) {
  STATETAP_ASSIGN_OR_RETURN(const Source source, ParseSource(words));
  if (!context.json) {
    STATETAP_RETURN_IF_ERROR(PrintSamples(context, source, where));
    return kExitDone;
  }
  // The list begins with the first answer, so that an error leaves standard output empty.
  std::unique_ptr<JsonListWriter> list;
  const auto begin = [&] {
    if (list == nullptr) list = std::make_unique<JsonListWriter>(context.out, "samples");
  };
  STATETAP_RETURN_IF_ERROR(ForEachSampleOf(context, source, where, [&](const v1::Sample& sample) {
    begin();
    list->Add(sample);
    return absl::OkStatus();
  }));
  begin();
  list->Finish();
  return kExitDone;
}

absl::Status PrintRejected(Context& context, Client& client, const std::string& job) {
  RowPrinter rows(context, {Whole("id"), Right("line"), Left("reason"), Right("layer"),
                            Right("token"), Left("message")});
  STATETAP_RETURN_IF_ERROR(client.ForEachRejected(job, [&](const v1::Rejected& rejected) {
    rows.Add({rejected.id(), std::to_string(rejected.source_line()), rejected.reason(),
              rejected.has_layer() ? std::to_string(rejected.layer()) : "-",
              rejected.has_token() ? std::to_string(rejected.token()) : "-", rejected.message()});
    return absl::OkStatus();
  }));
  if (rows.rows() == 0) context.Say("no rejected samples");
  return absl::OkStatus();
}

absl::StatusOr<int> RejectedOf(Context& context, const std::string& job) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  if (!context.json) {
    STATETAP_RETURN_IF_ERROR(PrintRejected(context, *client, job));
    return kExitDone;
  }
  std::unique_ptr<JsonListWriter> list;
  const auto begin = [&] {
    if (list == nullptr) list = std::make_unique<JsonListWriter>(context.out, "rejected");
  };
  STATETAP_RETURN_IF_ERROR(client->ForEachRejected(job, [&](const v1::Rejected& rejected) {
    begin();
    list->Add(rejected);
    return absl::OkStatus();
  }));
  begin();
  list->Finish();
  return kExitDone;
}

absl::StatusOr<int> Exclude(Context& context, v1::ExcludeSamplesRequest request,
                            const std::string& ids_file) {
  if (!ids_file.empty()) {
    STATETAP_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(ids_file));
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty()))
      request.add_ids(std::string(absl::StripSuffix(line, "\r")));
    if (request.ids().empty())
      return absl::InvalidArgumentError(fmt::format("--ids {}: it holds no id", ids_file));
  }
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const v1::ExcludeSamplesResponse answer,
                            client->ExcludeSamples(request));
  if (context.json) {
    context.PrintJson(JsonOf(answer));
    return kExitDone;
  }
  context.out << fmt::format(
      "{} samples {}; {} of {} stored are left out now\n", FormatCount(answer.changed()),
      request.include() ? "taken in again" : "excluded",
      FormatCount(answer.job().counts().excluded()), FormatCount(answer.job().counts().stored()));
  return kExitDone;
}

Command ExcludeCommand() {
  return {"exclude", "Leaves stored samples out of streams and exports, or takes them in again",
          "Examples:\n  statetap exclude mine --where 'source == \"toolbench\"'\n"
          "  statetap exclude mine --ids bad_ids.txt      # one a line\n"
          "  statetap exclude mine --where 'tokens > 0' --undo",
          [](CLI::App& app) -> Runner {
            auto request = std::make_shared<v1::ExcludeSamplesRequest>();
            auto job = std::make_shared<std::string>(), where = std::make_shared<std::string>(),
                 ids = std::make_shared<std::string>();
            auto undo = std::make_shared<bool>(false);
            app.add_option("JOB", *job, "Job's id or name")->required();
            auto* by_where = app.add_option("--where", *where, std::string(kWhereHelp));
            auto* by_ids = app.add_option("--ids", *ids, "File of sample ids, one a line");
            by_where->excludes(by_ids);
            app.add_flag("--undo", *undo, "Take them in again");
            return [=](Context& context) -> absl::StatusOr<int> {
              if (where->empty() == ids->empty())
                return absl::InvalidArgumentError("which samples? give --where or --ids");
              request->set_job(*job);
              request->set_where(*where);
              request->set_include(*undo);
              return Exclude(context, *request, *ids);
            };
          }};
}

}  // namespace

std::vector<Command> SampleCommands() {
  Command samples{
      "samples", "Stored samples of a job or of shards here, a row each",
      "Examples:\n  statetap samples prompts.jsonl\n"
      "  statetap samples prompts.jsonl --where 'finish == \"length\" or tokens > 4096'\n"
      "  statetap samples shards/ --json | jq '.samples[].tokens'",
      [](CLI::App& app) -> Runner {
        auto words = std::make_shared<std::vector<std::string>>();
        app.add_option("SOURCE", *words, "A job, or shard files and folders")->required();
        auto where = std::make_shared<std::string>();
        app.add_option("--where", *where, std::string(kWhereHelp));
        return [=](Context& context) { return Samples(context, *words, *where); };
      }};
  Command rejected{"rejected", "Rejected samples of a job: line, reason, layer, token",
                   "Example:\n  statetap rejected prompts.jsonl --json",
                   [](CLI::App& app) -> Runner {
                     auto job = std::make_shared<std::string>();
                     app.add_option("JOB", *job, "Job's id or name")->required();
                     return [=](Context& context) { return RejectedOf(context, *job); };
                   }};
  return {samples, rejected, ExcludeCommand()};
}

}  // namespace statetap
