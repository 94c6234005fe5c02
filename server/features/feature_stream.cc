#include "server/features/feature_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "extractor/base/json.h"

namespace statetap {
namespace {

constexpr int64_t kPieceBytes = int64_t{2} << 20;
constexpr int64_t kReadAhead = 256;
constexpr std::chrono::milliseconds kLook{50};
constexpr std::chrono::milliseconds kNoteInterval{100};
constexpr std::chrono::seconds kLastAcknowledgements{10};

absl::Status Gone() { return absl::CancelledError("the client has gone"); }

}  // namespace

absl::StatusOr<std::vector<int>> SelectBoundaries(std::span<const int> wanted,
                                                  std::span<const int> stored) {
  if (wanted.empty()) return std::vector<int>(stored.begin(), stored.end());
  if (wanted.size() == 1 && wanted[0] == -1) return std::vector<int>();
  for (const int boundary : wanted) {
    if (std::find(stored.begin(), stored.end(), boundary) != stored.end()) continue;
    return absl::InvalidArgumentError(fmt::format("boundaries: {} is not stored; the job has {}",
                                                  boundary, fmt::join(stored, ", ")));
  }
  std::vector<int> selected(wanted.begin(), wanted.end());
  std::sort(selected.begin(), selected.end());
  selected.erase(std::unique(selected.begin(), selected.end()), selected.end());
  return selected;
}

v1::StreamHeader HeaderOf(const JobRecord& job, const ShardConfig& config,
                          std::span<const int> boundaries) {
  v1::StreamHeader header;
  header.set_job(job.id);
  header.set_hidden(config.hidden);
  header.set_layers(config.layers);
  header.mutable_boundaries()->Assign(boundaries.begin(), boundaries.end());
  header.set_dtype("bf16");
  header.set_rms_norm_eps(config.rms_norm_eps);
  header.set_model_digest(config.model_digest);
  header.set_model_name(config.model_name);
  const Json attributes = {{"job", config.job},
                           {"model_name", config.model_name},
                           {"model_digest", config.model_digest},
                           {"quantization", config.quantization},
                           {"hidden", config.hidden},
                           {"layers", config.layers},
                           {"boundaries", config.boundaries},
                           {"rms_norm_eps", config.rms_norm_eps},
                           {"inner_eps", config.inner_eps},
                           {"rope_json", config.rope_json},
                           {"tokenizer_digest", config.tokenizer_digest},
                           {"template_name", config.template_name},
                           {"template_digest", config.template_digest},
                           {"thinking", config.thinking},
                           {"options_json", config.options_json},
                           {"producer", config.producer}};
  header.set_attributes_json(DumpJson(attributes));
  return header;
}

absl::Status SendSample(const ShardReader& shard, const IndexedSample& sample, uint64_t delivery,
                        std::span<const int> boundaries, const FeatureOutlet& outlet) {
  if (sample.position >= static_cast<int64_t>(shard.samples().size()))
    return absl::DataLossError(
        fmt::format("{} has no sample {}", shard.path().string(), sample.position));
  const SampleEntry& entry = shard.samples()[static_cast<size_t>(sample.position)];
  STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard.ReadRecord(sample.position));
  v1::StreamFeaturesResponse message;
  v1::SampleHeader& header = *message.mutable_sample();
  header.set_delivery(delivery);
  header.set_id(record.id);
  header.set_source(record.source);
  header.set_meta_json(record.meta_json);
  header.set_split(record.split);
  header.mutable_input_ids()->Assign(record.input_ids.begin(), record.input_ids.end());
  header.set_loss_mask(record.loss_mask.data(), record.loss_mask.size());
  header.mutable_logprobs()->Assign(record.logprobs.begin(), record.logprobs.end());
  header.mutable_entropies()->Assign(record.entropies.begin(), record.entropies.end());
  header.set_prompt_tokens(record.prompt_tokens);
  header.set_finish_reason(record.finish_reason);
  header.set_truncated(record.truncated);
  header.set_source_index(record.source_index);
  header.set_checksum(entry.checksum);
  if (!outlet(message)) return Gone();

  const ShardConfig& config = shard.config();
  const int64_t piece_rows = std::max<int64_t>(1, kPieceBytes / (2 * int64_t{config.hidden}));
  std::vector<uint16_t> rows;
  for (const int boundary : boundaries) {
    const auto place = std::find(config.boundaries.begin(), config.boundaries.end(), boundary);
    if (place == config.boundaries.end())
      return absl::DataLossError(
          fmt::format("{} has no boundary {}", shard.path().string(), boundary));
    const int index = static_cast<int>(place - config.boundaries.begin());
    for (int64_t first = 0; first < entry.rows; first += piece_rows) {
      const int64_t count = std::min(piece_rows, entry.rows - first);
      rows.resize(static_cast<size_t>(count * config.hidden));
      STATETAP_RETURN_IF_ERROR(shard.ReadStates(index, entry.first_row + first, rows));
      v1::StreamFeaturesResponse piece;
      v1::SampleData& data = *piece.mutable_data();
      data.set_delivery(delivery);
      data.set_boundary(boundary);
      data.set_first_row(first);
      data.set_states(rows.data(), rows.size() * sizeof(uint16_t));
      if (!outlet(piece)) return Gone();
    }
  }
  return absl::OkStatus();
}

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
  int64_t samples = 0;
  JobState state = job_.state;
  while (true) {
    STATETAP_ASSIGN_OR_RETURN(const bool sent, SendNext(outlet));
    samples += sent ? 1 : 0;
    if (sent) continue;
    // Ended is looked at before the last look for samples: none can come between.
    if (!start_.follow() || HasEnded(state)) break;
    STATETAP_ASSIGN_OR_RETURN(const JobRecord now, store_.GetJob(job_.key));
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
      shard_ = more.back().shard;
      row_ = more.back().row;
    }
    const IndexedSample sample = next_.front();
    next_.pop_front();
    if (groups_.Lease(job_.key, group_, sample.index)) return sample;
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
