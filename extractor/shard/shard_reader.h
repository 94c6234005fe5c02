// Reads a shard. Every bound is checked: a damaged file gives an error that names it, in bounded
// time and memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "extractor/base/status.h"
#include "extractor/shard/shard_writer.h"
#include "extractor/shard/statistics.h"

namespace statetap {

// One row of the sample table, without its tokens.
struct SampleEntry {
  std::string id, source, meta_json, split, digest, finish_reason;
  int64_t first_row = 0, rows = 0;
  int32_t prompt_tokens = 0;
  bool truncated = false;
  int64_t source_index = 0;
  uint64_t checksum = 0;
};

// States of some rows as they lie in memory, part after part: bf16, little endian. `owner` keeps
// them there, beyond the reader's end too.
struct StatesView {
  std::vector<std::span<const std::byte>> parts;
  std::shared_ptr<const void> owner;
  size_t bytes() const {
    size_t sum = 0;
    for (const auto& part : parts) sum += part.size();
    return sum;
  }
};

class ShardReader {
 public:
  // DATA_LOSS for a file that was cut, damaged or is no shard; FAILED_PRECONDITION for a later
  // version of the format. Holds one descriptor until it is destroyed and nothing of HDF5: it goes
  // on after the file was unlinked and, ReadStatistics apart, in a forked child.
  static absl::StatusOr<std::unique_ptr<ShardReader>> Open(const std::filesystem::path& path);
  virtual ~ShardReader() = default;

  virtual const std::filesystem::path& path() const = 0;
  virtual const ShardConfig& config() const = 0;
  virtual const std::vector<SampleEntry>& samples() const = 0;
  virtual int64_t rows() const = 0;
  // XXH3 over the checksums in the sample table.
  virtual std::string digest() const = 0;
  // Ids, mask, logprobs, entropies (NaN where not computed) and the rest of a sample. OUT_OF_RANGE
  // for an index that is not there.
  virtual absl::StatusOr<SampleRecord> ReadRecord(int64_t sample) const = 0;
  absl::StatusOr<std::vector<SampleRecord>> ReadRecords() const;  // of all samples
  // Rows [first_row, first_row + to.size() / hidden) of the shard at
  // config().boundaries[boundary_index], straight from the file. Thread safe.
  virtual absl::Status ReadStates(int boundary_index, int64_t first_row,
                                  std::span<uint16_t> to) const = 0;
  // The same rows without copying them, of the file's mapping where they are kept as bf16. What is
  // lost under the mapping reads as zeros: CheckViews tells afterwards. Thread safe.
  virtual absl::StatusOr<StatesView> ViewStates(int boundary_index, int64_t first_row,
                                                int64_t rows) const = 0;
  // DATA_LOSS where something of a view that was used could not be read.
  virtual absl::Status CheckViews() const = 0;
  virtual absl::StatusOr<std::vector<BoundaryStatistics>> ReadStatistics() const = 0;
  // Re-reads everything: indices of samples whose checksum is wrong.
  virtual absl::StatusOr<std::vector<int64_t>> Verify() const = 0;
  // Whether the checksum of one sample is right. Thread safe.
  virtual absl::StatusOr<bool> VerifySample(int64_t sample) const = 0;
};

// XXH3 over: the ids (int32), mask (uint8), logprobs, entropies (f32; empty ones as quiet NaN,
// 0x7fc00000), then each boundary's rows (bf16), all little endian as stored.
uint64_t SampleChecksum(const SampleRecord& sample,
                        std::span<const std::span<const uint16_t>> states);

}  // namespace statetap
