// A checkpoint folder: its config and where each tensor lies. Headers only; no weights are read, no
// code of it is run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/dtype.h"
#include "extractor/base/status.h"
#include "extractor/checkpoint/model_config.h"

namespace statetap {

struct TensorInfo {
  std::string
      name;  // as ours: "model.layers.3.mlp.gate.weight", "lm_head.weight", without any prefix
  DType dtype = DType::kBf16;
  std::vector<int64_t> shape;
  int file = 0;        // into CheckpointIndex::files()
  int64_t offset = 0;  // of its first byte in that file
  int64_t size_bytes = 0;
};

class CheckpointIndex {
 public:
  // `path`: a checkpoint folder, or a Hugging Face cache folder ("models--org--name", its newest
  // snapshot or the one of refs/main). Reads config.json, the index and every safetensors header;
  // checks each tensor that the config calls for (present, shape, dtype, inside its file, no
  // overlap) and that none is left over. INVALID_ARGUMENT or NOT_FOUND names file, tensor, found
  // and expected.
  static absl::StatusOr<CheckpointIndex> Open(const std::filesystem::path& path);

  const ModelConfig& config() const { return config_; }
  const std::filesystem::path& folder() const { return folder_; }
  const std::vector<std::filesystem::path>& files() const { return files_; }
  const std::map<std::string, TensorInfo, std::less<>>& tensors() const { return tensors_; }
  // Null where there is none.
  const TensorInfo* Find(std::string_view name) const;
  // True where routed experts are INT4 (weight_packed, weight_scale), false where they are plain
  // bf16.
  bool quantized() const { return quantized_; }
  // Folder name, or org/name of a Hugging Face cache.
  const std::string& name() const { return name_; }
  // Lower-case hex SHA-256 over the configuration fields that change arithmetic, the tensors'
  // names, shapes, dtypes and sizes, and their bytes: all of them up to 256 MiB, else two windows
  // of 4 KiB (start and middle) of every tensor beside the routed experts and of some 512 tensors
  // of theirs, so that hundreds of gigabytes are told apart without being read; a change that no
  // window sees is not noticed then. Folder, prefix and cut into files do not matter.
  const std::string& digest() const { return digest_; }
  // Tokens that end an answer: eos_token_id of generation_config.json (a number or a list, the file
  // may be absent) and of config.json, ascending, each once.
  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }
  int64_t total_bytes() const;  // of text tensors
  int64_t parameters() const;   // logical: INT4 weights count one each

 private:
  ModelConfig config_;
  std::filesystem::path folder_;
  std::vector<std::filesystem::path> files_;
  std::map<std::string, TensorInfo, std::less<>> tensors_;
  bool quantized_ = false;
  std::string name_, digest_;
  std::vector<int32_t> stop_ids_;
};

// ParseModelConfig of `folder`/config.json; messages start with its path.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::filesystem::path& folder);

}  // namespace statetap
