// The file's contents apart from bulk rows, between HDF5 and our structs: attributes, samples and
// statistics. The only place that names them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "extractor/shard/bulk.h"
#include "extractor/shard/hdf5_file.h"
#include "extractor/shard/shard_reader.h"

namespace statetap {

absl::Status WriteSampleTable(Hdf5File* file, std::span<const SampleEntry> samples);
// Checks that the samples' rows fill [0, rows) without a gap. `max_text_bytes` bounds each column.
absl::StatusOr<std::vector<SampleEntry>> ReadSampleTable(const Hdf5File& file, int64_t rows,
                                                         int64_t max_text_bytes);

// "/stats/<boundary>/…".
absl::Status WriteStatistics(Hdf5File* file, int boundary, StatesDtype dtype,
                             const BoundaryStatistics& statistics);
absl::StatusOr<BoundaryStatistics> ReadStatisticsOf(const Hdf5File& file, int boundary,
                                                    const ShardConfig& config);

// The attributes of the root group that hold a ShardConfig.
absl::Status WriteConfig(Hdf5File* file, const ShardConfig& config);
absl::StatusOr<ShardConfig> ReadConfig(const Hdf5File& file);

size_t NumStatesDatasets(const ShardConfig& config);  // 0 where they were evicted
int64_t StatesRowBytes(const ShardConfig& config);    // of a token at all boundaries

// The bulk datasets of a shard, without rows: states by boundary, then ids, loss mask, logprobs,
// entropies, and for fp8 scales by boundary. `states_rows_per_chunk` 0 is the default; other values
// are rounded up to whole 4 KiB.
std::vector<BulkDataset> BulkDatasetsOf(const ShardConfig& config, int states_rows_per_chunk);

}  // namespace statetap
