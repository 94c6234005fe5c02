// Where shards lie: <root>/<job id>/shard-000001.h5, a root for each folder of --shards. The store
// holds paths relative to the data folder where they are below it, so that the folder can be moved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "extractor/base/status.h"

namespace statetap {

class ShardFolders {
 public:
  // No roots: <data>/shards.
  ShardFolders(std::filesystem::path data, std::vector<std::filesystem::path> roots);

  // A shard to be written now: on the root with the most free space, in a folder that is made where
  // it is missing.
  absl::StatusOr<std::filesystem::path> PathFor(const std::string& job, int64_t seq) const;
  int64_t FreeBytes() const;  // on all roots, each file system once
  std::filesystem::path Folder(const std::string& job) const;  // on the first root
  std::vector<std::filesystem::path> Folders(const std::string& job) const;
  std::string ToStored(const std::filesystem::path& path) const;
  std::filesystem::path FromStored(const std::string& stored) const;

 private:
  std::filesystem::path data_;
  std::vector<std::filesystem::path> roots_;
};

}  // namespace statetap
