// Shards on this machine, without a server: what a command's JOB|PATH… means, and shards in the
// messages that a server would send.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "extractor/base/status.h"
#include "extractor/shard/sample_filter.h"
#include "extractor/shard/shard_reader.h"
#include "proto/messages/statistics.h"
#include "statetap/v1/features.pb.h"
#include "statetap/v1/jobs.pb.h"

namespace statetap {

// One job of the server, or shard files here.
struct Source {
  std::string job;                           // empty: local
  std::vector<std::filesystem::path> paths;  // sorted by folder
};

// A word is a path where it names a folder, ends in ".h5" or has a "/"; else a job. Folders are
// searched below for *.h5. INVALID_ARGUMENT for a path that is not there, a folder without shards,
// several jobs, or both kinds.
absl::StatusOr<Source> ParseSource(const std::vector<std::string>& words);

// Opens one after another, so that a thousand shards need one file handle. Errors name the file.
absl::Status ForEachShard(const std::vector<std::filesystem::path>& paths,
                          const std::function<absl::Status(const ShardReader& shard)>& visit);

v1::Sample SampleMessage(const ShardReader& shard, const SampleEntry& entry,
                         const SampleRecord& record);
v1::Shard ShardMessage(const ShardReader& shard);
// Joined over all shards, of the samples that `where` holds for; INVALID_ARGUMENT where they differ
// in hidden size or boundaries. `model`: a checkpoint's folder, whose head looks at the final
// states; empty: none.
absl::StatusOr<v1::Statistics> JoinStatistics(const std::vector<std::filesystem::path>& paths,
                                              const std::string& where, Channels channels,
                                              const std::string& model);

}  // namespace statetap
