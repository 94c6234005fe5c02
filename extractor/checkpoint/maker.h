// Random checkpoints in the layout of Kimi-K2.5, of any size, for tests and load benches: nested
// config.json, INT4 experts, sharded safetensors with an index, a tiktoken vocabulary and its
// special tokens, two vision tensors that a text model has to skip.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "extractor/base/dtype.h"
#include "extractor/base/status.h"

namespace statetap {

struct MakeOptions {
  // tiny (4 layers, hidden 128), mid (6 layers, hidden 1024, head sizes of the real one) or
  // kimi-k2.5 (61 layers, hidden 7168, 595 GB; 9.8 GB a layer).
  std::string preset = "tiny";
  int layers = 0;  // 0: the preset's
  uint64_t seed = 0;
  int num_threads = 0;  // 0: as many as cores

  // Files of full size whose weights are holes: they read as zeros and take next to no room.
  // For benches that make the weights elsewhere.
  bool holes = false;

  // The family's other members.
  bool query_lora = true;    // false: one query projection, as Moonlight
  bool int4_experts = true;  // false: plain bf16, no quantization_config
  bool flat = false;         // as K2-Thinking: no text_config, no prefix, no vision tensors
  bool yarn = true;
  bool tied_embeddings = false;  // no lm_head
  int dense_layers = 1;
  int shared_experts = 1;
  int groups = 1, top_groups = 1;
  DType scale_dtype = DType::kBf16;  // or kF16, kF32
  DType shape_dtype = DType::kI32;   // or kI64

  // Bytes written and to write; from one thread at a time.
  std::function<void(int64_t bytes_done, int64_t bytes_total)> progress;
};

struct MakeResult {
  int64_t tensors = 0;
  int64_t bytes = 0;  // of tensors
  int files = 0;
};

// Writes the checkpoint into `folder`, which must be new or empty. A tensor's bytes depend on the
// seed, its name and its shape alone, not on threads or shards. Memory: a few MB a thread and some
// hundred bytes a tensor. The index comes last: an interrupted folder does not open.
// INVALID_ARGUMENT names the option; FAILED_PRECONDITION: the folder is not empty;
// RESOURCE_EXHAUSTED: the disk has no room.
absl::StatusOr<MakeResult> MakeCheckpoint(const std::filesystem::path& folder,
                                          const MakeOptions& options);

}  // namespace statetap
