// One attempt at a job: from the moment it may run until it ends, waits or is cancelled. Whoever
// stops it sets `stopped`; results that arrive afterwards are dropped, and going on takes a new
// attempt, which reads from the store what is still to do. Samples run again from their seeds, so
// nothing is lost but time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "server/jobs/job_plan.h"
#include "server/jobs/rate_meter.h"
#include "server/store/job_store.h"

namespace statetap {

struct ActiveJob {
  ActiveJob(int64_t key, std::string id, JobPlan plan, ShardConfig shard_config)
      : key(key), id(std::move(id)), plan(std::move(plan)), shard_config(std::move(shard_config)) {}

  const int64_t key;
  const std::string id;
  const JobPlan plan;
  const ShardConfig shard_config;
  std::atomic<bool> stopped{false};
  std::atomic<int64_t> running{0};   // samples in the engine
  std::atomic<int64_t> captured{0};  // complete, in shards that the store does not know yet
  std::atomic<int64_t> captured_rows{0};
  RateMeter rate;
  // The pipeline's thread only:
  std::optional<JobCounts> counts;  // as the store has them; none: they have changed since
  bool gate_ahead = false;
};

using ActiveJobPtr = std::shared_ptr<ActiveJob>;

}  // namespace statetap
