#include "server/features/feature_stream.h"

#include <algorithm>
#include <utility>

namespace statetap {
namespace {

constexpr int64_t kReadAhead = 256;
constexpr std::chrono::milliseconds kLook{50};
constexpr std::chrono::milliseconds kNoteInterval{100};
constexpr std::chrono::seconds kLastAcknowledgements{10};

absl::Status Gone() { return absl::CancelledError("the client has gone"); }

}  // namespace

absl::StatusOr<std::unique_ptr<FeatureStream>> FeatureStream::Open(JobStore& store,
                                                                   ShardCache& shards,
                                                                   ConsumerGroups& groups,
                                                                   const v1::StreamStart& start) {
  STATETAP_ASSIGN_OR_RETURN(JobRecord job, store.GetJob(start.job()));
  return std::unique_ptr<FeatureStream>(
      new FeatureStream(store, shards, groups, start, std::move(job)));
}

FeatureStream::FeatureStream(JobStore& store, ShardCache& shards, ConsumerGroups& groups,
                             const v1::StreamStart& start, JobRecord job)
    : store_(store),
      shards_(shards),
      groups_(groups),
      start_(start),
      group_(start.group().empty() ? "default" : start.group()),
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
    STATETAP_ASSIGN_OR_RETURN(const bool sent, SendNext(outlet));
    samples += sent ? 1 : 0;
    if (sent) continue;
    STATETAP_ASSIGN_OR_RETURN(const JobRecord now, store_.GetJob(job_.key));
    // Ended is looked at before the last look for samples: none can come between.
    if (!start_.follow() || HasEnded(state)) break;
    state = now.state;
    STATETAP_RETURN_IF_ERROR(WaitForMore());
  }
  if (!header_sent_) STATETAP_RETURN_IF_ERROR(SendHeader(outlet));
  v1::StreamFeaturesResponse end;
  end.mutable_end()->set_samples(samples);
  if (!outlet(end)) return Gone();
  return WaitForAcknowledgements();
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
  return status;
}

absl::Status FeatureStream::SendHeader(const FeatureOutlet& outlet) {
  header_sent_ = true;
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, store_.Shards(job_.key));
  v1::StreamFeaturesResponse message;
  if (shards.empty()) {
    message.mutable_header()->set_job(job_.id);
    return outlet(message) ? absl::OkStatus() : Gone();
  }
  STATETAP_ASSIGN_OR_RETURN(const auto reader, shards_.Open(shards.front()));
  hidden_ = reader->config().hidden;
  STATETAP_ASSIGN_OR_RETURN(
      boundaries_,
      SelectBoundaries(std::vector<int>(start_.boundaries().begin(), start_.boundaries().end()),
                       reader->config().boundaries));
  *message.mutable_header() = HeaderOf(job_, reader->config(), boundaries_);
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

absl::StatusOr<bool> FeatureStream::SendNext(const FeatureOutlet& outlet) {
  bool note;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return why_;
    note = !acknowledged_.empty() && std::chrono::steady_clock::now() >= noted_ + kNoteInterval;
  }
  if (note) STATETAP_RETURN_IF_ERROR(NoteAcknowledged());
  STATETAP_ASSIGN_OR_RETURN(const std::optional<IndexedSample> sample, LeaseNext());
  if (!sample) return false;
  uint64_t delivery;
  {
    const std::lock_guard lock(mutex_);
    delivery = ++deliveries_;
    sent_[delivery] = sample->index;  // from here on the destructor gives it back
  }
  if (!header_sent_) STATETAP_RETURN_IF_ERROR(SendHeader(outlet));
  const uint64_t bytes = static_cast<uint64_t>(sample->rows) * boundaries_.size() *
                         static_cast<uint64_t>(hidden_) * sizeof(uint16_t);
  STATETAP_RETURN_IF_ERROR(WaitForCredit(bytes));
  STATETAP_ASSIGN_OR_RETURN(const auto reader, shards_.Open(job_, sample->shard));
  STATETAP_RETURN_IF_ERROR(SendSample(*reader, *sample, delivery, boundaries_, outlet));
  return true;
}

absl::Status FeatureStream::WaitForCredit(uint64_t bytes) {
  const auto may_go = [&] {
    return stopped_ || outstanding_ == 0 || outstanding_ + bytes <= limit_;
  };
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kNoteInterval, may_go)) {
    lock.unlock();
    STATETAP_RETURN_IF_ERROR(NoteAcknowledged());
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
