#include "server/jobs/shard_folders.h"

#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>

#include "extractor/base/file.h"

namespace statetap {
namespace {

std::filesystem::path Normal(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::path full = std::filesystem::weakly_canonical(path, error);
  return error ? std::filesystem::absolute(path).lexically_normal() : full;
}

uintmax_t Available(const std::filesystem::path& root) {
  std::error_code error;
  const auto space = std::filesystem::space(root, error);
  return error ? 0 : space.available;
}

}  // namespace

ShardFolders::ShardFolders(std::filesystem::path data, std::vector<std::filesystem::path> roots)
    : data_(Normal(data)) {
  for (const auto& root : roots) roots_.push_back(Normal(root));
  if (roots_.empty()) roots_.push_back(data_ / "shards");
}

absl::StatusOr<std::filesystem::path> ShardFolders::PathFor(const std::string& job,
                                                            int64_t seq) const {
  const auto& root = roots_.size() == 1
                         ? roots_[0]
                         : *std::max_element(roots_.begin(), roots_.end(), [](auto& a, auto& b) {
                             return Available(a) < Available(b);
                           });
  const std::filesystem::path folder = root / job;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return ErrnoStatus(error.value(), "cannot make the folder", folder);
  return folder / fmt::format("shard-{:06}.h5", seq);
}

int64_t ShardFolders::FreeBytes() const {
  std::set<dev_t> seen;
  int64_t bytes = 0;
  for (const auto& root : roots_) {
    std::filesystem::path there = root;  // it is made with the first shard
    while (!std::filesystem::exists(there) && there.has_relative_path())
      there = there.parent_path();
    struct stat facts {};
    if (::stat(there.c_str(), &facts) != 0 || !seen.insert(facts.st_dev).second) continue;
    bytes += static_cast<int64_t>(Available(there));
  }
  return bytes;
}

std::filesystem::path ShardFolders::Folder(const std::string& job) const { return roots_[0] / job; }

std::vector<std::filesystem::path> ShardFolders::Folders(const std::string& job) const {
  std::vector<std::filesystem::path> folders;
  for (const auto& root : roots_) folders.push_back(root / job);
  return folders;
}

std::string ShardFolders::ToStored(const std::filesystem::path& path) const {
  const std::filesystem::path relative = path.lexically_relative(data_);
  if (relative.empty() || *relative.begin() == "..") return path.string();
  return relative.string();
}

std::filesystem::path ShardFolders::FromStored(const std::string& stored) const {
  return data_ / stored;  // an absolute right side replaces the left
}

}  // namespace statetap
