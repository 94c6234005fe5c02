#include "server/features/feature_stream.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace statetap {
namespace {

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
  STATETAP_ASSIGN_OR_RETURN(SampleOrder order, SampleOrder::Of(store, start));
  return std::unique_ptr<FeatureStream>(
      new FeatureStream(store, shards, groups, start, std::move(order), std::move(acknowledged)));
}

FeatureStream::FeatureStream(JobStore& store, ShardCache& shards, ConsumerGroups& groups,
                             const v1::StreamStart& start, SampleOrder order,
                             std::function<void(int64_t)> acknowledged)
    : store_(store),
      shards_(shards),
      groups_(groups),
      start_(start),
      on_acknowledged_(std::move(acknowledged)),
      order_(std::move(order)),
      parts_(order_.jobs().size()),
      releases_(groups.releases()),
      returns_(groups.returns()),
      limit_(start.credit_bytes() == 0 ? kDefaultCredit : start.credit_bytes()) {}

FeatureStream::~FeatureStream() { GiveBack(); }

void FeatureStream::GiveBack() {
  NoteAcknowledged().IgnoreError();  // else they are sent once more
  std::map<size_t, std::vector<int64_t>> indices;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [delivery, sample] : sent_) indices[sample.first].push_back(sample.second);
    sent_.clear();
  }
  for (const auto& [job, of_job] : indices) groups_.Return(Job(job).key, order_.group(), of_job);
}

absl::Status FeatureStream::Run(const FeatureOutlet& outlet) {
  absl::Status status = SendAll(outlet);
  // Before the client hears of the end: it may come back at once.
  GiveBack();
  // Whatever it stumbled over then.
  if (!status.ok()) STATETAP_RETURN_IF_ERROR(CheckJobs());
  return status;
}

absl::Status FeatureStream::CheckJobs() const {
  for (const JobRecord& job : order_.jobs()) {
    if (absl::IsNotFound(store_.GetJob(job.key).status()))
      return absl::NotFoundError(fmt::format("job {} was deleted during the stream", job.id));
  }
  return absl::OkStatus();
}

absl::Status FeatureStream::SendAll(const FeatureOutlet& outlet) {
  for (size_t job = 0; job < parts_.size(); ++job) STATETAP_RETURN_IF_ERROR(Learn(job));
  int64_t samples = 0;
  while (true) {
    STATETAP_ASSIGN_OR_RETURN(const Step step, SendNext(outlet));
    samples += step == Step::kSent ? 1 : 0;
    if (step != Step::kNothing) continue;
    if (order_.exhausted()) break;
    STATETAP_RETURN_IF_ERROR(WaitForMore());
  }
  const bool announced =
      std::ranges::any_of(parts_, [](const JobPart& part) { return part.announced; });
  if (!announced) STATETAP_RETURN_IF_ERROR(SendHeader(0, outlet));
  STATETAP_RETURN_IF_ERROR(SendEnd(samples, outlet));
  STATETAP_RETURN_IF_ERROR(WaitForAcknowledgements());
  return NotSent();
}

absl::Status FeatureStream::SendEnd(int64_t samples, const FeatureOutlet& outlet) {
  v1::StreamFeaturesResponse end;
  end.mutable_end()->set_samples(samples);
  unread_.AddTo(*end.mutable_end());
  return outlet(end, {}) ? absl::OkStatus() : Gone();
}

absl::Status FeatureStream::NotSent() const {
  STATETAP_RETURN_IF_ERROR(unread_.AsStatus());
  if (evicted_samples_.empty()) return absl::OkStatus();
  std::set<std::string> jobs;
  for (const auto& [job, index] : evicted_samples_) jobs.insert(Job(job).id);
  return absl::FailedPreconditionError(fmt::format(
      "{} samples of {} were not sent, all others were: their states were evicted; capture them "
      "again with `statetap submit --from {}`, or stream tokens alone (boundaries: -1)",
      evicted_samples_.size(), fmt::join(jobs, ", "), *jobs.begin()));
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
  std::map<size_t, std::vector<int64_t>> acknowledged;
  {
    const std::lock_guard lock(mutex_);
    acknowledged.swap(acknowledged_);
    noted_ = std::chrono::steady_clock::now();
  }
  absl::Status status;
  for (const auto& [job, indices] : acknowledged) {
    const int64_t key = Job(job).key;
    const absl::Status noted = store_.Acknowledge(key, order_.group(), indices);
    groups_.Release(key, order_.group(), indices);
    if (noted.ok() && on_acknowledged_ != nullptr) on_acknowledged_(key);
    status.Update(noted);
  }
  return status;
}

absl::Status FeatureStream::Learn(size_t job) {
  JobPart& part = parts_[job];
  if (part.known) return absl::OkStatus();
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, store_.Shards(Job(job).key));
  for (const ShardRow& shard : shards) {
    const auto reader = shards_.Open(shard);
    if (!reader.ok()) continue;  // its samples tell
    part.config = (*reader)->config();
    part.known = true;
    return Agree(job);
  }
  return absl::OkStatus();
}

absl::Status FeatureStream::Agree(size_t job) {
  const ShardConfig& config = parts_[job].config;
  const std::vector<int> wanted(start_.boundaries().begin(), start_.boundaries().end());
  auto boundaries = SelectBoundaries(wanted, config.boundaries);
  if (!boundaries.ok()) return WithContext(boundaries.status(), Job(job).id);
  if (!first_known_) {
    first_known_ = job;
    boundaries_ = *std::move(boundaries);
    return absl::OkStatus();
  }
  const ShardConfig& first = parts_[*first_known_].config;
  const std::string& first_id = Job(*first_known_).id;
  if (config.hidden != first.hidden) {
    return absl::InvalidArgumentError(
        fmt::format("jobs: {} has hidden size {}, {} has {}; stream them apart", first_id,
                    first.hidden, Job(job).id, config.hidden));
  }
  if (*boundaries == boundaries_) return absl::OkStatus();
  std::vector<int> shared;
  std::ranges::set_intersection(boundaries_, *boundaries, std::back_inserter(shared));
  return absl::InvalidArgumentError(
      fmt::format("boundaries: {} holds {}, {} holds {}; choose of those they share ({})", first_id,
                  fmt::join(boundaries_, ","), Job(job).id, fmt::join(*boundaries, ","),
                  shared.empty() ? "none" : fmt::format("{}", fmt::join(shared, ","))));
}

absl::Status FeatureStream::SendHeader(size_t job, const FeatureOutlet& outlet) {
  JobPart& part = parts_[job];
  const bool is_first =
      std::ranges::none_of(parts_, [](const JobPart& other) { return other.announced; });
  if (is_first) {
    STATETAP_ASSIGN_OR_RETURN(description_, order_.Describe());
  }
  part.announced = true;
  v1::StreamFeaturesResponse message;
  message.mutable_header()->set_job(Job(job).id);
  if (part.known) *message.mutable_header() = HeaderOf(Job(job), part.config, boundaries_);
  v1::StreamHeader& header = *message.mutable_header();
  header.set_job_index(static_cast<int32_t>(job));
  header.set_samples(description_.samples());
  header.set_remaining(description_.samples() - description_.acknowledged());
  header.set_left_out(description_.left_out());
  return outlet(message, {}) ? absl::OkStatus() : Gone();
}

absl::StatusOr<std::optional<OrderedSample>> FeatureStream::LeaseNext() {
  while (true) {
    if (next_.empty()) {
      const uint64_t releases = groups_.releases();
      STATETAP_ASSIGN_OR_RETURN(const std::vector<OrderedSample> more, order_.Next());
      if (more.empty()) {
        // Once more from the front if a stream of the group has ended since and left samples.
        const uint64_t returns = groups_.returns();
        if (returns == returns_) return std::nullopt;
        returns_ = returns;
        order_.Rewind();
        continue;
      }
      // A set that was read whole is as old as its first reading.
      if (!order_.needs_all()) releases_ = releases;
      next_.assign(more.begin(), more.end());
    }
    const OrderedSample sample = next_.front();
    next_.pop_front();
    const int64_t key = Job(sample.job).key, index = sample.sample.index;
    if (!groups_.Lease(key, order_.group(), index)) continue;
    if (groups_.releases() == releases_) return sample;
    // Another stream may have acknowledged it since it was read.
    STATETAP_ASSIGN_OR_RETURN(const bool acknowledged,
                              store_.IsAcknowledged(key, order_.group(), index));
    if (!acknowledged) return sample;
    groups_.Withdraw(key, order_.group(), index);
  }
}

absl::StatusOr<ShardRow> FeatureStream::ShardOf(const OrderedSample& sample) {
  std::optional<ShardRow>& last = parts_[sample.job].last_shard;
  if (!last || last->seq != sample.sample.shard) {
    STATETAP_ASSIGN_OR_RETURN(last, store_.GetShard(Job(sample.job).key, sample.sample.shard));
  }
  return *last;
}

absl::StatusOr<FeatureStream::Step> FeatureStream::SendNext(const FeatureOutlet& outlet) {
  bool note;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return why_;
    note = !acknowledged_.empty() && std::chrono::steady_clock::now() >= noted_ + kNoteInterval;
  }
  if (note) STATETAP_RETURN_IF_ERROR(NoteAcknowledged());
  STATETAP_ASSIGN_OR_RETURN(const std::optional<OrderedSample> leased, LeaseNext());
  if (!leased) return Step::kNothing;
  const size_t job = leased->job;
  const IndexedSample& sample = leased->sample;
  uint64_t delivery;
  {
    const std::lock_guard lock(mutex_);
    delivery = ++deliveries_;
    sent_[delivery] = {job, sample.index};  // from here on the destructor gives it back
  }
  STATETAP_ASSIGN_OR_RETURN(const ShardRow shard, ShardOf(*leased));
  STATETAP_RETURN_IF_ERROR(Learn(job));
  if (!parts_[job].announced) STATETAP_RETURN_IF_ERROR(SendHeader(job, outlet));
  const auto skip = [&] {
    groups_.Withdraw(Job(job).key, order_.group(), sample.index);
    const std::lock_guard lock(mutex_);
    sent_.erase(delivery);
    --deliveries_;
    return Step::kSkipped;
  };
  if (shard.evicted && !boundaries_.empty()) {
    evicted_samples_.insert({job, sample.index});
    return skip();
  }
  const auto reader = shards_.OpenVerified(shard, sample.position);
  if (!reader.ok()) {
    unread_.Note(Job(job), shard, sample.position, reader.status());
    return skip();
  }
  const uint64_t bytes = static_cast<uint64_t>(sample.rows) * boundaries_.size() *
                         static_cast<uint64_t>((*reader)->config().hidden) * sizeof(uint16_t);
  STATETAP_RETURN_IF_ERROR(WaitForCredit(bytes));
  const absl::Status sent =
      SendSample(**reader, {sample.position, job, delivery}, boundaries_, outlet);
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
    STATETAP_RETURN_IF_ERROR(CheckJobs());
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
    for (auto it = sent_.begin(); it != end; ++it)
      acknowledged_[it->second.first].push_back(it->second.second);
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
