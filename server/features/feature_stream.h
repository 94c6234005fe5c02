// One stream of a job's committed samples: leases them for its group, sends them within the
// client's credit, notes what is acknowledged. Knows no network: an outlet takes the messages.
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
#include "server/features/shard_cache.h"

namespace statetap {

class FeatureStream {
 public:
  static constexpr uint64_t kDefaultCredit = uint64_t{64} << 20;

  // NOT_FOUND for a job that is not there. `acknowledged(job key)` (may be null) hears of
  // acknowledgements once the store has them.
  static absl::StatusOr<std::unique_ptr<FeatureStream>> Open(
      JobStore& store, ShardCache& shards, ConsumerGroups& groups, const v1::StreamStart& start,
      std::function<void(int64_t)> acknowledged = nullptr);
  ~FeatureStream();  // what was sent and not acknowledged may go to others

  // Until everything was sent and acknowledged, the client has gone (CANCELLED), or Stop. Without a
  // committed shard and without `follow`: a header without boundaries and the end. Samples that
  // cannot be read do not hold up the others: the end names their shards, and DATA_LOSS follows.
  absl::Status Run(const FeatureOutlet& outlet);
  // Noted in the store by Run, many at once. OUT_OF_RANGE for a delivery that was not sent.
  absl::Status Acknowledge(uint64_t delivery);
  // The client sends no more: Run does not wait for acknowledgements after the end.
  void Close();
  void AddCredit(uint64_t bytes);
  void Stop(absl::Status why);

 private:
  FeatureStream(JobStore& store, ShardCache& shards, ConsumerGroups& groups,
                const v1::StreamStart& start, JobRecord job,
                std::function<void(int64_t)> acknowledged);
  absl::Status SendAll(const FeatureOutlet& outlet);
  enum class Step { kSent, kSkipped, kNothing };
  absl::StatusOr<Step> SendNext(const FeatureOutlet& outlet);
  absl::StatusOr<ShardRow> ShardOf(const IndexedSample& sample);
  void NoteDamage(const IndexedSample& sample, const ShardRow& shard, const absl::Status& status);
  absl::Status SendEnd(int64_t samples, const FeatureOutlet& outlet);
  absl::Status Damage() const;  // OK where everything could be read
  absl::StatusOr<std::optional<IndexedSample>> LeaseNext();
  absl::Status WaitForCredit(uint64_t bytes);
  absl::Status WaitForMore();
  absl::Status WaitForAcknowledgements();
  absl::Status NoteAcknowledged();
  absl::Status SendHeader(const FeatureOutlet& outlet);

  JobStore& store_;
  ShardCache& shards_;
  ConsumerGroups& groups_;
  const v1::StreamStart start_;
  const std::string group_;
  const std::function<void(int64_t)> on_acknowledged_;
  const JobRecord job_;  // as it was at the start
  std::vector<int> boundaries_;
  int hidden_ = 0;
  bool header_sent_ = false;
  std::optional<ShardRow> shard_of_last_;
  std::map<std::string, v1::DamagedShard> damaged_;  // by path
  std::set<int64_t> damaged_samples_;
  std::set<int64_t> evicted_samples_;  // not sent either
  std::deque<IndexedSample> next_;     // read ahead
  int64_t shard_ = 0, row_ = -1;       // behind the last read
  uint64_t releases_ = 0;              // of the group when next_ was read
  uint64_t returns_ = 0;               // of the groups, when reading began at the front

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, int64_t> sent_;   // delivery → sample, unacknowledged
  std::vector<int64_t> acknowledged_;  // not yet in the store
  std::chrono::steady_clock::time_point noted_{};
  uint64_t deliveries_ = 0;
  uint64_t limit_, outstanding_ = 0;  // payload bytes
  bool stopped_ = false, closed_ = false;
  absl::Status why_;
};

}  // namespace statetap
