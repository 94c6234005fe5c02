#include "extractor/checkpoint/hf_cache.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <optional>
#include <system_error>

#include "extractor/base/file.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kModels = "models--";

bool IsFolder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

fs::path CacheFolder() {
  const auto variable = [](const char* name) -> std::optional<fs::path> {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return fs::path(value);
  };
  if (const auto hub = variable("HF_HUB_CACHE")) return *hub;
  if (const auto home = variable("HF_HOME")) return *home / "hub";
  if (const auto cache = variable("XDG_CACHE_HOME")) return *cache / "huggingface" / "hub";
  return variable("HOME").value_or(".") / ".cache" / "huggingface" / "hub";
}

// Letters, digits and "._-" only, no "..": a name never leads out of the cache.
bool IsPlainName(std::string_view name) {
  return !name.empty() && name.front() != '.' && name.find("..") == std::string_view::npos &&
         std::ranges::all_of(name, [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
         });
}

// The commit that refs/`revision` holds, where there is such a ref.
std::optional<std::string> CommitOf(const fs::path& folder, std::string_view revision) {
  auto content = ReadWholeFile(folder / "refs" / fs::path(revision), 256);
  if (!content.ok()) return std::nullopt;
  while (!content->empty() && std::isspace(static_cast<unsigned char>(content->back())) != 0) {
    content->pop_back();
  }
  return IsPlainName(*content) ? std::optional(*std::move(content)) : std::nullopt;
}

absl::StatusOr<fs::path> NewestSnapshot(const fs::path& snapshots) {
  std::optional<fs::path> newest;
  fs::file_time_type newest_time;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(snapshots, error)) {
    std::error_code ignored;
    if (!entry.is_directory(ignored)) continue;
    const auto time = entry.last_write_time(ignored);
    if (newest && time <= newest_time) continue;
    newest = entry.path();
    newest_time = time;
  }
  if (newest) return *newest;
  return absl::NotFoundError(fmt::format("{} holds no snapshot", snapshots.string()));
}

}  // namespace

absl::StatusOr<fs::path> SnapshotOf(const fs::path& folder, std::string_view revision) {
  const fs::path snapshots = folder / "snapshots";
  if (!IsFolder(snapshots)) return folder;
  const std::string wanted(revision.empty() ? "main" : revision);
  const auto commit = CommitOf(folder, wanted);
  const fs::path snapshot = snapshots / commit.value_or(wanted);
  if (IsFolder(snapshot)) return snapshot;
  if (revision.empty()) return NewestSnapshot(snapshots);
  return absl::NotFoundError(fmt::format("{} has no snapshot of revision {}; download it first",
                                         folder.string(), revision));
}

std::string ModelName(const fs::path& folder) {
  fs::path full = fs::absolute(folder).lexically_normal();
  if (!full.has_filename()) full = full.parent_path();
  const std::string repository = full.parent_path().parent_path().filename().string();
  if (full.parent_path().filename() != "snapshots" || !repository.starts_with(kModels)) {
    return full.filename().string();
  }
  const std::string_view name = std::string_view(repository).substr(kModels.size());
  const size_t dashes = name.find("--");
  if (dashes == std::string_view::npos) return std::string(name);
  return fmt::format("{}/{}", name.substr(0, dashes), name.substr(dashes + 2));
}

absl::StatusOr<fs::path> ResolveModel(std::string_view folder_or_name) {
  if (IsFolder(fs::path(folder_or_name))) return fs::path(folder_or_name);
  std::string_view name = folder_or_name, revision;
  if (const size_t at = name.find('@'); at != std::string_view::npos) {
    revision = name.substr(at + 1);
    name = name.substr(0, at);
  }
  const size_t slash = name.find('/');
  const std::string_view organisation = name.substr(0, slash);
  const std::string_view model = slash == std::string_view::npos ? "" : name.substr(slash + 1);
  if (!IsPlainName(organisation) || !IsPlainName(model)) {
    return absl::NotFoundError(
        fmt::format("{} is no folder and no org/name[@revision] of a model", folder_or_name));
  }
  // Branches may have slashes ("refs/pr/1").
  if (revision.find("..") != std::string_view::npos || revision.starts_with('/')) {
    return absl::InvalidArgumentError(fmt::format("{}: no revision of that name", revision));
  }
  const fs::path folder = CacheFolder() / fmt::format("{}{}--{}", kModels, organisation, model);
  if (!IsFolder(folder / "snapshots")) {
    return absl::NotFoundError(
        fmt::format("{} is no folder, and {} is not in the Hugging Face cache (no {}); give a "
                    "folder, or download the model first",
                    folder_or_name, name, folder.string()));
  }
  return SnapshotOf(folder, revision);
}

}  // namespace statetap
