// Stored samples with their states, of a job of the server or of shards here: one by one, by id.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/local_shards.h"

namespace statetap {

struct SampleStates {
  SampleRecord record;
  std::string model_digest;  // of the weights that made the states; empty: not known
  int hidden = 0, layers = 0;
  std::vector<int> boundaries;
  std::vector<std::vector<uint16_t>> states;  // by boundary: bf16 [tokens, hidden]
};

class SampleSource {
 public:
  static absl::StatusOr<std::unique_ptr<SampleSource>> Open(Context& context, const Source& source);
  virtual ~SampleSource() = default;

  // Those that `where` holds for, in stored order. INVALID_ARGUMENT where it cannot be read.
  virtual absl::StatusOr<std::vector<std::string>> Ids(const std::string& where) = 0;
  // NOT_FOUND for an id that is not there; FAILED_PRECONDITION for a sample whose states were
  // evicted, and for one of the shards here that they hold twice.
  virtual absl::StatusOr<SampleStates> Read(const std::string& id) = 0;
};

}  // namespace statetap
