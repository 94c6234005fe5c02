#include "client/cli/local_shards.h"

#include <algorithm>

#include "extractor/checkpoint/output_head.h"
#include "extractor/shard/joined_statistics.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;

bool IsPath(const std::string& word) {
  std::error_code ignored;
  return word.ends_with(".h5") || word.find('/') != std::string::npos ||
         fs::is_directory(word, ignored);
}

absl::Status AppendShards(const std::string& word, std::vector<fs::path>& paths) {
  std::error_code error;
  if (!fs::exists(word, error))
    return absl::InvalidArgumentError(fmt::format("{} is not there", word));
  if (!fs::is_directory(word, error)) {
    paths.emplace_back(word);
    return absl::OkStatus();
  }
  const size_t before = paths.size();
  for (fs::recursive_directory_iterator at(word, error), end; !error && at != end;
       at.increment(error))
    if (at->path().extension() == ".h5") paths.push_back(at->path());
  if (error)
    return absl::InvalidArgumentError(fmt::format("cannot list {}: {}", word, error.message()));
  if (paths.size() == before)
    return absl::InvalidArgumentError(fmt::format("{} holds no shards (*.h5)", word));
  std::sort(paths.begin() + static_cast<ptrdiff_t>(before), paths.end());
  return absl::OkStatus();
}

// Damage is a failure, not wrong usage.
absl::Status AsDamage(const absl::Status& status) {
  return absl::IsInvalidArgument(status) ? absl::DataLossError(status.message()) : status;
}

}  // namespace

absl::StatusOr<Source> ParseSource(const std::vector<std::string>& words) {
  Source source;
  for (const std::string& word : words) {
    if (IsPath(word)) {
      STATETAP_RETURN_IF_ERROR(AppendShards(word, source.paths));
    } else if (!source.job.empty()) {
      return absl::InvalidArgumentError(
          fmt::format("one job at a time: {} and {}", source.job, word));
    } else {
      source.job = word;
    }
  }
  if (!source.job.empty() && !source.paths.empty())
    return absl::InvalidArgumentError(
        fmt::format("give either a job ({}) or paths ({})", source.job, source.paths[0].string()));
  return source;
}

absl::Status ForEachShard(const std::vector<fs::path>& paths,
                          const std::function<absl::Status(const ShardReader&)>& visit) {
  for (const fs::path& path : paths) {
    const absl::StatusOr<std::unique_ptr<ShardReader>> shard = ShardReader::Open(path);
    if (!shard.ok()) return AsDamage(shard.status());
    STATETAP_RETURN_IF_ERROR(AsDamage(visit(**shard)));
  }
  return absl::OkStatus();
}

v1::Sample SampleMessage(const ShardReader& shard, const SampleEntry& entry,
                         const SampleRecord& record) {
  v1::Sample sample;
  sample.set_id(entry.id);
  sample.set_source(entry.source);
  sample.set_split(entry.split);
  sample.set_prompt_tokens(entry.prompt_tokens);
  sample.set_tokens(static_cast<int32_t>(entry.rows));
  const SampleFacts facts = FactsOf(record);
  sample.set_supervised_tokens(static_cast<int32_t>(facts.supervised_tokens));
  sample.set_finish_reason(entry.finish_reason);
  sample.set_truncated(entry.truncated);
  if (facts.logprob) sample.set_mean_logprob(*facts.logprob);
  sample.set_meta_json(entry.meta_json);
  sample.set_shard(shard.path().filename().string());
  sample.set_row(entry.first_row);
  sample.set_index(entry.source_index);
  return sample;
}

v1::Shard ShardMessage(const ShardReader& shard) {
  v1::Shard message;
  std::error_code ignored;
  message.set_name(shard.path().filename().string());
  message.set_path(shard.path().string());
  message.set_samples(static_cast<int64_t>(shard.samples().size()));
  message.set_rows(shard.rows());
  message.set_bytes(static_cast<int64_t>(fs::file_size(shard.path(), ignored)));
  message.set_digest(shard.digest());
  return message;
}

absl::StatusOr<v1::Statistics> JoinStatistics(const std::vector<fs::path>& paths,
                                              const std::string& where, Channels channels,
                                              const std::string& model) {
  STATETAP_ASSIGN_OR_RETURN(const SampleFilter filter, SampleFilter::Parse(where));
  JoinedStatistics joined;
  STATETAP_RETURN_IF_ERROR(
      ForEachShard(paths, [&](const ShardReader& shard) { return joined.Add(shard, filter); }));
  if (!model.empty()) {
    STATETAP_ASSIGN_OR_RETURN(const OutputHead head, OutputHead::Open(model));
    STATETAP_RETURN_IF_ERROR(
        joined.finals.Score([&](std::span<const uint16_t> states, std::span<const int32_t> tokens) {
          return head.LogProbabilities(states, tokens);
        }));
  }
  return StatisticsMessage(joined, channels);
}

}  // namespace statetap
