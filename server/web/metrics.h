// What /metrics shows, in Prometheus' text format.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "server/jobs/job_runner.h"
#include "server/jobs/shard_folders.h"

namespace statetap {

class Metrics {
 public:
  // All outlive this.
  Metrics(const JobStore& store, const JobRunner& runner, const ServedModel& model,
          const ShardFolders& folders, const Engine& engine)
      : store_(store), runner_(runner), model_(model), folders_(folders), engine_(engine) {}

  // An error where the store cannot be read. Thread safe.
  absl::StatusOr<std::string> Text();

 private:
  // A job's lags, and what they were read at: they are read again only when that has changed.
  struct Lags {
    std::vector<int64_t> read_at;
    std::vector<JobStore::ReaderLag> groups;
  };
  absl::StatusOr<Lags> LagsOf(const JobRecord& job) const;

  const JobStore& store_;
  const JobRunner& runner_;
  const ServedModel& model_;
  const ShardFolders& folders_;
  const Engine& engine_;
  std::mutex mutex_;              // guards the following
  std::map<int64_t, Lags> lags_;  // by job
};

}  // namespace statetap
