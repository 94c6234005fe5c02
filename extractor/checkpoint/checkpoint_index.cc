#include "extractor/checkpoint/checkpoint_index.h"

#include <algorithm>
#include <system_error>

#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/checkpoint/checkpoint_check.h"
#include "extractor/checkpoint/checkpoint_digest.h"
#include "extractor/checkpoint/hf_cache.h"
#include "extractor/checkpoint/int4.h"
#include "extractor/checkpoint/tensor_table.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
// Real ones have a few KB; lists of quantised layers take some to hundreds.
constexpr int64_t kMaxConfigBytes = int64_t{4} << 20;

absl::StatusOr<Json> ReadJson(const fs::path& path) {
  STATETAP_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxConfigBytes));
  auto json = ParseJson(text);
  if (!json.ok()) return WithContext(json.status(), path.string());
  return json;
}

// eos_token_id of generation_config.json, a number or a list; empty where there is none.
absl::StatusOr<std::vector<int32_t>> ReadGenerationStops(const fs::path& folder, int vocab) {
  const fs::path path = folder / "generation_config.json";
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return std::vector<int32_t>();
  STATETAP_ASSIGN_OR_RETURN(const Json json, ReadJson(path));
  const Json* value = FindMember(json, "eos_token_id");
  if (value == nullptr) return std::vector<int32_t>();
  std::vector<int32_t> ids;
  for (const Json& id : value->is_array() ? *value : Json::array({*value})) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(vocab)) {
      return absl::InvalidArgumentError(
          fmt::format("{}: eos_token_id holds {}, ids of 0 to {} are needed", path.string(),
                      DumpJson(id).substr(0, 80), vocab - 1));
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

}  // namespace

absl::StatusOr<ModelConfig> ReadModelConfig(const fs::path& folder) {
  const fs::path path = folder / "config.json";
  STATETAP_ASSIGN_OR_RETURN(const Json json, ReadJson(path));
  auto config = ParseModelConfig(json);
  if (!config.ok()) return WithContext(config.status(), path.string());
  return config;
}

absl::StatusOr<CheckpointIndex> CheckpointIndex::Open(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    return absl::NotFoundError(fmt::format("{} is no folder", path.string()));
  }
  CheckpointIndex index;
  STATETAP_ASSIGN_OR_RETURN(index.folder_, SnapshotOf(path));
  index.name_ = ModelName(index.folder_);
  STATETAP_ASSIGN_OR_RETURN(index.config_, ReadModelConfig(index.folder_));
  STATETAP_ASSIGN_OR_RETURN(index.stop_ids_,
                            ReadGenerationStops(index.folder_, index.config_.vocab));
  index.stop_ids_.insert(index.stop_ids_.end(), index.config_.eos_ids.begin(),
                         index.config_.eos_ids.end());
  std::ranges::sort(index.stop_ids_);
  index.stop_ids_.erase(std::ranges::unique(index.stop_ids_).begin(), index.stop_ids_.end());

  STATETAP_ASSIGN_OR_RETURN(TensorTable table, ReadTensorTable(index.folder_, index.config_));
  index.quantized_ = IsQuantized(table.tensors);
  absl::Status status = CheckInventory(index.config_, index.quantized_, table);
  if (!status.ok()) return WithContext(status, index.folder_.string());
  STATETAP_RETURN_IF_ERROR(CheckStoredShapes(index.config_, table));
  STATETAP_ASSIGN_OR_RETURN(index.digest_, DigestOf(index.config_, table));
  index.files_ = std::move(table.files);
  index.tensors_ = std::move(table.tensors);
  return index;
}

const TensorInfo* CheckpointIndex::Find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

int64_t CheckpointIndex::total_bytes() const {
  int64_t total = 0;
  for (const auto& [name, info] : tensors_) total += info.size_bytes;
  return total;
}

int64_t CheckpointIndex::parameters() const {
  int64_t total = 0;
  for (const auto& [name, info] : tensors_) {
    if (name.ends_with(".weight_scale") || name.ends_with(".weight_shape")) continue;
    const int64_t elements = info.size_bytes / static_cast<int64_t>(SizeOf(info.dtype));
    total += name.ends_with(".weight_packed") ? elements * kInt4PerWord : elements;
  }
  return total;
}

}  // namespace statetap
