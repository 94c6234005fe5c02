// Random access: stored samples of one job by row or id, in the messages of a stream, and their
// acknowledgement.
#pragma once

#include "server/features/sample_messages.h"
#include "server/features/shard_cache.h"

namespace statetap {

// Errors as v1.GetSamplesRequest says, before anything is sent. Samples that cannot be read do not
// hold up the others: the end names their shards, and DATA_LOSS follows. CANCELLED where the client
// has gone.
absl::Status SendSamples(const JobStore& store, ShardCache& shards,
                         const v1::GetSamplesRequest& request, const FeatureOutlet& outlet);

// The job's key. Errors as v1.AcknowledgeRequest says.
absl::StatusOr<int64_t> AcknowledgeSamples(JobStore& store, const v1::AcknowledgeRequest& request);

}  // namespace statetap
