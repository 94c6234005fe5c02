#include "server/web/metrics.h"

#include <iterator>
#include <string_view>
#include <utility>

#include "server/jobs/job_plan.h"

namespace statetap {
namespace {

using Labels = std::vector<std::pair<std::string_view, std::string>>;

// One metric with all its series.
class Metric {
 public:
  Metric(std::string& text, std::string_view name, std::string_view kind, std::string_view help)
      : text_(text), name_(name) {
    fmt::format_to(std::back_inserter(text_), "# HELP {} {}\n# TYPE {} {}\n", name, help, name,
                   kind);
  }
  void Add(const Labels& labels, double value) {
    text_ += name_;
    char before = '{';
    for (const auto& [label, said] : labels) {
      text_ += std::exchange(before, ',');
      text_ += fmt::format("{}=\"{}\"", label, Escaped(said));
    }
    text_ += fmt::format("{} {}\n", labels.empty() ? "" : "}", value);
  }

 private:
  static std::string Escaped(std::string_view value) {
    std::string out;
    for (const char c : value) {
      if (c == '\\' || c == '"') out += '\\';
      out += c == '\n' ? "\\n" : std::string(1, c);
    }
    return out;
  }
  std::string& text_;
  const std::string_view name_;
};

void AddOne(std::string& text, std::string_view name, std::string_view kind, std::string_view help,
            double value) {
  Metric(text, name, kind, help).Add({}, value);
}

void AddJobs(std::string& text, const std::vector<JobRecord>& jobs) {
  std::map<std::string_view, int64_t> states;
  for (const std::string_view state :
       {"queued", "running", "waiting", "succeeded", "failed", "cancelled", "paused"})
    states[state] = 0;
  JobCounts all;
  int64_t tokens = 0, bytes = 0;
  for (const JobRecord& job : jobs) {
    ++states[NameOf(job.state)];
    all.stored += job.counts.stored;
    all.rejected += job.counts.rejected;
    all.cancelled += job.counts.cancelled;
    all.to_do += job.counts.to_do;
    tokens += job.tokens;
    bytes += job.bytes;
  }
  Metric by_state(text, "statetap_jobs", "gauge", "Jobs by state.");
  for (const auto& [state, count] : states)
    by_state.Add({{"state", std::string(state)}}, static_cast<double>(count));
  Metric samples(text, "statetap_samples", "gauge",
                 "Samples of all jobs by state; those to do are the queue.");
  for (const auto& [state, count] : {std::pair{"stored", all.stored},
                                     {"rejected", all.rejected},
                                     {"cancelled", all.cancelled},
                                     {"to_do", all.to_do}})
    samples.Add({{"state", state}}, static_cast<double>(count));
  AddOne(text, "statetap_stored_tokens", "gauge", "Rows in committed shards.",
         static_cast<double>(tokens));
  AddOne(text, "statetap_shard_bytes", "gauge", "Bytes of committed shards.",
         static_cast<double>(bytes));
}

void AddLoad(std::string& text, const JobRunner& runner) {
  const JobRunner::Load load = runner.load();
  Metric tokens(text, "statetap_tokens_total", "counter",
                "Tokens since the server started, of prompts and given texts as they are read and "
                "of answers as they are written.");
  tokens.Add({{"phase", "prompt"}}, static_cast<double>(load.prompt_tokens));
  tokens.Add({{"phase", "answer"}}, static_cast<double>(load.answer_tokens));
  AddOne(text, "statetap_running_samples", "gauge", "Samples of jobs in the engine.",
         static_cast<double>(load.running_samples));
  Metric answers(text, "statetap_answers", "gauge",
                 "Answers to people (ask, completions) that have not ended.");
  answers.Add({{"state", "running"}}, static_cast<double>(load.running_answers));
  answers.Add({{"state", "waiting"}}, static_cast<double>(load.waiting_answers));
  AddOne(text, "statetap_host_buffer_bytes", "gauge", "Host memory reserved for samples in flight.",
         static_cast<double>(runner.buffered_bytes()));
  AddOne(text, "statetap_engine_up", "gauge", "1 while the engine runs, 0 once it has failed.",
         runner.engine_status().ok() ? 1 : 0);
}

void AddMemory(std::string& text, const Engine& engine) {
  if (engine.options().backend == "cpu") return;
  Metric memory(text, "statetap_gpu_memory_bytes", "gauge",
                "GPU memory that a rank holds, by use.");
  const auto& ranks = engine.info().ranks;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [use, bytes] : {std::pair{"weights", ranks[rank].weights},
                                     {"kv_cache", ranks[rank].kv_cache},
                                     {"workspace", ranks[rank].workspace},
                                     {"capture", ranks[rank].capture}})
      memory.Add({{"rank", fmt::format("{}", rank)}, {"use", use}}, static_cast<double>(bytes));
  }
}

void AddFolders(std::string& text, const ShardFolders& folders) {
  Metric up(text, "statetap_shard_folder_up", "gauge",
            "1 while shards can be written there, 0 once one could not or the folder was lost.");
  for (const ShardFolders::Root& root : folders.roots())
    up.Add({{"path", root.path.string()}}, root.failure.empty() ? 1 : 0);
}

// Of a row as streams send it.
int64_t RowBytes(const JobRecord& job, const ModelConfig& model) {
  v1::JobOptions options;
  options.ParseFromString(job.options);
  return static_cast<int64_t>(BoundariesOf(options, model.num_layers).size()) * model.hidden *
         static_cast<int64_t>(sizeof(uint16_t));
}

}  // namespace

absl::StatusOr<Metrics::Lags> Metrics::LagsOf(const JobRecord& job) const {
  STATETAP_ASSIGN_OR_RETURN(const int64_t acknowledged, store_.Acknowledgements(job.key));
  Lags lags;
  lags.read_at = {job.counts.stored, job.counts.excluded, job.counts.evicted, acknowledged};
  const auto known = lags_.find(job.key);
  if (known != lags_.end() && known->second.read_at == lags.read_at) return known->second;
  STATETAP_ASSIGN_OR_RETURN(lags.groups, store_.ReaderLags(job.key));
  return lags;
}

absl::StatusOr<std::string> Metrics::Text() {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<JobRecord> jobs, store_.ListJobs());
  STATETAP_ASSIGN_OR_RETURN(const auto rejected, store_.RejectedByReason());
  std::string text;
  AddJobs(text, jobs);
  Metric reasons(text, "statetap_rejected_samples", "gauge", "Rejected samples by reason.");
  for (const auto& [reason, count] : rejected)
    reasons.Add({{"reason", reason}}, static_cast<double>(count));
  AddLoad(text, runner_);
  AddMemory(text, engine_);
  AddFolders(text, folders_);

  const std::lock_guard lock(mutex_);
  std::string samples, bytes;
  Metric lag_samples(samples, "statetap_reader_lag_samples", "gauge",
                     "Stored samples that a consumer group has not acknowledged.");
  Metric lag_bytes(bytes, "statetap_reader_lag_bytes", "gauge",
                   "Their states, as streams send them.");
  std::map<int64_t, Lags> lags;
  for (const JobRecord& job : jobs) {
    STATETAP_ASSIGN_OR_RETURN(lags[job.key], LagsOf(job));
    for (const JobStore::ReaderLag& lag : lags[job.key].groups) {
      const Labels labels = {{"job", job.id}, {"group", lag.group}};
      lag_samples.Add(labels, static_cast<double>(lag.samples));
      lag_bytes.Add(labels, static_cast<double>(lag.rows * RowBytes(job, model_.config)));
    }
  }
  lags_ = std::move(lags);
  return text + samples + bytes;
}

}  // namespace statetap
