// Samples that could not be read and were therefore not sent, by shard. What it says of them is the
// same for streams and for random access.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "server/store/job_store.h"
#include "statetap/v1/features.pb.h"

namespace statetap {

class UnreadShards {
 public:
  // Once a sample, however often it is met.
  void Note(const JobRecord& job, const ShardRow& shard, int64_t position, const absl::Status& why);
  void AddTo(v1::StreamEnd& end) const;
  // DATA_LOSS names all of them; OK where there are none.
  absl::Status AsStatus() const;

 private:
  struct Shard {
    std::string job;
    v1::DamagedShard damaged;
  };
  std::map<std::string, Shard> shards_;                // by path
  std::set<std::pair<std::string, int64_t>> samples_;  // path, position
};

}  // namespace statetap
