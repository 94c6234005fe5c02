// One stream of committed samples: leases them for its group, sends them within the client's
// credit, notes what is acknowledged. Knows no network: an outlet takes the messages.
//
// Run works on its own thread; Acknowledge, AddCredit and Stop come from others.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "server/features/consumer_groups.h"
#include "server/features/sample_messages.h"
#include "server/features/sample_order.h"
#include "server/features/shard_cache.h"
#include "server/features/unread_shards.h"

namespace statetap {

class FeatureStream {
 public:
  static constexpr uint64_t kDefaultCredit = uint64_t{64} << 20;

  // INVALID_ARGUMENT names the field of `start`, NOT_FOUND a job that is not there.
  // `acknowledged(job key)` (may be null) hears of acknowledgements once the store has them.
  static absl::StatusOr<std::unique_ptr<FeatureStream>> Open(
      JobStore& store, ShardCache& shards, ConsumerGroups& groups, const v1::StreamStart& start,
      std::function<void(int64_t)> acknowledged = nullptr);
  ~FeatureStream();  // what was sent and not acknowledged may go to others

  // Until everything was sent and acknowledged, the client has gone (CANCELLED), or Stop. Without a
  // committed shard and without `follow`: a header without boundaries and the end. Samples that
  // cannot be read do not hold up the others: the end names their shards, and DATA_LOSS follows.
  // INVALID_ARGUMENT where the boundaries asked for are not in all jobs, or their hidden sizes
  // differ.
  absl::Status Run(const FeatureOutlet& outlet);
  // Noted in the store by Run, many at once. OUT_OF_RANGE for a delivery that was not sent.
  absl::Status Acknowledge(uint64_t delivery);
  // The client sends no more: Run does not wait for acknowledgements after the end.
  void Close();
  void AddCredit(uint64_t bytes);
  void Stop(absl::Status why);

 private:
  // A job of the stream, as far as it is known.
  struct JobPart {
    ShardConfig config;  // of its first readable shard
    bool known = false;
    bool announced = false;  // its header was sent
    std::optional<ShardRow> last_shard;
  };
  FeatureStream(JobStore& store, ShardCache& shards, ConsumerGroups& groups,
                const v1::StreamStart& start, SampleOrder order,
                std::function<void(int64_t)> acknowledged);
  const JobRecord& Job(size_t job) const { return order_.jobs()[job]; }
  absl::Status SendAll(const FeatureOutlet& outlet);
  enum class Step { kSent, kSkipped, kNothing };
  absl::StatusOr<Step> SendNext(const FeatureOutlet& outlet);
  absl::StatusOr<ShardRow> ShardOf(const OrderedSample& sample);
  absl::Status SendEnd(int64_t samples, const FeatureOutlet& outlet);
  absl::Status NotSent() const;  // OK where nothing was left out
  absl::StatusOr<std::optional<OrderedSample>> LeaseNext();
  absl::Status WaitForCredit(uint64_t bytes);
  absl::Status WaitForMore();
  absl::Status WaitForAcknowledgements();
  absl::Status NoteAcknowledged();
  // What was sent and not acknowledged is the group's again.
  void GiveBack();
  // Reads what the job's shards say of it, once there is one.
  absl::Status Learn(size_t job);
  absl::Status Agree(size_t job);  // with the jobs before it
  absl::Status SendHeader(size_t job, const FeatureOutlet& outlet);
  absl::Status CheckJobs() const;  // NOT_FOUND names one that was deleted

  JobStore& store_;
  ShardCache& shards_;
  ConsumerGroups& groups_;
  const v1::StreamStart start_;
  const std::function<void(int64_t)> on_acknowledged_;
  SampleOrder order_;
  std::vector<JobPart> parts_;
  std::optional<size_t> first_known_;  // the first job that was learned of
  std::vector<int> boundaries_;
  v1::StreamDescription description_;  // as things stood at the start
  UnreadShards unread_;
  std::set<std::pair<size_t, int64_t>> evicted_samples_;  // not sent either
  std::deque<OrderedSample> next_;                        // read ahead
  uint64_t releases_ = 0;                                 // of the groups when the order was read
  uint64_t returns_ = 0;  // of the groups, when reading began at the front

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::pair<size_t, int64_t>>
      sent_;  // delivery → job and sample, unacknowledged
  std::map<size_t, std::vector<int64_t>> acknowledged_;  // by job, not yet in the store
  std::chrono::steady_clock::time_point noted_{};
  uint64_t deliveries_ = 0;
  uint64_t limit_, outstanding_ = 0;  // payload bytes
  bool stopped_ = false, closed_ = false;
  absl::Status why_;
};

}  // namespace statetap
