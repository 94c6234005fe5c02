// What a crash left in the shard folders, put in order before work goes on.
#pragma once

#include "server/jobs/shard_folders.h"
#include "server/store/job_store.h"

namespace statetap {

// In the folders of the store's jobs: unfinished files (*.partial) are removed. A shard that the
// store does not name (the server ended between the rename and the transaction) is taken over if it
// verifies and all of its samples are still to do with the same content and options; else it is
// removed. Files of other jobs are not touched.
absl::Status RecoverShards(JobStore& store, const ShardFolders& folders);

}  // namespace statetap
