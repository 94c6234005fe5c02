// Between the contract's messages and ours, and between our Status and gRPC's: the only file that
// knows both.
#pragma once

#include <grpcpp/support/status.h>

#include "server/features/shard_cache.h"
#include "server/jobs/job_runner.h"
#include "server/store/job_store.h"
#include "statetap/v1/features.pb.h"
#include "statetap/v1/jobs.pb.h"

namespace statetap {

grpc::Status ToGrpc(const absl::Status& status);

v1::Job ToProto(const JobRecord& job, const JobRunner::Live& live, const ServedModel& model,
                const ShardFolders& folders, std::span<const ShardRow> shards);
v1::Sample ToProtoSample(const SampleListing& listing, std::string_view shard_name);
v1::Rejected ToProtoRejected(const SampleListing& listing);
v1::Shard ToProto(const ShardRow& shard, const ShardFolders& folders);

}  // namespace statetap
