// Files that no job of the store stands for: what a crash left, put in order before work goes on,
// and what a deleted job leaves.
#pragma once

#include "server/jobs/shard_folders.h"
#include "server/store/job_store.h"

namespace statetap {

// Takes out the folders that were lost while no server ran.
absl::Status TakeOutLostFolders(const JobStore& store, ShardFolders& folders);

// In the folders of the store's jobs: unfinished files (*.partial) are removed. A shard that the
// store does not name (the server ended between the rename and the transaction) is taken over if it
// verifies and all of its samples are still to do with the same content and options; else it is
// removed. Shards of deleted jobs are removed where a crash came first. Files of other jobs are not
// touched.
absl::Status RecoverShards(JobStore& store, const ShardFolders& folders);

// Of a deleted job: its shards, finished or not, and its folders where nothing else lies in them.
// Then the store forgets the job. A file that cannot be removed is tried again at the next start.
absl::Status RemoveShards(JobStore& store, const ShardFolders& folders, const std::string& job);

}  // namespace statetap
