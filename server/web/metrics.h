// What /metrics shows, in Prometheus' text format.
#pragma once

#include <string>

#include "server/jobs/job_runner.h"
#include "server/jobs/shard_folders.h"

namespace statetap {

std::string MetricsText(const JobStore& store, const JobRunner& runner,
                        const ShardFolders& folders);

}  // namespace statetap
