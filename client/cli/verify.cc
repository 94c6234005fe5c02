// verify: checkpoints of base models and of drafters, rule by rule, without a server.
#include <filesystem>

#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/local_shards.h"
#include "client/cli/table.h"
#include "extractor/checkpoint/base_rules.h"
#include "extractor/checkpoint/checkpoint_index.h"
#include "extractor/checkpoint/drafter_rules.h"
#include "extractor/checkpoint/hf_cache.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;

struct VerifyFlags {
  std::string kind, folder, against, engine;
  bool digests = false, deep = false;
};

std::string_view WordOf(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk: return "ok";
    case Verdict::kNote: return "note";
    case Verdict::kWarning: return "warning";
    case Verdict::kFault: return "fault";
  }
  return "?";
}

void PrintReport(Context& context, const RuleReport& report) {
  if (context.json) {
    Json rows = Json::array();
    for (const RuleRow& row : report.rows()) {
      rows.push_back({{"verdict", WordOf(row.verdict)},
                      {"rule", row.rule},
                      {"found", row.found},
                      {"expected", row.expected},
                      {"why", row.why}});
    }
    return context.PrintJson({{"rows", std::move(rows)},
                              {"faults", report.Count(Verdict::kFault)},
                              {"warnings", report.Count(Verdict::kWarning)}});
  }
  Table table({Whole(""), Whole("rule"), Whole("found"), Whole("expected"), Left("why")});
  for (const RuleRow& row : report.rows()) {
    const bool fault = row.verdict == Verdict::kFault;
    table.Add({fault ? "FAULT" : std::string(WordOf(row.verdict)), row.rule, row.found,
               row.expected, row.why});
  }
  context.out << table.Format(context.table_width());
  const int64_t faults = report.Count(Verdict::kFault);
  const int64_t warnings = report.Count(Verdict::kWarning);
  context.out << fmt::format("{} rules hold, {} warning{}, {} fault{}\n",
                             report.Count(Verdict::kOk), warnings, warnings == 1 ? "" : "s", faults,
                             faults == 1 ? "" : "s");
}

// A folder with a config.json is a model, a path is shards, all else a job.
absl::StatusOr<DrafterTarget> TargetOf(Context& context, const std::string& word) {
  std::error_code ignored;
  DrafterTarget target;
  if (fs::exists(fs::path(word) / "config.json", ignored)) {
    STATETAP_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(word));
    return DrafterTarget{.name = fmt::format("model {}", word),
                         .hidden = config.hidden,
                         .layers = config.num_layers,
                         .vocab = config.vocab,
                         .boundaries = {}};
  }
  STATETAP_ASSIGN_OR_RETURN(const Source source, ParseSource({word}));
  if (source.job.empty()) {
    STATETAP_ASSIGN_OR_RETURN(const auto shard, ShardReader::Open(source.paths.front()));
    return DrafterTarget{.name = fmt::format("shard {}", source.paths.front().string()),
                         .hidden = shard->config().hidden,
                         .layers = shard->config().layers,
                         .vocab = 0,
                         .boundaries = shard->config().boundaries};
  }
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const v1::Job job, client->GetJob(source.job));
  STATETAP_ASSIGN_OR_RETURN(const v1::ModelDescription model, client->DescribeModel());
  return DrafterTarget{.name = fmt::format("job {} of {}", job.name(), model.name()),
                       .hidden = model.hidden(),
                       .layers = model.layers(),
                       .vocab = model.vocab(),
                       .boundaries = {job.boundaries().begin(), job.boundaries().end()}};
}

absl::StatusOr<RuleReport> CheckDrafter(Context& context, const VerifyFlags& flags,
                                        const fs::path& folder) {
  DrafterCheck check;
  if (!flags.against.empty()) {
    STATETAP_ASSIGN_OR_RETURN(check.against, TargetOf(context, flags.against));
  }
  if (flags.engine == "vllm") check.engine = DrafterEngine::kVllm;
  if (flags.engine == "sglang") check.engine = DrafterEngine::kSglang;
  if (flags.engine == "speculators") check.engine = DrafterEngine::kSpeculators;
  return VerifyDrafter(folder, check);
}

absl::StatusOr<RuleReport> CheckBase(Context& context, const VerifyFlags& flags,
                                     const fs::path& folder) {
  const auto progress = context.MakeProgress();
  const auto show = [&](int64_t done, int64_t total) {
    progress->ShowBytes("reading", done, total);
    return !context.interrupted();
  };
  return VerifyCheckpoint(folder, {.digests = flags.digests, .deep = flags.deep, .progress = show});
}

absl::StatusOr<int> Verify(Context& context, const VerifyFlags& flags) {
  const bool drafter = flags.kind == "drafter";
  if (drafter && (flags.digests || flags.deep)) {
    return absl::InvalidArgumentError("--digests and --deep are for `verify checkpoint`");
  }
  if (!drafter && !(flags.against.empty() && flags.engine.empty())) {
    return absl::InvalidArgumentError("--against and --for are for `verify drafter`");
  }
  STATETAP_ASSIGN_OR_RETURN(const fs::path folder, ResolveModel(flags.folder));
  STATETAP_ASSIGN_OR_RETURN(const RuleReport report, drafter ? CheckDrafter(context, flags, folder)
                                                             : CheckBase(context, flags, folder));
  PrintReport(context, report);
  return report.Count(Verdict::kFault) == 0 ? kExitDone : kExitFailed;
}

}  // namespace

Command VerifyCommand() {
  return {"verify", "Whether a checkpoint or a drafter is whole and what it claims to be",
          "A row a rule: what was found, what was expected, why. Reads headers alone (seconds for "
          "hundreds of\ngigabytes) unless asked for more; runs no code. Exit 1 on any fault; "
          "warnings alone exit 0.\n\n"
          "Examples:\n  statetap verify checkpoint moonshotai/Kimi-K2.5\n"
          "  statetap verify checkpoint /models/k2.5 --digests --deep\n"
          "  statetap verify drafter /models/my-eagle3 --against overnight --for sglang",
          [](CLI::App& app) -> Runner {
            auto flags = std::make_shared<VerifyFlags>();
            app.add_option("KIND", flags->kind, "checkpoint or drafter")
                ->required()
                ->check(CLI::IsMember({"checkpoint", "drafter"}));
            app.add_option("DIR", flags->folder, "Folder, or a name in the Hugging Face cache")
                ->required();
            app.add_option("--against", flags->against,
                           "drafter: also compare with a job, a shard or a base model's folder");
            app.add_option("--for", flags->engine,
                           "drafter: what vllm, sglang or speculators would rename, skip or refuse")
                ->check(CLI::IsMember({"vllm", "sglang", "speculators"}));
            app.add_flag("--digests", flags->digests,
                         "checkpoint: SHA-256 of the files against the cache's names");
            app.add_flag("--deep", flags->deep,
                         "checkpoint: values finite, range of codes and scales");
            return [=](Context& context) { return Verify(context, *flags); };
          }};
}

}  // namespace statetap
