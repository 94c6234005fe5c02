#include "server/features/unread_shards.h"

#include <filesystem>

#include "extractor/base/log.h"

namespace statetap {

void UnreadShards::Note(const JobRecord& job, const ShardRow& shard, int64_t position,
                        const absl::Status& why) {
  if (!samples_.insert({shard.path, position}).second) return;
  Shard& unread = shards_[shard.path];
  unread.damaged.set_samples(unread.damaged.samples() + 1);
  if (unread.damaged.samples() > 1) return;
  unread.job = job.id;
  unread.damaged.set_shard(std::filesystem::path(shard.path).filename().string());
  unread.damaged.set_message(std::string(MessageOf(why)));
  LogError("{}: a stream goes on without what cannot be read: {}", job.id, MessageOf(why));
}

void UnreadShards::AddTo(v1::StreamEnd& end) const {
  for (const auto& [path, unread] : shards_) *end.add_damaged() = unread.damaged;
}

absl::Status UnreadShards::AsStatus() const {
  if (shards_.empty()) return absl::OkStatus();
  std::set<std::string> jobs;
  std::string shards;
  for (const auto& [path, unread] : shards_) {
    jobs.insert(unread.job);
    shards +=
        fmt::format("{}{} ({} samples: {})", shards.empty() ? "" : ", ", unread.damaged.shard(),
                    unread.damaged.samples(), unread.damaged.message());
  }
  return absl::DataLossError(fmt::format(
      "{} samples of {} could not be read and were not sent, all others were: {}; `statetap check "
      "{}` names every damaged sample",
      samples_.size(), fmt::join(jobs, ", "), shards, fmt::join(jobs, " ")));
}

}  // namespace statetap
