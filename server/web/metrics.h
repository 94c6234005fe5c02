// What /metrics shows, in Prometheus' text format.
#pragma once

#include <string>

#include "server/jobs/job_runner.h"

namespace statetap {

std::string MetricsText(const JobStore& store, const JobRunner& runner);

}  // namespace statetap
