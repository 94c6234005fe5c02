// Where shards lie: <root>/<job id>/shard-000001.h5, a root for each folder of --shards. The store
// holds paths relative to the data folder where they are below it, so that the folder can be moved.
//
// A root that failed is taken out: new shards go to the others until the server starts again. What
// lies there stays named and is read where it can be. Thread safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "extractor/base/status.h"
#include "server/store/job_store.h"

namespace statetap {

class ShardFolders {
 public:
  // No roots: <data>/shards.
  ShardFolders(std::filesystem::path data, std::vector<std::filesystem::path> roots);

  // A shard of about `bytes` to be written now: on a root in use that has room for it; of those, on
  // one that holds the fewest of the shards that are `busy`; of those, on the one with the most
  // free space. Where none has room, likewise. In a folder that is made where it is missing.
  absl::StatusOr<std::filesystem::path> PathFor(const std::string& job, int64_t seq,
                                                int64_t bytes = 0,
                                                std::span<const std::filesystem::path> busy = {});
  // Something below the root that holds `path` could not be written. Takes that root out; false
  // where it is the last one in use, which stays.
  bool TakeOut(const std::filesystem::path& path, const absl::Status& why);
  // At the start, with all `shards` of the store: a root that is no folder, or holds none of those
  // that should lie there, was lost meanwhile (its disk is not mounted). Taken out like one that
  // failed.
  void TakeOutLost(std::span<const std::filesystem::path> shards);
  // The shard at `path` is written: what failed below its root before has gone.
  void Written(const std::filesystem::path& path);
  struct Root {
    std::filesystem::path path;
    std::string failure;      // of the last write, or why it is lost; empty: none
    bool out_of_use = false;  // no shard goes there any more
    bool lost = false;        // at the start: no shard written there brings back what it held
  };
  std::vector<Root> roots() const;
  int64_t FreeBytes() const;  // on all roots in use, each file system once
  std::filesystem::path Folder(const std::string& job) const;  // on the first root
  // Those that hold any of a job's shards, in the order in which they come; Folder(job) where there
  // is no shard.
  std::vector<std::filesystem::path> FoldersWith(const std::string& job,
                                                 std::span<const ShardRow> shards) const;
  std::vector<std::filesystem::path> Folders(const std::string& job) const;
  std::string ToStored(const std::filesystem::path& path) const;
  std::filesystem::path FromStored(const std::string& stored) const;

 private:
  size_t RootOf(const std::filesystem::path& path) const;  // roots_.size() where it is below none
  std::filesystem::path data_;
  mutable std::mutex mutex_;  // guards the failures
  std::vector<Root> roots_;
};

}  // namespace statetap
