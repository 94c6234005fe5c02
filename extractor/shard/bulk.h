// Rows of the chunked datasets, written to and read from the file at the places where HDF5 put the
// chunks. Thread safe for different rows: no state but the table of offsets.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "extractor/base/file.h"
#include "extractor/shard/hdf5_file.h"

namespace statetap {

struct BulkDataset {
  std::string path;  // "/states/30"
  Hdf5RowsShape shape;
  std::vector<int64_t> chunk_offsets;  // file offset of each chunk, in order of rows
};

// Rows a chunk: the largest number whose bytes stay within `about_bytes` and are a multiple of
// kChunkAlignment; at least the least such number.
int64_t RowsPerChunk(int64_t row_bytes, int64_t about_bytes);
// `rows` rounded up to the next number whose bytes are a multiple of kChunkAlignment.
int64_t AlignedRows(int64_t row_bytes, int64_t rows);

// REQUIRES: whole rows, within the chunks. Neighbouring chunks are written in one call.
absl::Status WriteRows(const File& file, const BulkDataset& dataset, int64_t first_row,
                       std::span<const std::byte> from);
// OUT_OF_RANGE for rows beyond shape.rows.
absl::Status ReadRows(const File& file, const BulkDataset& dataset, int64_t first_row,
                      std::span<std::byte> to);
// The rows as they lie in `file`, the bytes of the whole file, part after part. DATA_LOSS where the
// file ends before them.
absl::StatusOr<std::vector<std::span<const std::byte>>> ViewRows(std::span<const std::byte> file,
                                                                 const BulkDataset& dataset,
                                                                 int64_t first_row, int64_t rows);

}  // namespace statetap
