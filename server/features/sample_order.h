// Which samples a stream sends and in which order: those of its jobs that are not excluded, that
// `where` holds for and that fall to its rank. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "extractor/shard/sample_filter.h"
#include "server/store/job_store.h"
#include "statetap/v1/features.pb.h"

namespace statetap {

// Of a request that leaves its group out: "default".
std::string GroupOf(const std::string& group);

struct OrderedSample {
  size_t job = 0;  // its place among the jobs
  IndexedSample sample;
};

class SampleOrder {
 public:
  // INVALID_ARGUMENT names the field of `start`, NOT_FOUND a job that is not there.
  static absl::StatusOr<SampleOrder> Of(const JobStore& store, const v1::StreamStart& start);

  const std::vector<JobRecord>& jobs() const { return jobs_; }  // as they were at the start
  const std::string& group() const { return group_; }

  // Of an order that is known only once all samples are: they are read once.
  bool needs_all() const { return shuffled_ || equal_counts_; }
  // The next few, without those that the group had acknowledged by the time they were read; nothing
  // where there is none now.
  absl::StatusOr<std::vector<OrderedSample>> Next();
  // Next gave all there will be.
  bool exhausted() const { return job_ == jobs_.size(); }
  // Next begins at the front again.
  void Rewind();

  // As things stand.
  absl::StatusOr<v1::StreamDescription> Describe() const;

 private:
  // The samples of this rank in order.
  struct Part {
    std::vector<OrderedSample> samples;
    int64_t left_out = 0;
  };
  explicit SampleOrder(const JobStore& store) : store_(&store) {}
  bool IsMine(int64_t place) const { return place % world_ == rank_; }
  absl::StatusOr<bool> AllEnded() const;
  absl::StatusOr<std::vector<IndexedSample>> Page(size_t job, int64_t shard, int64_t row,
                                                  int64_t limit) const;
  absl::StatusOr<Part> Collect() const;
  absl::StatusOr<std::vector<OrderedSample>> NextOfAll();
  absl::StatusOr<std::vector<OrderedSample>> NextAsStored();

  const JobStore* store_;
  std::vector<JobRecord> jobs_;
  std::string group_;
  SampleFilter where_;
  bool follow_ = false, shuffled_ = false, equal_counts_ = false;
  uint64_t seed_ = 0;
  int64_t rank_ = 0, world_ = 1;

  // Where Next goes on: behind (shard, row) of a job, or in `all_`.
  size_t job_ = 0;
  int64_t shard_ = 0, row_ = -1;
  int64_t place_ = 0;  // of the next sample in the order
  std::optional<std::vector<OrderedSample>> all_;
  size_t next_of_all_ = 0;
};

}  // namespace statetap
