#include "server/web/metrics.h"

#include <iterator>
#include <map>

#include "extractor/base/json.h"

namespace statetap {
namespace {

void Metric(std::string& text, std::string_view name, std::string_view kind, std::string_view help,
            const std::map<std::string, double>& values) {
  fmt::format_to(std::back_inserter(text), "# HELP {} {}\n# TYPE {} {}\n", name, help, name, kind);
  for (const auto& [labels, value] : values)
    fmt::format_to(std::back_inserter(text), "{}{} {}\n", name, labels, value);
}

}  // namespace

std::string MetricsText(const JobStore& store, const JobRunner& runner,
                        const ShardFolders& folders) {
  const absl::StatusOr<std::vector<JobRecord>> jobs = store.ListJobs();
  if (!jobs.ok()) return "";
  std::map<std::string, double> by_state, samples;
  for (const std::string_view state :
       {"queued", "running", "waiting", "succeeded", "failed", "cancelled", "paused"})
    by_state[fmt::format("{{state=\"{}\"}}", state)] = 0;
  double tokens = 0, bytes = 0;
  for (const JobRecord& job : *jobs) {
    ++by_state[fmt::format("{{state=\"{}\"}}", NameOf(job.state))];
    samples["{state=\"stored\"}"] += static_cast<double>(job.counts.stored);
    samples["{state=\"rejected\"}"] += static_cast<double>(job.counts.rejected);
    samples["{state=\"cancelled\"}"] += static_cast<double>(job.counts.cancelled);
    samples["{state=\"to_do\"}"] += static_cast<double>(job.counts.to_do);
    tokens += static_cast<double>(job.tokens);
    bytes += static_cast<double>(job.bytes);
  }
  std::string text;
  Metric(text, "statetap_jobs", "gauge", "Jobs by state.", by_state);
  Metric(text, "statetap_samples", "gauge", "Samples of all jobs by state.", samples);
  Metric(text, "statetap_stored_tokens", "gauge", "Rows in committed shards.", {{"", tokens}});
  Metric(text, "statetap_shard_bytes", "gauge", "Bytes of committed shards.", {{"", bytes}});
  Metric(text, "statetap_rows_computed_total", "counter",
         "Token positions captured since the server started.",
         {{"", static_cast<double>(runner.rows_computed())}});
  Metric(text, "statetap_host_buffer_bytes", "gauge", "Host memory reserved for samples in flight.",
         {{"", static_cast<double>(runner.buffered_bytes())}});
  Metric(text, "statetap_engine_up", "gauge", "1 while the engine runs, 0 once it has failed.",
         {{"", runner.engine_status().ok() ? 1.0 : 0.0}});
  std::map<std::string, double> in_use;
  for (const ShardFolders::Root& root : folders.roots())
    in_use[fmt::format("{{path={}}}", DumpJson(root.path.string()))] = root.failure.empty() ? 1 : 0;
  Metric(text, "statetap_shard_folder_up", "gauge",
         "1 while new shards may go there, 0 once the folder has failed.", in_use);
  return text;
}

}  // namespace statetap
