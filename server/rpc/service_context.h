// What every service works on. Owned by the server; outlives the services.
#pragma once

#include <atomic>

#include "server/features/consumer_groups.h"
#include "server/features/shard_cache.h"
#include "server/jobs/job_runner.h"

namespace statetap {

struct ServiceContext {
  JobStore& store;
  const ServedModel& model;
  Engine& engine;
  JobRunner& runner;
  const ShardFolders& folders;
  ShardCache& shards;
  ConsumerGroups& groups;
  // Set when the server drains: calls that wait end with UNAVAILABLE.
  std::atomic<bool>& draining;
};

inline absl::Status Draining() {
  return absl::UnavailableError("the server is shutting down; try again later");
}

}  // namespace statetap
