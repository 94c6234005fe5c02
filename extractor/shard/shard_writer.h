// Writes one shard: an HDF5 file of whole samples, complete or absent. docs/shard-format.md
// describes the file. Not thread safe; writers of different files may work at once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "extractor/base/status.h"
#include "extractor/shard/statistics.h"

namespace statetap {

// A sample without its states.
struct SampleRecord {
  std::string id;
  std::string source;
  std::string meta_json;           // an object of scalars, or empty
  std::string split = "train";     // train or eval
  std::string digest;              // of its content as submitted
  std::vector<int32_t> input_ids;  // [tokens]
  std::vector<uint8_t> loss_mask;  // [tokens], 0 or 1
  std::vector<float> logprobs;     // [tokens] or empty: all NaN
  std::vector<float> entropies;    // [tokens] or empty: all NaN
  int32_t prompt_tokens = 0;
  std::string finish_reason;  // stop, length or prefill
  bool truncated = false;
  int64_t source_index = 0;  // place among the job's submitted samples
};

// How a shard keeps its states. Callers give and get bf16; what kFp8 gives back is rounded
// (extractor/shard/fp8.h), and so is what checksums are of. kNone: they were evicted; the
// boundaries say which there were, their statistics are kept, samples are written and read without.
enum class StatesDtype { kBf16, kFp8, kNone };
std::string_view NameOf(StatesDtype dtype);  // the attribute "dtype"

// What holds for a whole shard.
struct ShardConfig {
  std::string job;
  std::string model_name, model_digest, quantization;
  int hidden = 0, layers = 0;
  std::vector<int> boundaries;  // ascending, the final one (== layers) included if stored
  StatesDtype dtype = StatesDtype::kBf16;
  double rms_norm_eps = 0, inner_eps = 0;
  std::string rope_json;  // the rope parameters as a JSON object
  std::string tokenizer_digest, template_name, template_digest;
  bool thinking = true;
  // The least id of a special token, and the ids of <think> and </think>; -1 where not known.
  int first_special = -1, think_token = -1, think_end_token = -1;
  std::string options_json;  // the job's options, whole
  std::string producer;      // "statetap 0.1.0"
};

// Its texts and tokens by the names that a file's root attributes and a stream's header give them.
struct ShardText {
  std::string_view name;
  std::string ShardConfig::*field;
};
inline constexpr ShardText kShardTexts[] = {
    {"job", &ShardConfig::job},
    {"options", &ShardConfig::options_json},
    {"producer", &ShardConfig::producer},
    {"model_name", &ShardConfig::model_name},
    {"model_digest", &ShardConfig::model_digest},
    {"quantization", &ShardConfig::quantization},
    {"rope", &ShardConfig::rope_json},
    {"tokenizer_digest", &ShardConfig::tokenizer_digest},
    {"template_name", &ShardConfig::template_name},
    {"template_digest", &ShardConfig::template_digest},
};
struct ShardToken {
  std::string_view name;
  int ShardConfig::*field;  // not in files from before there were statistics by class: -1
};
inline constexpr ShardToken kShardTokens[] = {
    {"first_special_token", &ShardConfig::first_special},
    {"think_token", &ShardConfig::think_token},
    {"think_end_token", &ShardConfig::think_end_token},
};

struct ShardSummary {
  std::filesystem::path path;
  int64_t samples = 0, rows = 0, bytes = 0;
  std::string digest;  // XXH3 over the samples' checksums in order, hex
};

// Of the files that hold `rows` tokens of `samples` samples in shards of `shard_bytes` of states:
// whole chunks, tables and about 256 bytes of text a sample.
int64_t ExpectedShardBytes(const ShardConfig& config, int64_t rows, int64_t samples,
                           int64_t shard_bytes);

class ShardWriter {
 public:
  // A few samples spread over the shard (one at least, others while they make up less than 2 % of
  // its rows), or every one.
  enum class ReadBack { kSome, kAll };
  enum class Statistics { kCompute, kLeaveOut };
  struct Options {
    // Of the states. 0: about 1 MiB. Other values are rounded up until a chunk is a multiple of
    // 4 KiB.
    int rows_per_chunk = 0;
    ReadBack read_back = ReadBack::kSome;          // what Commit compares with its checksums
    Statistics statistics = Statistics::kCompute;  // left out: /stats with count 0
    // kFp8: the states given come out of fp8. How far they are from the captured ones is not known
    // here: the error in the statistics is NaN.
    bool from_fp8 = false;
    std::vector<BoundaryStatistics> kept_statistics;  // kNone: by boundary, of the former states
  };
  // `path` ends in ".h5"; "<path>.partial" is written until Commit. ALREADY_EXISTS where `path` is
  // there; NOT_FOUND or PERMISSION_DENIED where its folder cannot be written.
  static absl::StatusOr<std::unique_ptr<ShardWriter>> Create(const std::filesystem::path& path,
                                                             const ShardConfig& config,
                                                             const Options& options);
  virtual ~ShardWriter() = default;  // without Commit: removes the partial file

  // states[i]: bf16 [tokens, hidden] of config.boundaries[i]. INVALID_ARGUMENT with the sample's id
  // where sizes or texts do not fit (nothing is written then, the writer goes on); any other
  // failure (RESOURCE_EXHAUSTED: disk full) removes the partial file and makes every later call
  // return the same status. The rows are written and digested on two threads.
  virtual absl::Status Append(const SampleRecord& sample,
                              std::span<const std::span<const uint16_t>> states) = 0;
  // Flushes, syncs, reopens and verifies, renames, syncs the folder. FAILED_PRECONDITION for a
  // shard without samples. Ends the writer: later calls are refused.
  virtual absl::StatusOr<ShardSummary> Commit() = 0;
  virtual int64_t states_bytes() const = 0;  // so far, as stored
  virtual int64_t samples() const = 0;
  virtual const std::vector<BoundaryStatistics>& statistics() const = 0;  // by boundary
};

}  // namespace statetap
