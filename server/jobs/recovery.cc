#include "server/jobs/recovery.h"

#include <absl/strings/numbers.h>
#include <absl/strings/strip.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include "extractor/base/file.h"
#include "extractor/base/log.h"
#include "extractor/shard/format.h"
#include "extractor/shard/shard_reader.h"
#include "server/jobs/job_plan.h"
#include "server/jobs/sample_assembler.h"

namespace statetap {
namespace {

absl::StatusOr<std::vector<StoredSample>> SamplesOf(const JobStore& store, const JobRecord& job,
                                                    const ShardReader& shard) {
  v1::JobOptions options;
  options.ParseFromString(job.options);
  const ShardConfig& config = shard.config();
  if (config.job != job.id || config.options_json != OptionsJson(options) ||
      config.model_digest != job.content.weight_digest)
    return absl::FailedPreconditionError("it was written under other options or another model");
  STATETAP_ASSIGN_OR_RETURN(const std::vector<int64_t> damaged, shard.Verify());
  if (!damaged.empty()) return absl::DataLossError("it does not verify");
  std::vector<StoredSample> samples;
  for (size_t i = 0; i < shard.samples().size(); ++i) {
    const SampleEntry& entry = shard.samples()[i];
    STATETAP_ASSIGN_OR_RETURN(const auto digest, store.ToDoDigest(job.key, entry.source_index));
    if (digest != entry.digest)
      return absl::FailedPreconditionError(fmt::format("sample \"{}\" is not to do", entry.id));
    STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard.ReadRecord(static_cast<int64_t>(i)));
    samples.push_back(StoredFacts(record));
    samples.back().position = static_cast<int64_t>(i);
    samples.back().row = entry.first_row;
  }
  return samples;
}

// Of shard-000012.h5; an earlier one may never have been finished.
int64_t NumberOf(const std::filesystem::path& path) {
  int64_t number = 0;
  return absl::SimpleAtoi(absl::StripPrefix(path.stem().string(), "shard-"), &number) ? number : 0;
}

absl::Status Adopt(JobStore& store, const JobRecord& job, const std::filesystem::path& path,
                   const ShardFolders& folders) {
  STATETAP_ASSIGN_OR_RETURN(const auto shard, ShardReader::Open(path));
  STATETAP_ASSIGN_OR_RETURN(const auto samples, SamplesOf(store, job, *shard));
  STATETAP_ASSIGN_OR_RETURN(const int64_t next, store.NextShard(job.key));
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  if (error) return absl::InternalError(error.message());
  return store.CommitShard(
      job.key,
      {std::max(next, NumberOf(path)), folders.ToStored(path), static_cast<int64_t>(samples.size()),
       shard->rows(), static_cast<int64_t>(bytes), shard->digest()},
      samples);
}

absl::Status RecoverFolder(JobStore& store, const JobRecord& job, const ShardFolders& folders,
                           const std::filesystem::path& folder) {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, store.Shards(job.key));
  std::set<std::filesystem::path> known;
  for (const ShardRow& shard : shards) known.insert(folders.FromStored(shard.path));
  std::error_code error;
  std::vector<std::filesystem::path> found;
  for (const auto& file : std::filesystem::directory_iterator(folder, error))
    found.push_back(file.path());
  std::sort(found.begin(), found.end());
  for (const auto& path : found) {
    std::error_code ignored;
    if (path.extension() == kPartialEnding) {
      LogInfo("{}: removing the unfinished {}", job.id, path.string());
      std::filesystem::remove(path, ignored);
    } else if (path.extension() == kShardEnding && !known.contains(path)) {
      const absl::Status status = Adopt(store, job, path, folders);
      LogInfo("{}: {} {}{}", job.id, path.string(),
              status.ok() ? "was written but not noted: taken over" : "is removed: ",
              MessageOf(status));
      if (!status.ok()) std::filesystem::remove(path, ignored);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TakeOutLostFolders(const JobStore& store, ShardFolders& folders) {
  std::vector<std::filesystem::path> paths;
  STATETAP_ASSIGN_OR_RETURN(const std::vector<JobRecord> jobs, store.ListJobs());
  for (const JobRecord& job : jobs) {
    STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, store.Shards(job.key));
    for (const ShardRow& shard : shards) paths.push_back(folders.FromStored(shard.path));
  }
  folders.TakeOutLost(paths);
  return absl::OkStatus();
}

absl::Status RemoveShards(JobStore& store, const ShardFolders& folders, const std::string& job) {
  for (const auto& folder : folders.Folders(job)) {
    std::error_code error;
    for (const auto& file : std::filesystem::directory_iterator(folder, error)) {
      const auto ending = file.path().extension();
      if (ending != kShardEnding && ending != kPartialEnding) continue;
      std::filesystem::remove(file.path(), error);
      if (error) return ErrnoStatus(error.value(), "cannot remove", file.path());
    }
    if (error && error != std::errc::no_such_file_or_directory)
      return ErrnoStatus(error.value(), "cannot read the folder", folder);
    std::filesystem::remove(folder, error);  // stays where a person put something into it
  }
  return store.Forget(job);
}

absl::Status RecoverShards(JobStore& store, const ShardFolders& folders) {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<std::string> doomed, store.Doomed());
  for (const std::string& job : doomed) {
    const absl::Status status = RemoveShards(store, folders, job);
    if (!status.ok())
      LogError("{} was deleted, its shards are still there: {}", job, MessageOf(status));
  }
  STATETAP_ASSIGN_OR_RETURN(const std::vector<JobRecord> jobs, store.ListJobs());
  for (const JobRecord& job : jobs) {
    for (const auto& folder : folders.Folders(job.id))
      STATETAP_RETURN_IF_ERROR(RecoverFolder(store, job, folders, folder));
  }
  return absl::OkStatus();
}

}  // namespace statetap
