#include "extractor/checkpoint/maker.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/base/worker_pool.h"
#include "extractor/checkpoint/maker_files.h"
#include "extractor/checkpoint/model_config.h"
#include "extractor/checkpoint/random_tensor.h"
#include "extractor/checkpoint/safetensors.h"
#include "extractor/checkpoint/tensor_inventory.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kChunkBytes = int64_t{4} << 20;

struct PlannedTensor {
  ExpectedTensor tensor;   // by our name
  SafetensorsEntry entry;  // by its stored name
  DType dtype;
};
using Shard = std::vector<PlannedTensor>;

DType StoredType(TensorKind kind, const MakeOptions& options) {
  switch (kind) {
    case TensorKind::kWeight: return DType::kBf16;
    case TensorKind::kRouterBias: return DType::kF32;
    case TensorKind::kPacked: return DType::kI32;
    case TensorKind::kScale: return options.scale_dtype;
    case TensorKind::kShape: return options.shape_dtype;
  }
  return DType::kBf16;
}

PlannedTensor Plan(const ExpectedTensor& tensor, std::string stored_name, DType dtype) {
  SafetensorsEntry entry{.name = std::move(stored_name),
                         .dtype = std::string(SafetensorsNameOf(dtype)),
                         .shape = tensor.shape};
  return {tensor, std::move(entry), dtype};
}

// A file a layer, then one for what is no layer, then the vision tensors, as the real one has them.
std::vector<Shard> PlanShards(const ModelConfig& config, const MakeOptions& options) {
  std::vector<Shard> shards(static_cast<size_t>(config.num_layers) + 1);
  const std::string_view prefix = options.flat ? "" : "language_model.";
  ForEachTensor(config, options.int4_experts, [&](const ExpectedTensor& tensor) {
    const int layer = LayerOf(tensor.name);
    Shard& shard = layer >= 0 ? shards[layer] : shards.back();
    shard.push_back(
        Plan(tensor, fmt::format("{}{}", prefix, tensor.name), StoredType(tensor.kind, options)));
    return true;
  });
  if (!options.flat) {
    for (const char* name :
         {"mm_projector.pre_norm.weight", "vision_tower.encoder.final_layernorm.weight"}) {
      shards.push_back({Plan({name, TensorKind::kWeight, {16}}, name, DType::kBf16)});
    }
  }
  // Wide elements first, so that all lie at multiples of their size.
  for (Shard& shard : shards) {
    std::ranges::sort(shard, [](const PlannedTensor& a, const PlannedTensor& b) {
      return std::pair(SizeOf(b.dtype), std::string_view(a.entry.name)) <
             std::pair(SizeOf(a.dtype), std::string_view(b.entry.name));
    });
  }
  return shards;
}

// Sets offsets and sizes, and gives the header.
std::string LayOut(Shard& shard) {
  std::vector<SafetensorsEntry> entries;
  for (const PlannedTensor& planned : shard) entries.push_back(planned.entry);
  std::string header = MakeSafetensorsHeader(entries);
  for (size_t i = 0; i < shard.size(); ++i) shard[i].entry = std::move(entries[i]);
  return header;
}

int64_t DataBytes(const Shard& shard) {
  int64_t total = 0;
  for (const PlannedTensor& planned : shard) total += planned.entry.size_bytes;
  return total;
}

// The two numbers of a weight_shape tensor.
void FillShape(const std::array<int64_t, 2>& shape, DType dtype, std::span<std::byte> to) {
  if (dtype == DType::kI64) {
    std::memcpy(to.data(), shape.data(), sizeof(shape));
    return;
  }
  const std::array narrow = {static_cast<int32_t>(shape[0]), static_cast<int32_t>(shape[1])};
  std::memcpy(to.data(), narrow.data(), sizeof(narrow));
}

class Maker {
 public:
  Maker(const fs::path& folder, const MakeOptions& options, const ModelConfig& config)
      : folder_(folder),
        options_(options),
        config_(config),
        pool_(options.num_threads > 0 ? options.num_threads
                                      : static_cast<int>(std::thread::hardware_concurrency())) {}

  absl::StatusOr<MakeResult> Run() {
    STATETAP_RETURN_IF_ERROR(CheckRoom());
    std::vector<Shard> shards = PlanShards(config_, options_);
    std::vector<std::string> headers;
    for (Shard& shard : shards) {
      headers.push_back(LayOut(shard));
      result_.bytes += DataBytes(shard);
      result_.tensors += static_cast<int64_t>(shard.size());
    }
    std::map<std::string, std::string> weight_map;
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string name =
          fmt::format("model-{:05}-of-{:06}.safetensors", i + 1, shards.size());
      STATETAP_RETURN_IF_ERROR(WriteShard(folder_ / name, headers[i], shards[i]));
      for (const PlannedTensor& planned : shards[i]) weight_map[planned.entry.name] = name;
    }
    result_.files = static_cast<int>(shards.size());
    STATETAP_RETURN_IF_ERROR(WriteIndex(weight_map));
    return result_;
  }

 private:
  struct Chunk {
    const PlannedTensor* planned;
    int64_t begin, end;  // bytes within the tensor
  };

  // Before anything is planned: thousands of layers do not fit into memory either.
  absl::Status CheckRoom() const {
    if (options_.holes) return absl::OkStatus();
    uintmax_t needed = 0;
    ForEachTensor(config_, options_.int4_experts, [&](const ExpectedTensor& tensor) {
      uintmax_t bytes = SizeOf(StoredType(tensor.kind, options_));
      for (const int64_t dim : tensor.shape) bytes *= static_cast<uintmax_t>(dim);
      needed += bytes;
      return true;
    });
    std::error_code error;
    const fs::space_info space = fs::space(folder_, error);
    if (error || space.available >= needed) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        fmt::format("{}: {} bytes are needed, {} are free; take fewer layers or another disk",
                    folder_.string(), needed, space.available));
  }

  absl::Status WriteShard(const fs::path& path, std::string_view header, const Shard& shard) {
    std::vector<Chunk> chunks;
    for (const PlannedTensor& planned : shard) {
      if (options_.holes && planned.tensor.kind != TensorKind::kShape) continue;
      for (int64_t begin = 0; begin < planned.entry.size_bytes; begin += kChunkBytes) {
        chunks.push_back(
            {&planned, begin, std::min(begin + kChunkBytes, planned.entry.size_bytes)});
      }
    }
    fs::path temporary = path;
    temporary += ".partial";
    STATETAP_ASSIGN_OR_RETURN(const File file, File::Create(temporary));
    STATETAP_RETURN_IF_ERROR(file.WriteAt(0, std::as_bytes(std::span(header))));
    if (ftruncate(file.descriptor(), static_cast<off_t>(header.size()) + DataBytes(shard)) != 0)
      return ErrnoStatus(errno, "cannot make as large as its weights", temporary);
    STATETAP_RETURN_IF_ERROR(WriteChunks(file, chunks));
    STATETAP_RETURN_IF_ERROR(file.Sync());
    if (rename(temporary.c_str(), path.c_str()) != 0) {
      return ErrnoStatus(errno, "cannot rename to", path);
    }
    return SyncFolder(folder_);
  }

  absl::Status WriteChunks(const File& file, const std::vector<Chunk>& chunks) {
    std::mutex mutex;
    absl::Status status;
    std::atomic<size_t> next{0};
    pool_.ParallelFor(pool_.num_threads(), [&](int64_t, int64_t, int) {
      std::vector<std::byte> buffer;
      for (size_t i = next++; i < chunks.size(); i = next++) {
        absl::Status written = WriteChunk(file, chunks[i], buffer);
        const std::lock_guard lock(mutex);
        if (status.ok()) status = std::move(written);
        if (!status.ok()) return;
        bytes_done_ += chunks[i].end - chunks[i].begin;
        if (options_.progress) options_.progress(bytes_done_, result_.bytes);
      }
    });
    return status;
  }

  absl::Status WriteChunk(const File& file, const Chunk& chunk,
                          std::vector<std::byte>& buffer) const {
    const PlannedTensor& planned = *chunk.planned;
    buffer.resize(static_cast<size_t>(chunk.end - chunk.begin));
    if (planned.tensor.kind == TensorKind::kShape) {
      FillShape(ExpertShape(config_, planned.tensor.name), planned.dtype, buffer);
    } else {
      const RandomTensor random(planned.tensor, planned.dtype, options_.seed);
      random.Fill(chunk.begin / static_cast<int64_t>(SizeOf(planned.dtype)), buffer);
    }
    return file.WriteAt(planned.entry.offset + chunk.begin, buffer);
  }

  absl::Status WriteIndex(const std::map<std::string, std::string>& weight_map) const {
    // By hand: a JSON object of 208,000 keys that keeps their order costs minutes to fill.
    std::string json =
        fmt::format(R"({{"metadata":{{"total_size":{}}},"weight_map":{{)", result_.bytes);
    const char* separator = "\n";
    for (const auto& [tensor, file] : weight_map) {
      json += fmt::format("{}\"{}\":\"{}\"", separator, tensor, file);
      separator = ",\n";
    }
    return WriteFileAtomically(folder_ / "model.safetensors.index.json", json + "\n}}\n");
  }

  const fs::path& folder_;
  const MakeOptions& options_;
  const ModelConfig& config_;
  WorkerPool pool_;
  MakeResult result_;
  int64_t bytes_done_ = 0;
};

absl::Status PrepareFolder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return ErrnoStatus(error.value(), "cannot create", folder);
  const bool empty = fs::is_empty(folder, error);
  if (error) return ErrnoStatus(error.value(), "cannot read", folder);
  if (empty) return absl::OkStatus();
  return absl::FailedPreconditionError(
      fmt::format("{} is not empty; name a new folder", folder.string()));
}

absl::Status WriteSmallFiles(const fs::path& folder, const Json& config, int base,
                             int max_positions) {
  const std::pair<std::string_view, std::string> files[] = {
      {"config.json", config.dump(1)},
      {"generation_config.json", MakeGenerationConfig(base, max_positions).dump(1)},
      {"tokenizer_config.json", MakeTokenizerConfig(base, max_positions).dump(1)},
      {"tiktoken.model", MakeVocabulary(base)}};
  for (const auto& [name, content] : files) {
    STATETAP_RETURN_IF_ERROR(WriteFileAtomically(folder / name, content));
  }
  return absl::OkStatus();
}

absl::Status CheckTypes(const MakeOptions& options) {
  if (!Accepts(TensorKind::kScale, options.scale_dtype)) {
    return absl::InvalidArgumentError(fmt::format("scales of {}; {} is possible",
                                                  NameOf(options.scale_dtype),
                                                  AcceptedTypes(TensorKind::kScale)));
  }
  if (!Accepts(TensorKind::kShape, options.shape_dtype)) {
    return absl::InvalidArgumentError(fmt::format("shapes of {}; {} is possible",
                                                  NameOf(options.shape_dtype),
                                                  AcceptedTypes(TensorKind::kShape)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<MakeResult> MakeCheckpoint(const fs::path& folder, const MakeOptions& options) {
  STATETAP_RETURN_IF_ERROR(CheckTypes(options));
  STATETAP_ASSIGN_OR_RETURN(const Json json, MakeConfig(options));
  // The reader's own rules judge the options.
  STATETAP_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(json));
  STATETAP_RETURN_IF_ERROR(PrepareFolder(folder));
  STATETAP_RETURN_IF_ERROR(
      WriteSmallFiles(folder, json, config.vocab - kSpecialTokens, config.max_positions));
  return Maker(folder, options, config).Run();
}

}  // namespace statetap
