// A small made checkpoint as values in memory, to be changed and written again.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "extractor/base/file.h"
#include "extractor/checkpoint/checkpoint_index.h"
#include "extractor/checkpoint/maker.h"
#include "extractor/checkpoint/maker_files.h"
#include "extractor/checkpoint/safetensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap::testing {

struct StoredTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

struct EditableCheckpoint {
  Json config;
  std::map<std::string, StoredTensor> tensors;  // by stored name

  // Two layers (one dense, one of experts) unless the options say otherwise.
  explicit EditableCheckpoint(MakeOptions options = {}) {
    if (options.layers == 0) options.layers = 2;
    options.num_threads = 1;
    config = *MakeConfig(options);
    const TempDir folder;
    EXPECT_OK(MakeCheckpoint(folder / "made", options));
    for (const auto& entry : std::filesystem::directory_iterator(folder / "made")) {
      if (entry.path().extension() == ".safetensors") AddFile(entry.path());
    }
  }

  // One file without an index, or `num_files` with one.
  void Write(const std::filesystem::path& folder, int num_files = 1) const {
    std::filesystem::create_directories(folder);
    EXPECT_OK(WriteFileAtomically(folder / "config.json", config.dump(1)));
    if (num_files == 1) return WriteShard(folder / "model.safetensors", tensors);
    std::vector<std::map<std::string, StoredTensor>> shards(num_files);
    Json weight_map = Json::object();
    size_t number = 0;
    for (const auto& [name, tensor] : tensors) {
      const size_t shard = number++ % shards.size();
      shards[shard][name] = tensor;
      weight_map[name] = ShardName(shard);
    }
    for (size_t i = 0; i < shards.size(); ++i) WriteShard(folder / ShardName(i), shards[i]);
    WriteIndex(folder, weight_map);
  }

  // Written to a folder of its own and opened.
  absl::StatusOr<CheckpointIndex> Open(int num_files = 1) const {
    const TempDir folder;
    Write(folder / "model", num_files);
    return CheckpointIndex::Open(folder / "model");
  }

  static std::string ShardName(size_t number) { return fmt::format("{}.safetensors", number); }

  static void WriteIndex(const std::filesystem::path& folder, const Json& weight_map) {
    EXPECT_OK(WriteFileAtomically(folder / "model.safetensors.index.json",
                                  Json({{"weight_map", weight_map}}).dump()));
  }

  static void WriteShard(const std::filesystem::path& path,
                         const std::map<std::string, StoredTensor>& tensors) {
    std::vector<SafetensorsEntry> entries;
    for (const auto& [name, tensor] : tensors) {
      entries.push_back({.name = name, .dtype = tensor.dtype, .shape = tensor.shape});
    }
    std::string content = MakeSafetensorsHeader(entries);
    for (const auto& [name, tensor] : tensors) content += tensor.bytes;
    EXPECT_OK(WriteFileAtomically(path, content));
  }

 private:
  void AddFile(const std::filesystem::path& path) {
    const std::string content = *ReadWholeFile(path);
    const std::vector<SafetensorsEntry> entries = *ReadSafetensorsHeader(path);
    for (const SafetensorsEntry& entry : entries) {
      tensors[entry.name] = {entry.dtype, entry.shape,
                             content.substr(entry.offset, entry.size_bytes)};
    }
  }
};

}  // namespace statetap::testing
