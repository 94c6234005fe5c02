// Open shards of committed jobs, the most recently used ones, and each job's joined statistics.
// Thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "extractor/shard/joined_statistics.h"
#include "server/jobs/shard_folders.h"
#include "server/store/job_store.h"

namespace statetap {

class ShardCache {
 public:
  static constexpr size_t kMaxOpen = 32;
  // At most `max_open` files are kept open beside those in use. `scorer`: of the model whose states
  // they are, for the statistics' look at final states; null: none.
  ShardCache(const JobStore& store, const ShardFolders& folders, size_t max_open = kMaxOpen,
             TokenScorer scorer = nullptr)
      : store_(store), folders_(folders), max_open_(max_open), scorer_(std::move(scorer)) {}

  // NOT_FOUND or DATA_LOSS names the file.
  absl::StatusOr<std::shared_ptr<const ShardReader>> Open(const ShardRow& shard);

  // The same, and the sample matches its checksum; read whole once while the shard stays in the
  // cache. DATA_LOSS names file and sample.
  absl::StatusOr<std::shared_ptr<const ShardReader>> OpenVerified(const ShardRow& shard,
                                                                  int64_t position);
  // A read has failed: what is known of the shard does not hold any more.
  void Forget(const ShardRow& shard);
  // Of a deleted job: its files give up their space once nobody reads them.
  void Forget(const JobRecord& job, const std::vector<ShardRow>& shards);

  // Past the cache: what is on disk now.
  absl::StatusOr<std::shared_ptr<const ShardReader>> OpenAnew(const ShardRow& shard) const;

  // Statistics of the job's shards so far, in the order written: a shard is read once. Of some
  // samples their states are read anew, each time; CANCELLED once `cancelled` says so.
  absl::StatusOr<JoinedStatistics> Statistics(const JobRecord& job, const SampleFilter& where = {},
                                              const std::function<bool()>& cancelled = nullptr);

 private:
  struct Joined {
    std::mutex mutex;  // held while shards and the head are read, for this job alone
    JoinedStatistics statistics;
    int64_t last_seq = 0;
  };
  struct Entry {
    std::string path;
    std::shared_ptr<const ShardReader> reader;
    std::vector<bool> verified;  // by sample
  };
  Entry* Find(const std::string& path);  // REQUIRES: mutex_ is held
  std::shared_ptr<Joined> JoinedOf(int64_t job_key);
  const JobStore& store_;
  const ShardFolders& folders_;
  const size_t max_open_;
  const TokenScorer scorer_;
  std::mutex mutex_;
  std::list<Entry> open_;                              // most recently used first
  std::mutex joined_mutex_;                            // never held while something is read
  std::map<int64_t, std::shared_ptr<Joined>> joined_;  // by job key
};

}  // namespace statetap
