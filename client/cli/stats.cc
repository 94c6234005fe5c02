// stats: per-boundary statistics as a table, JSON or a plot.
#include <algorithm>
#include <cmath>

#include "client/cli/commands.h"
#include "client/cli/compare.h"
#include "client/cli/format.h"
#include "client/cli/local_shards.h"
#include "client/cli/plot.h"
#include "client/cli/python_package.h"
#include "client/cli/table.h"
#include "client/cli/text_width.h"
#include "client/lib/proto_json.h"
#include "extractor/base/file.h"
#include "proto/messages/html.h"
#include "proto/messages/statistics_html.h"

namespace statetap {
namespace {

struct StatsFlags {
  std::vector<std::string> source;
  std::string where, by, html, as, model, compare;
  bool plot = false, channels = false;
  CompareFlags comparison;
};

absl::StatusOr<v1::Statistics> StatisticsOf(Context& context, const StatsFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const Source source, ParseSource(flags.source));
  if (!source.job.empty()) {
    if (!flags.model.empty())
      return absl::InvalidArgumentError(
          "--model: it goes with shards here; of a job the server looks with its own model");
    STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
    return client->GetStatistics(source.job, flags.where, flags.channels);
  }
  return JoinStatistics(source.paths, flags.where, flags.channels ? Channels::kYes : Channels::kNo,
                        flags.model);
}

// Cosines are of rows with the same rows at the boundary captured before; servers and shards of
// before these do not tell them.
void PrintTable(Context& context, const v1::Statistics& statistics) {
  context.out << fmt::format("{} rows of {} samples\n", FormatCount(statistics.rows()),
                             FormatCount(statistics.samples()));
  std::vector<Column> columns = {Right("boundary"), Right("layer out"), Right("rows"),
                                 Right("mean"),     Right("std"),       Right("rms p01"),
                                 Right("p50"),      Right("p99"),       Right("abs max"),
                                 Right("cosine"),   Right("zero rows"), Right("non-finite")};
  const bool rounded = std::any_of(statistics.boundaries().begin(), statistics.boundaries().end(),
                                   [](const auto& b) { return b.relative_error() != 0; });
  if (rounded) columns.push_back(Right("fp8 error"));
  Table table(columns);
  for (const v1::BoundaryStatistics& boundary : statistics.boundaries()) {
    std::vector<std::string> row = {
        std::to_string(boundary.boundary()),
        std::to_string(boundary.layer_output()),
        FormatCount(boundary.count()),
        FormatNumber(boundary.mean()),
        FormatNumber(boundary.std()),
        FormatNumber(boundary.row_rms_p01()),
        FormatNumber(boundary.row_rms_p50()),
        FormatNumber(boundary.row_rms_p99()),
        FormatNumber(boundary.abs_max()),
        boundary.cosine_rows() == 0 ? "-" : FormatFixed(boundary.cosine(), 4),
        FormatCount(boundary.zero_rows()),
        FormatCount(boundary.nonfinite())};
    if (rounded) {
      row.push_back(std::isnan(boundary.relative_error())
                        ? "unknown"
                        : fmt::format("{:.2f} %", 100 * boundary.relative_error()));
    }
    table.Add(row);
  }
  context.out << table.Format(context.table_width());
}

void PrintSources(Context& context, const v1::Statistics& statistics) {
  Table table({Left("source"), Right("samples"), Right("supervised"), Right("-log p"),
               Right("entropy"), Right("policy gap"), Right("+-"), Right("answers"),
               Right("hit limit"), Right("empty"), Right("looping"), Right("no </think>")});
  for (const v1::SourceReport& source : statistics.sources()) {
    table.Add({source.source(), FormatCount(source.samples()),
               FormatCount(source.supervised_tokens()), FormatFixed(source.surprise(), 3),
               FormatFixed(source.entropy(), 3), FormatFixed(source.policy_gap(), 3),
               FormatFixed(source.policy_gap_error(), 3), FormatCount(source.answers()),
               FormatCount(source.hit_limit()), FormatCount(source.empty()),
               FormatCount(source.looping()),
               // Where no answer is known to have begun in thought, none can lack its end.
               source.thinking() == 0 ? "-" : FormatCount(source.unclosed())});
  }
  context.out << '\n' << table.Format(context.table_width());
}

// How the features were captured: what the job says, or the first of the shards.
absl::StatusOr<Json> ConfigurationOf(Context& context, const Source& source) {
  Json found = Json::object();
  if (!source.job.empty()) {
    STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
    STATETAP_ASSIGN_OR_RETURN(const v1::Job job, client->GetJob(source.job));
    found = {{"job", job.id()}, {"name", job.name()}};
    found["boundaries"] = std::vector<int>(job.boundaries().begin(), job.boundaries().end());
    found.update(JsonOf(job.options()));
    return found;
  }
  STATETAP_ASSIGN_OR_RETURN(const auto shard, ShardReader::Open(source.paths.front()));
  const ShardConfig& config = shard->config();
  found = {{"job", config.job},
           {"model", config.model_name},
           {"model_digest", config.model_digest},
           {"quantization", config.quantization},
           {"layers", config.layers},
           {"hidden", config.hidden},
           {"boundaries", config.boundaries},
           {"states", NameOf(config.dtype)},
           {"template", config.template_name},
           {"template_mode", config.thinking ? "thinking" : "instant"},
           {"producer", config.producer}};
  if (const absl::StatusOr<Json> options = ParseJson(config.options_json);
      options.ok() && options->is_object())
    found.update(*options);
  return found;
}

std::string ConfigurationHtml(const Json& configuration) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, value] : configuration.items())
    rows.push_back({EscapeHtml(name),
                    EscapeHtml(value.is_string() ? value.get<std::string>() : DumpJson(value))});
  return fmt::format("<h2>Configuration</h2>\n{}", HtmlTable({"setting", "~value"}, rows));
}

absl::Status WriteReport(Context& context, const StatsFlags& flags,
                         const v1::Statistics& statistics) {
  STATETAP_ASSIGN_OR_RETURN(const Source source, ParseSource(flags.source));
  STATETAP_ASSIGN_OR_RETURN(const Json configuration, ConfigurationOf(context, source));
  const std::string title = fmt::format("{}", fmt::join(flags.source, " "));
  return WriteFileAtomically(
      flags.html,
      HtmlPage(fmt::format("Statetap: {}", title), "",
               fmt::format("<h1>Features of {}</h1>\n{}{}", EscapeHtml(title),
                           StatisticsHtml(statistics), ConfigurationHtml(configuration))));
}

// A text of --where.
std::string SourceIs(const std::string& source) {
  std::string quoted;
  for (const char c : source) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return fmt::format("source == \"{}\"", quoted);
}

absl::StatusOr<int> StatsBySource(Context& context, const StatsFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const v1::Statistics all, StatisticsOf(context, flags));
  if (all.sources().empty())
    return absl::FailedPreconditionError("no stored sample to tell of, so no statistics");
  Json list = Json::array();
  for (const v1::SourceReport& source : all.sources()) {
    StatsFlags one = flags;
    one.where = SourceIs(source.source());
    if (!flags.where.empty()) one.where += fmt::format(" and ({})", flags.where);
    STATETAP_ASSIGN_OR_RETURN(const v1::Statistics statistics, StatisticsOf(context, one));
    if (context.json) {
      Json json = {{"source", source.source()}};
      json.update(JsonOf(statistics));
      list.push_back(std::move(json));
      continue;
    }
    context.out << fmt::format("source {}: ", Printable(source.source()));
    PrintTable(context, statistics);
    context.out << '\n';
  }
  if (context.json) context.PrintJson({{"by_source", std::move(list)}});
  return kExitDone;
}

absl::StatusOr<int> StatsByClass(Context& context, const StatsFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const v1::Statistics statistics, StatisticsOf(context, flags));
  Table table({Right("boundary"), Left("tokens"), Right("rows"), Right("rms p01"), Right("p50"),
               Right("p99"), Right("cosine"), Right("+-")});
  Json list = Json::array();
  for (const v1::BoundaryStatistics& boundary : statistics.boundaries()) {
    for (const v1::TokenClassStatistics& of_class : boundary.token_classes()) {
      table.Add({std::to_string(boundary.boundary()), of_class.token_class(),
                 FormatCount(of_class.count()), FormatNumber(of_class.row_rms_p01()),
                 FormatNumber(of_class.row_rms_p50()), FormatNumber(of_class.row_rms_p99()),
                 FormatFixed(of_class.cosine(), 4), FormatFixed(of_class.cosine_std(), 4)});
      Json json = {{"boundary", boundary.boundary()}};
      json.update(JsonOf(of_class));
      list.push_back(std::move(json));
    }
  }
  if (list.empty())
    return absl::FailedPreconditionError(
        "not recorded: these shards are of a version without statistics by class, or none is "
        "stored yet");
  if (context.json) {
    context.PrintJson({{"by_class", std::move(list)}});
    return kExitDone;
  }
  context.out << table.Format(context.table_width());
  return kExitDone;
}

absl::StatusOr<int> Stats(Context& context, const StatsFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const v1::Statistics statistics, StatisticsOf(context, flags));
  if (context.json) context.PrintJson(JsonOf(statistics));
  if (statistics.boundaries().empty())
    return absl::FailedPreconditionError("no committed shards yet, so no statistics");
  if (!flags.where.empty() && statistics.samples() == 0)
    return absl::FailedPreconditionError("--where holds for no stored sample");
  if (!flags.html.empty()) STATETAP_RETURN_IF_ERROR(WriteReport(context, flags, statistics));
  if (context.json) return kExitDone;
  PrintTable(context, statistics);
  PrintSources(context, statistics);
  for (const v1::Alarm& alarm : statistics.alarms())
    context.out << fmt::format("ALARM {}: {}\n", alarm.kind(), Printable(alarm.message()));
  if (flags.plot) {
    context.out << '\n' << PlotRms(statistics, context.terminal.width);
    context.out << '\n' << PlotHistograms(statistics, context.terminal.width);
    context.out << '\n' << PlotLengths(statistics, context.terminal.width);
  }
  return kExitDone;
}

}  // namespace

Command StatsCommand() {
  return {
      "stats", "Statistics by boundary of a job or of shards here",
      "Boundary k is the residual stream after k layers, the output of layer k-1. Cosine: of rows "
      "with the same rows\nat the boundary captured before, the mean. Policy gap: mean "
      "-log p of the\nsupervised tokens less the mean entropy there; about 0 for the model's own "
      "text at temperature 1.\n\n"
      "Examples:\n  statetap stats prompts.jsonl --plot\n"
      "  statetap stats mine --where 'source == \"toolbench\"'\n"
      "  statetap stats mine --by source\n  statetap stats mine --by class\n"
      "  statetap stats shards/ --model models/tiny-kimi --html report.html\n"
      "  statetap stats mine --compare other --model models/tiny-kimi\n"
      "  statetap stats shards/ --json --channels > channels.json\n"
      "  statetap stats --as speculators data/ --model models/tiny-kimi",
      [](CLI::App& app) -> Runner {
        auto flags = std::make_shared<StatsFlags>();
        app.add_option("SOURCE", flags->source, "One job, or any number of shard files and folders")
            ->required();
        app.add_option("--where", flags->where, std::string(kWhereHelp));
        app.add_option("--by", flags->by,
                       "source: a table each, of its states read anew. class: first tokens of "
                       "their samples, special, supervised and all other tokens")
            ->check(CLI::IsMember({"source", "class"}));
        app.add_flag("--plot", flags->plot,
                     "Draw row norms by boundary, their histograms, and lengths by source");
        app.add_option("--html", flags->html, "Write a report: one file, with pictures");
        app.add_flag("--channels", flags->channels, "With --json: figures of every channel too");
        app.add_option("--as", flags->as,
                       "Features of another tool in a folder: speculators, specforge, modelopt or "
                       "vllm; says what they are, by the Python package");
        app.add_option(
            "--compare", flags->compare,
            "Another job, or its shards: the same samples, paired by id, state by state");
        AddCompareFlags(app, flags->comparison);
        app.add_option("--model", flags->model,
                       "The base model's folder: whether final states and tokens of shards here "
                       "agree; the head, with --compare; needed with --as");
        return [=, &app](Context& context) -> absl::StatusOr<int> {
          if (!flags->as.empty()) return RunPackage(context, app, "statetap.foreign", "");
          if (!flags->compare.empty()) {
            if (!flags->by.empty() || flags->plot || !flags->html.empty())
              return absl::InvalidArgumentError(
                  "--compare: it does not go with --by, --plot or --html");
            CompareFlags comparison = flags->comparison;
            comparison.model = flags->model;
            comparison.where = flags->where;
            return CompareSources(context, flags->source, flags->compare, comparison);
          }
          if (flags->by.empty()) return Stats(context, *flags);
          if (flags->plot || !flags->html.empty())
            return absl::InvalidArgumentError("--by: it does not go with --plot or --html");
          return flags->by == "class" ? StatsByClass(context, *flags)
                                      : StatsBySource(context, *flags);
        };
      }};
}

}  // namespace statetap
