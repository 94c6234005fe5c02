#include "extractor/checkpoint/tensor_table.h"

#include <optional>
#include <system_error>
#include <unordered_map>

#include "extractor/base/file.h"
#include "extractor/base/log.h"
#include "extractor/checkpoint/fault_list.h"
#include "extractor/checkpoint/safetensors.h"
#include "extractor/checkpoint/safetensors_json.h"
#include "extractor/checkpoint/tensor_inventory.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kIndexFile = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;

bool Exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// Our name, nothing where the model as configured has no use for the tensor.
std::optional<std::string> UsedName(std::string_view stored, const ModelConfig& config) {
  std::optional<std::string> name = TextTensorName(stored);
  return name && IsPrediction(*name, config) ? std::nullopt : name;
}

// Names of the files to open, in order.
absl::StatusOr<std::vector<std::string>> FilesOf(const fs::path& folder, const WeightIndex& index,
                                                 const ModelConfig& config) {
  std::map<std::string, std::string> files;  // → a tensor in it
  for (const auto& [tensor, file] : index.files) {
    if (UsedName(tensor, config)) files.try_emplace(file, tensor);
  }
  std::vector<std::string> names;
  for (const auto& [file, tensor] : files) {
    if (!Exists(folder / file)) {
      return absl::NotFoundError(fmt::format("{} is missing; {} says that it holds {}",
                                             (folder / file).string(), kIndexFile, tensor));
    }
    names.push_back(file);
  }
  return names;
}

absl::StatusOr<TensorInfo> MakeInfo(const SafetensorsEntry& entry, std::string name, int file) {
  const std::optional<DType> dtype = DTypeOfSafetensors(entry.dtype);
  if (!dtype) {
    return absl::InvalidArgumentError(
        fmt::format("tensor {} has dtype {}, which no text tensor has", entry.name, entry.dtype));
  }
  return TensorInfo{.name = std::move(name),
                    .dtype = *dtype,
                    .shape = entry.shape,
                    .file = file,
                    .offset = entry.offset,
                    .size_bytes = entry.size_bytes};
}

class TableReader {
 public:
  TableReader(const fs::path& folder, const ModelConfig& config, const WeightIndex* index)
      : folder_(folder), config_(config), index_(index) {}

  absl::Status Add(const std::string& file) {
    const fs::path path = folder_ / file;
    STATETAP_ASSIGN_OR_RETURN(const auto entries, ReadSafetensorsHeader(path));
    table_.files.push_back(path);
    for (const SafetensorsEntry& entry : entries) {
      if (absl::Status status = AddEntry(file, entry); !status.ok()) {
        return WithContext(status, path.string());
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<TensorTable> Finish() {
    if (index_ != nullptr) STATETAP_RETURN_IF_ERROR(CheckIndex());
    if (prediction_tensors_ > 0) {
      LogInfo("{}: {} tensors of {} multi-token prediction layers are not used", folder_.string(),
              prediction_tensors_, config_.num_mtp_layers);
    }
    if (config_.tie_word_embeddings && table_.tensors.erase("lm_head.weight") > 0) {
      LogWarning("{}: lm_head.weight is not used, the configuration ties it to embed_tokens",
                 folder_.string());
    }
    return std::move(table_);
  }

 private:
  absl::Status AddEntry(const std::string& file, const SafetensorsEntry& entry) {
    if (index_ != nullptr) {
      const auto listed = index_->files.find(entry.name);
      if (listed == index_->files.end()) {
        return absl::InvalidArgumentError(
            fmt::format("tensor {} is not in {}", entry.name, kIndexFile));
      }
      if (listed->second != file) {
        return absl::InvalidArgumentError(
            fmt::format("tensor {} is here, {} says {}", entry.name, kIndexFile, listed->second));
      }
    }
    std::optional<std::string> name = UsedName(entry.name, config_);
    if (!name) {
      prediction_tensors_ += TextTensorName(entry.name).has_value();
      return absl::OkStatus();
    }
    const int number = static_cast<int>(table_.files.size()) - 1;
    STATETAP_ASSIGN_OR_RETURN(TensorInfo info, MakeInfo(entry, *name, number));
    const auto [at, added] = table_.tensors.try_emplace(*std::move(name), std::move(info));
    if (added) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("tensor {} is a second {}, the first is in {}", entry.name, at->first,
                    table_.files[at->second.file].filename().string()));
  }

  absl::Status CheckIndex() const {
    FaultList absent;
    for (const auto& [tensor, file] : index_->files) {
      const std::optional<std::string> name = UsedName(tensor, config_);
      if (name && !table_.tensors.contains(*name)) {
        absent.Add(fmt::format("{} in {}", tensor, file));
      }
    }
    if (absent.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(fmt::format("{}: {} lists tensors that the files lack: {}",
                                                  folder_.string(), kIndexFile, absent.Text()));
  }

  const fs::path& folder_;
  const ModelConfig& config_;
  const WeightIndex* index_;  // null for a single file
  TensorTable table_;
  int64_t prediction_tensors_ = 0;
};

}  // namespace

absl::StatusOr<WeightIndex> ReadWeightIndex(const fs::path& folder) {
  const fs::path path = folder / kIndexFile;
  if (!Exists(path)) return WeightIndex();
  STATETAP_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxIndexBytes));
  auto json = ParseIndexJson(text);
  if (!json.ok()) return WithContext(json.status(), path.string());
  WeightIndex index{.files = {}, .total_size = json->total_size};
  index.files.reserve(json->weight_map.size());
  for (auto& [tensor, file] : json->weight_map) {
    // Files lie beside the index; a path that leads elsewhere is no checkpoint's.
    if (file.empty() || file.find('/') != std::string::npos || file == "." || file == "..") {
      return absl::InvalidArgumentError(fmt::format(
          "{}: tensor {} is said to be in \"{}\"; the name of a file in the same folder is needed",
          path.string(), tensor, file));
    }
    const auto [at, added] = index.files.try_emplace(std::move(tensor), std::move(file));
    if (!added) {
      return absl::InvalidArgumentError(
          fmt::format("{}: tensor {} is given twice", path.string(), at->first));
    }
  }
  return index;
}

absl::StatusOr<std::string> SingleWeightFile(const fs::path& folder) {
  if (Exists(folder / "model.safetensors")) return "model.safetensors";
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") found.push_back(entry.path().filename());
  }
  if (found.size() == 1) return found.front();
  return absl::NotFoundError(fmt::format(
      "{} has neither {} nor model.safetensors ({} files end in .safetensors); other formats are "
      "not read",
      folder.string(), kIndexFile, found.size()));
}

absl::StatusOr<TensorTable> ReadTensorTable(const fs::path& folder, const ModelConfig& config) {
  if (!Exists(folder / kIndexFile)) {
    STATETAP_ASSIGN_OR_RETURN(const std::string file, SingleWeightFile(folder));
    TableReader reader(folder, config, nullptr);
    STATETAP_RETURN_IF_ERROR(reader.Add(file));
    return reader.Finish();
  }
  STATETAP_ASSIGN_OR_RETURN(const WeightIndex index, ReadWeightIndex(folder));
  STATETAP_ASSIGN_OR_RETURN(const auto files, FilesOf(folder, index, config));
  TableReader reader(folder, config, &index);
  for (const std::string& file : files) STATETAP_RETURN_IF_ERROR(reader.Add(file));
  return reader.Finish();
}

}  // namespace statetap
