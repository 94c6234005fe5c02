#include "server/features/feature_stream.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "extractor/base/log.h"

namespace statetap {
namespace {

constexpr int64_t kReadAhead = 256;
constexpr std::chrono::milliseconds kLook{50};
constexpr std::chrono::milliseconds kNoteInterval{100};
constexpr std::chrono::seconds kLastAcknowledgements{10};

absl::Status Gone() { return absl::CancelledError("the client has gone"); }

}  // namespace

absl::StatusOr<std::unique_ptr<FeatureStream>> FeatureStream::Open(
    JobStore& store, ShardCache& shards, ConsumerGroups& groups, const v1::StreamStart& start,
    std::function<void(int64_t)> acknowledged) {
  STATETAP_RETURN_IF_ERROR(
      CheckBoundaries(std::vector<int>(start.boundaries().begin(), start.boundaries().end())));
  STATETAP_ASSIGN_OR_RETURN(JobRecord job, store.GetJob(start.job()));
  return std::unique_ptr<FeatureStream>(
      new FeatureStream(store, shards, groups, start, std::move(job), std::move(acknowledged)));
}

FeatureStream::FeatureStream(JobStore& store, ShardCache& shards, ConsumerGroups& groups,
                             const v1::StreamStart& start, JobRecord job,
                             std::function<void(int64_t)> acknowledged)
    : store_(store),
      shards_(shards),
      groups_(groups),
      start_(start),
      group_(start.group().empty() ? "default" : start.group()),
      on_acknowledged_(std::move(acknowledged)),
      job_(std::move(job)),
      returns_(groups.returns()),
      limit_(start.credit_bytes() == 0 ? kDefaultCredit : start.credit_bytes()) {}

FeatureStream::~FeatureStream() {
  NoteAcknowledged().IgnoreError();  // else they are sent once more
  std::vector<int64_t> indices;
  for (const auto& [delivery, index] : sent_) indices.push_back(index);
  groups_.Return(job_.key, group_, indices);
}

absl::Status FeatureStream::Run(const FeatureOutlet& outlet) {
  absl::Status status = SendAll(outlet);
  // Whatever it stumbled over then.
  if (!status.ok() && absl::IsNotFound(store_.GetJob(job_.key).status()))
    return absl::NotFoundError(fmt::format("job {} was deleted during the stream", job_.id));
  return status;
}

absl::Status FeatureStream::SendAll(const FeatureOutlet& outlet) {
  int64_t samples = 0;
  JobState state = job_.state;
  while (true) {
    STATETAP_ASSIGN_OR_RETURN(const Step step, SendNext(outlet));
    samples += step == Step::kSent ? 1 : 0;
    if (step != Step::kNothing) continue;
    STATETAP_ASSIGN_OR_RETURN(const JobRecord now, store_.GetJob(job_.key));
    // Ended is looked at before the last look for samples: none can come between.
    if (!start_.follow() || HasEnded(state)) break;
    state = now.state;
    STATETAP_RETURN_IF_ERROR(WaitForMore());
  }
  if (!header_sent_) STATETAP_RETURN_IF_ERROR(SendHeader(outlet));
  STATETAP_RETURN_IF_ERROR(SendEnd(samples, outlet));
  STATETAP_RETURN_IF_ERROR(WaitForAcknowledgements());
  return Damage();
}

absl::Status FeatureStream::SendEnd(int64_t samples, const FeatureOutlet& outlet) {
  v1::StreamFeaturesResponse end;
  end.mutable_end()->set_samples(samples);
  for (const auto& [path, damage] : damaged_) *end.mutable_end()->add_damaged() = damage;
  return outlet(end) ? absl::OkStatus() : Gone();
}

void FeatureStream::NoteDamage(const IndexedSample& sample, const ShardRow& shard,
                               const absl::Status& status) {
  groups_.Withdraw(job_.key, group_, sample.index);
  if (!damaged_samples_.insert(sample.index).second) return;
  v1::DamagedShard& damage = damaged_[shard.path];
  damage.set_samples(damage.samples() + 1);
  if (damage.samples() > 1) return;
  damage.set_shard(std::filesystem::path(shard.path).filename().string());
  damage.set_message(std::string(MessageOf(status)));
  LogError("{}: a stream goes on without what cannot be read: {}", job_.id, MessageOf(status));
}

absl::Status FeatureStream::Damage() const {
  if (damaged_.empty() && evicted_samples_.empty()) return absl::OkStatus();
  if (damaged_.empty()) {
    return absl::FailedPreconditionError(fmt::format(
        "{0} samples of {1} were not sent, all others were: their states were evicted; capture "
        "them "
        "again with `statetap submit --from {1}`, or stream tokens alone (boundaries: -1)",
        evicted_samples_.size(), job_.id));
  }
  std::string shards;
  for (const auto& [path, damage] : damaged_)
    shards += fmt::format("{}{} ({} samples: {})", shards.empty() ? "" : ", ", damage.shard(),
                          damage.samples(), damage.message());
  return absl::DataLossError(fmt::format(
      "{} samples of {} could not be read and were not sent, all others were: {}; `statetap check "
      "{}` names every damaged sample",
      damaged_samples_.size(), job_.id, shards, job_.id));
}

absl::Status FeatureStream::WaitForAcknowledgements() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kLastAcknowledgements,
                      [&] { return stopped_ || closed_ || sent_.empty(); });
  }
  return NoteAcknowledged();
}

absl::Status FeatureStream::NoteAcknowledged() {
  std::vector<int64_t> indices;
  {
    const std::lock_guard lock(mutex_);
    indices.swap(acknowledged_);
    noted_ = std::chrono::steady_clock::now();
  }
  if (indices.empty()) return absl::OkStatus();
  const absl::Status status = store_.Acknowledge(job_.key, group_, indices);
  groups_.Release(job_.key, group_, indices);
  if (status.ok() && on_acknowledged_ != nullptr) on_acknowledged_(job_.key);
  return status;
}

absl::Status FeatureStream::SendHeader(const FeatureOutlet& outlet) {
  header_sent_ = true;
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, store_.Shards(job_.key));
  v1::StreamFeaturesResponse message;
  message.mutable_header()->set_job(job_.id);
  for (const ShardRow& shard : shards) {
    const auto reader = shards_.Open(shard);
    if (!reader.ok()) continue;  // its samples tell
    const ShardConfig& config = (*reader)->config();
    hidden_ = config.hidden;
    STATETAP_ASSIGN_OR_RETURN(
        boundaries_,
        SelectBoundaries(std::vector<int>(start_.boundaries().begin(), start_.boundaries().end()),
                         config.boundaries));
    *message.mutable_header() = HeaderOf(job_, config, boundaries_);
    break;
  }
  STATETAP_ASSIGN_OR_RETURN(const int64_t remaining, store_.CountUnacknowledged(job_.key, group_));
  message.mutable_header()->set_remaining(remaining);
  return outlet(message) ? absl::OkStatus() : Gone();
}

absl::StatusOr<std::optional<IndexedSample>> FeatureStream::LeaseNext() {
  while (true) {
    if (next_.empty()) {
      releases_ = groups_.releases();
      STATETAP_ASSIGN_OR_RETURN(const std::vector<IndexedSample> more,
                                store_.Unacknowledged(job_.key, group_, shard_, row_, kReadAhead));
      if (more.empty()) {
        // Once more from the front if a stream of the group has ended since and left samples.
        const uint64_t returns = groups_.returns();
        if (returns == returns_) return std::nullopt;
        returns_ = returns;
        shard_ = 0;
        row_ = -1;
        continue;
      }
      next_.assign(more.begin(), more.end());
    }
    const IndexedSample sample = next_.front();
    const bool leased = groups_.Lease(job_.key, group_, sample.index);
    if (leased && groups_.releases() != releases_) {
      // Another stream may have acknowledged it since it was read: ask the store again.
      groups_.Withdraw(job_.key, group_, sample.index);
      next_.clear();
      continue;
    }
    next_.pop_front();
    shard_ = sample.shard;
    row_ = sample.row;
    if (leased) return sample;
  }
}

absl::StatusOr<ShardRow> FeatureStream::ShardOf(const IndexedSample& sample) {
  if (!shard_of_last_ || shard_of_last_->seq != sample.shard) {
    STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, store_.Shards(job_.key));
    const auto found = std::find_if(shards.begin(), shards.end(), [&](const ShardRow& shard) {
      return shard.seq == sample.shard;
    });
    if (found == shards.end())
      return absl::NotFoundError(fmt::format("job {} has no shard {}", job_.id, sample.shard));
    shard_of_last_ = *found;
  }
  return *shard_of_last_;
}

absl::StatusOr<FeatureStream::Step> FeatureStream::SendNext(const FeatureOutlet& outlet) {
  bool note;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return why_;
    note = !acknowledged_.empty() && std::chrono::steady_clock::now() >= noted_ + kNoteInterval;
  }
  if (note) STATETAP_RETURN_IF_ERROR(NoteAcknowledged());
  STATETAP_ASSIGN_OR_RETURN(const std::optional<IndexedSample> sample, LeaseNext());
  if (!sample) return Step::kNothing;
  uint64_t delivery;
  {
    const std::lock_guard lock(mutex_);
    delivery = ++deliveries_;
    sent_[delivery] = sample->index;  // from here on the destructor gives it back
  }
  STATETAP_ASSIGN_OR_RETURN(const ShardRow shard, ShardOf(*sample));
  if (!header_sent_) STATETAP_RETURN_IF_ERROR(SendHeader(outlet));
  const auto skip = [&] {
    const std::lock_guard lock(mutex_);
    sent_.erase(delivery);
    --deliveries_;
    return Step::kSkipped;
  };
  if (shard.evicted && !boundaries_.empty()) {
    groups_.Withdraw(job_.key, group_, sample->index);
    evicted_samples_.insert(sample->index);
    return skip();
  }
  const auto reader = shards_.OpenVerified(shard, sample->position);
  if (!reader.ok()) {
    NoteDamage(*sample, shard, reader.status());
    return skip();
  }
  const uint64_t bytes = static_cast<uint64_t>(sample->rows) * boundaries_.size() *
                         static_cast<uint64_t>(hidden_) * sizeof(uint16_t);
  STATETAP_RETURN_IF_ERROR(WaitForCredit(bytes));
  const absl::Status sent = SendSample(**reader, *sample, delivery, boundaries_, outlet);
  if (!sent.ok() && !absl::IsCancelled(sent)) shards_.Forget(shard);
  STATETAP_RETURN_IF_ERROR(sent);
  return Step::kSent;
}

absl::Status FeatureStream::WaitForCredit(uint64_t bytes) {
  const auto may_go = [&] {
    return stopped_ || outstanding_ == 0 || outstanding_ + bytes <= limit_;
  };
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kNoteInterval, may_go)) {
    lock.unlock();
    STATETAP_RETURN_IF_ERROR(NoteAcknowledged());
    STATETAP_RETURN_IF_ERROR(store_.GetJob(job_.key).status());  // deleted meanwhile?
    lock.lock();
  }
  if (stopped_) return why_;
  outstanding_ += bytes;
  return absl::OkStatus();
}

absl::Status FeatureStream::WaitForMore() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kLook, [&] { return stopped_; });
  return stopped_ ? why_ : absl::OkStatus();
}

absl::Status FeatureStream::Acknowledge(uint64_t delivery) {
  {
    const std::lock_guard lock(mutex_);
    if (delivery > deliveries_) {
      return absl::OutOfRangeError(
          fmt::format("ack.delivery: {} was not sent, the last was {}", delivery, deliveries_));
    }
    const auto end = sent_.upper_bound(delivery);
    for (auto it = sent_.begin(); it != end; ++it) acknowledged_.push_back(it->second);
    sent_.erase(sent_.begin(), end);
  }
  changed_.notify_all();
  return absl::OkStatus();
}

void FeatureStream::Close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

void FeatureStream::AddCredit(uint64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    outstanding_ -= std::min(bytes, outstanding_);
  }
  changed_.notify_all();
}

void FeatureStream::Stop(absl::Status why) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    why_ = std::move(why);
  }
  changed_.notify_all();
}

}  // namespace statetap
