// Drops the states of a job's shards and keeps all else: ids, masks, log-probabilities, statistics.
#pragma once

#include <span>

#include "server/jobs/shard_folders.h"
#include "server/store/job_store.h"

namespace statetap {

// Shard by shard: a file without states is written beside the shard, the store takes it in its
// place, the shard is removed. A crash in between costs nothing: the next start removes the file
// that the store does not name, and a call goes on with the shards that still have states. Returns
// the bytes given back. REQUIRES: nothing else changes these shards meanwhile.
absl::StatusOr<int64_t> EvictStates(JobStore& store, const ShardFolders& folders,
                                    const JobRecord& job, std::span<const ShardRow> shards);

}  // namespace statetap
