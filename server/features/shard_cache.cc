#include "server/features/shard_cache.h"

#include <algorithm>
#include <utility>

#include "server/jobs/served_model.h"

namespace statetap {

absl::StatusOr<std::shared_ptr<const ShardReader>> ShardCache::Open(const ShardRow& shard) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const Entry& entry) { return entry.path == shard.path; });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
    return open_.front().reader;
  }
  STATETAP_ASSIGN_OR_RETURN(std::unique_ptr<ShardReader> reader,
                            ShardReader::Open(folders_.FromStored(shard.path)));
  const size_t samples = reader->samples().size();
  open_.push_front({shard.path, std::move(reader), std::vector<bool>(samples)});
  if (open_.size() > max_open_) open_.pop_back();
  return open_.front().reader;
}

ShardCache::Entry* ShardCache::Find(const std::string& path) {
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const Entry& entry) { return entry.path == path; });
  return found == open_.end() ? nullptr : &*found;
}

absl::StatusOr<std::shared_ptr<const ShardReader>> ShardCache::OpenVerified(const ShardRow& shard,
                                                                            int64_t position) {
  STATETAP_ASSIGN_OR_RETURN(const auto reader, Open(shard));
  const auto index = static_cast<size_t>(position);
  if (index >= reader->samples().size())
    return absl::DataLossError(fmt::format("{} has no sample {}", shard.path, position));
  {
    const std::lock_guard lock(mutex_);
    const Entry* entry = Find(shard.path);
    if (entry != nullptr && entry->reader == reader && entry->verified[index]) return reader;
  }
  STATETAP_ASSIGN_OR_RETURN(const bool good, reader->VerifySample(position));
  if (!good) {
    return absl::DataLossError(fmt::format("{}: sample \"{}\" does not match its checksum",
                                           reader->path().string(), reader->samples()[index].id));
  }
  const std::lock_guard lock(mutex_);
  if (Entry* entry = Find(shard.path); entry != nullptr && entry->reader == reader)
    entry->verified[index] = true;
  return reader;
}

void ShardCache::Forget(const ShardRow& shard) {
  const std::lock_guard lock(mutex_);
  open_.remove_if([&](const Entry& entry) { return entry.path == shard.path; });
}

void ShardCache::Forget(const JobRecord& job, const std::vector<ShardRow>& shards) {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(open_, [&](const Entry& entry) {
      return std::any_of(shards.begin(), shards.end(),
                         [&](const ShardRow& shard) { return shard.path == entry.path; });
    });
  }
  const std::lock_guard lock(joined_mutex_);
  joined_.erase(job.key);
}

std::shared_ptr<ShardCache::Joined> ShardCache::JoinedOf(int64_t job_key) {
  const std::lock_guard lock(joined_mutex_);
  std::shared_ptr<Joined>& joined = joined_[job_key];
  if (joined == nullptr) joined = std::make_shared<Joined>();
  return joined;
}

absl::StatusOr<std::shared_ptr<const ShardReader>> ShardCache::OpenAnew(
    const ShardRow& shard) const {
  STATETAP_ASSIGN_OR_RETURN(std::unique_ptr<ShardReader> reader,
                            ShardReader::Open(folders_.FromStored(shard.path)));
  return std::shared_ptr<const ShardReader>(std::move(reader));
}

absl::StatusOr<JoinedStatistics> ShardCache::Statistics(const JobRecord& job,
                                                        const SampleFilter& where,
                                                        const std::function<bool()>& cancelled) {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, store_.Shards(job.key));
  const auto add = [&](JoinedStatistics& joined, const ShardRow& shard) -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const auto reader, Open(shard));
    const absl::Status added = joined.Add(*reader, where);
    // Shards of one job are alike, or one of them is not what the store says.
    return absl::IsFailedPrecondition(added) && !shard.evicted
               ? absl::DataLossError(added.message())
               : added;
  };
  if (!where.holds_for_all()) {
    JoinedStatistics joined;
    for (const ShardRow& shard : shards) {
      if (cancelled != nullptr && cancelled()) return absl::CancelledError("the caller has gone");
      STATETAP_RETURN_IF_ERROR(add(joined, shard));
    }
    return joined;
  }
  const std::shared_ptr<Joined> joined = JoinedOf(job.key);
  const std::lock_guard lock(joined->mutex);
  for (const ShardRow& shard : shards) {
    if (shard.seq <= joined->last_seq) continue;
    STATETAP_RETURN_IF_ERROR(add(joined->statistics, shard));
    joined->last_seq = shard.seq;
  }
  ScoreFinals(scorer_, joined->statistics.finals);
  return joined->statistics;
}

}  // namespace statetap
