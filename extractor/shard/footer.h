// What stands behind the HDF5 part of a shard: where the chunks lie, and digests by which damage is
// found before HDF5 parses anything. HDF5 itself ignores it. docs/shard-format.md has the bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "extractor/base/file.h"
#include "extractor/shard/bulk.h"

namespace statetap {

struct ShardFooter {
  int64_t hdf5_bytes = 0;             // the HDF5 part is [0, hdf5_bytes)
  uint64_t structure_digest = 0;      // XXH3 of the HDF5 part without the chunks below
  std::vector<BulkDataset> datasets;  // disjoint chunks, all within the HDF5 part
};

// The bytes that stand at offset footer.hdf5_bytes.
std::string EncodeFooter(const ShardFooter& footer);
// DATA_LOSS where the file does not end in a sound footer: it was cut, or it is no shard. Takes
// memory in proportion to the file's own size at most.
absl::StatusOr<ShardFooter> ReadFooter(const File& file);
// Reads all that lies between the chunks.
absl::StatusOr<uint64_t> StructureDigest(const File& file, const ShardFooter& footer);

}  // namespace statetap
