#include "server/jobs/shard_folders.h"

#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <system_error>
#include <tuple>

#include "extractor/base/file.h"
#include "extractor/base/log.h"

namespace statetap {
namespace {

std::filesystem::path Normal(const std::filesystem::path& path) {
  // Made absolute first: what is not there stays relative otherwise.
  const std::filesystem::path absolute = std::filesystem::absolute(path);
  std::error_code error;
  const std::filesystem::path full = std::filesystem::weakly_canonical(absolute, error);
  return error ? absolute.lexically_normal() : full;
}

// The part of it that is there: a root is made with its first shard.
std::filesystem::path Existing(std::filesystem::path root) {
  std::error_code ignored;
  while (!std::filesystem::exists(root, ignored) && root.has_relative_path())
    root = root.parent_path();
  return root;
}

uintmax_t Available(const std::filesystem::path& root) {
  std::error_code error;
  const auto space = std::filesystem::space(Existing(root), error);
  return error ? 0 : space.available;
}

}  // namespace

ShardFolders::ShardFolders(std::filesystem::path data, std::vector<std::filesystem::path> roots)
    : data_(Normal(data)) {
  for (const auto& root : roots) roots_.push_back({Normal(root), ""});
  if (roots_.empty()) roots_.push_back({data_ / "shards", ""});
}

std::vector<ShardFolders::Root> ShardFolders::roots() const {
  const std::lock_guard lock(mutex_);
  return roots_;
}

size_t ShardFolders::RootOf(const std::filesystem::path& path) const {
  size_t found = roots_.size();
  for (size_t i = 0; i < roots_.size(); ++i) {
    const std::filesystem::path below = path.lexically_relative(roots_[i].path);
    if (!below.empty() && *below.begin() != "..") found = i;
  }
  return found;
}

absl::StatusOr<std::filesystem::path> ShardFolders::PathFor(
    const std::string& job, int64_t seq, int64_t bytes,
    std::span<const std::filesystem::path> busy) {
  while (true) {
    const std::vector<Root> roots = this->roots();
    const Root* best = nullptr;
    std::tuple<bool, std::ptrdiff_t, uintmax_t> best_has;  // room, how idle, free bytes
    for (size_t i = 0; i < roots.size(); ++i) {
      if (roots[i].out_of_use) continue;
      const std::ptrdiff_t busy_here =
          std::ranges::count_if(busy, [&](const auto& path) { return RootOf(path) == i; });
      const uintmax_t free = Available(roots[i].path);
      const std::tuple has(free >= static_cast<uintmax_t>(bytes), -busy_here, free);
      if (best != nullptr && has <= best_has) continue;
      best = &roots[i];
      best_has = has;
    }
    const std::filesystem::path folder = best->path / job;
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (!error) return folder / fmt::format("shard-{:06}.h5", seq);
    const absl::Status status = ErrnoStatus(error.value(), "cannot make the folder", folder);
    if (!TakeOut(folder, status)) return status;
  }
}

bool ShardFolders::TakeOut(const std::filesystem::path& path, const absl::Status& why) {
  const size_t root = RootOf(path);
  if (root == roots_.size()) return false;
  const std::lock_guard lock(mutex_);
  Root& failed = roots_[root];
  if (failed.out_of_use) return true;
  if (!failed.lost) failed.failure = std::string(MessageOf(why));
  if (std::ranges::count(roots_, false, &Root::out_of_use) < 2) return false;
  failed.out_of_use = true;
  LogError("shard folder {} is out of use until the server starts again: {}", failed.path.string(),
           failed.failure);
  return true;
}

void ShardFolders::TakeOutLost(std::span<const std::filesystem::path> shards) {
  struct Below {
    int64_t missing = 0;
    std::filesystem::path first;
    bool found = false;
  };
  std::vector<Below> below(roots_.size());
  std::error_code ignored;
  for (const auto& shard : shards) {
    const size_t root = RootOf(shard);
    if (root == roots_.size() || below[root].found) continue;
    below[root].found = std::filesystem::exists(shard, ignored);
    if (below[root].missing++ == 0) below[root].first = shard;
  }
  for (size_t i = 0; i < roots_.size(); ++i) {
    const std::filesystem::path root = roots_[i].path, there = Existing(root);
    std::string why;
    if (!std::filesystem::is_directory(there, ignored)) {
      why = fmt::format(
          "{} is a file; put the folder back and start the server again, or give another --shards",
          there.string());
    } else if (below[i].missing > 0 && !below[i].found) {
      why = fmt::format(
          "{0} of its {0} shards are missing ({1} …); mount its disk, or put the folder back, and "
          "start the server again, or delete the jobs concerned",
          below[i].missing, below[i].first.string());
    } else {
      continue;
    }
    if (!TakeOut(root, absl::NotFoundError(why)))
      LogError("shard folder {} is lost: {}", root.string(), why);
    const std::lock_guard lock(mutex_);
    roots_[i].lost = true;
  }
}

void ShardFolders::Written(const std::filesystem::path& path) {
  const size_t root = RootOf(path);
  if (root == roots_.size()) return;
  const std::lock_guard lock(mutex_);
  if (!roots_[root].out_of_use && !roots_[root].lost) roots_[root].failure.clear();
}

int64_t ShardFolders::FreeBytes() const {
  std::set<dev_t> seen;
  int64_t bytes = 0;
  for (const Root& root : roots()) {
    if (root.out_of_use) continue;
    struct stat facts {};
    if (::stat(Existing(root.path).c_str(), &facts) != 0 || !seen.insert(facts.st_dev).second)
      continue;
    bytes += static_cast<int64_t>(Available(root.path));
  }
  return bytes;
}

std::filesystem::path ShardFolders::Folder(const std::string& job) const {
  return roots_[0].path / job;
}

std::vector<std::filesystem::path> ShardFolders::Folders(const std::string& job) const {
  std::vector<std::filesystem::path> folders;
  for (const Root& root : roots_) folders.push_back(root.path / job);
  return folders;
}

std::vector<std::filesystem::path> ShardFolders::FoldersWith(
    const std::string& job, std::span<const ShardRow> shards) const {
  std::vector<std::filesystem::path> folders;
  for (const ShardRow& shard : shards) {
    const std::filesystem::path folder = FromStored(shard.path).parent_path();
    if (std::ranges::find(folders, folder) == folders.end()) folders.push_back(folder);
  }
  if (folders.empty()) folders.push_back(Folder(job));
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
