// `check --model`: stored samples captured again by a server, their states compared.
#pragma once

#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/local_shards.h"

namespace statetap {

struct RecaptureFlags {
  int64_t samples = 4;
  double max_error = 0.1;
};

struct RecapturedSample {
  std::string id;
  int64_t rows = 0;
  int boundary = 0;                             // where it differs most
  double relative_error = 0, median_error = 0;  // NaN where the server took it for a reject
  bool ok = false;
};

struct Recapture {
  std::string model_here, model_there;  // weight digests: of the samples, of the server
  std::vector<RecapturedSample> samples;
};

// Has the tokens of a few samples, evenly spread, read by the server in a job of its own, which is
// deleted again. A sample is ok where at every boundary half of its rows or more are within
// `max_error` of the stored ones, relative to those: rows that rounding routed to other experts are
// not to raise an alarm, another model, norm or token is.
absl::StatusOr<Recapture> RecaptureSamples(Context& context, const Source& source,
                                           const RecaptureFlags& flags);

}  // namespace statetap
