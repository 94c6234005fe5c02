// Checkpoints in the local Hugging Face cache: models--org--name/{refs/<revision>,
// snapshots/<commit>}. Nothing is downloaded.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "extractor/base/status.h"

namespace statetap {

// A folder as it is, or "org/name[@revision]" looked up in the cache: $HF_HUB_CACHE, else
// $HF_HOME/hub, else $XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub. The revision
// is a branch, a tag or a commit [main]. NOT_FOUND says where was looked and what is there.
absl::StatusOr<std::filesystem::path> ResolveModel(std::string_view folder_or_name);

// The snapshot of a "models--org--name" folder: the one of refs/`revision`, the one called
// `revision`, or where `revision` is empty that of refs/main, else the newest. Other folders are
// given back as they are.
absl::StatusOr<std::filesystem::path> SnapshotOf(const std::filesystem::path& folder,
                                                 std::string_view revision = "");

// "org/name" for a folder below models--org--name/snapshots, else the folder's name.
std::string ModelName(const std::filesystem::path& folder);

}  // namespace statetap
