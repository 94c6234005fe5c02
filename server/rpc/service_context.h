// What every service works on. Owned by the server; outlives the services.
#pragma once

#include <atomic>

#include "server/features/consumer_groups.h"
#include "server/features/shard_cache.h"
#include "server/jobs/job_runner.h"
#include "server/rpc/convert.h"

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

// The end of a call that was cut: by a server that shuts down, or by a client that does not read
// it.
inline grpc::Status Cut(const ServiceContext& context) {
  return context.draining ? ToGrpc(Draining()) : grpc::Status::CANCELLED;
}

}  // namespace statetap
