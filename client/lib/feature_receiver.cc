#include "client/lib/feature_receiver.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "extractor/shard/shard_reader.h"

namespace statetap {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 31;
// A connection that lasted longer without a header had a server that waited for its first sample.
constexpr std::chrono::seconds kWaitedForHeader{5};

SampleRecord RecordOf(const v1::SampleHeader& from) {
  SampleRecord record;
  record.id = from.id();
  record.source = from.source();
  record.meta_json = from.meta_json();
  record.split = from.split();
  record.input_ids.assign(from.input_ids().begin(), from.input_ids().end());
  record.loss_mask.assign(from.loss_mask().begin(), from.loss_mask().end());
  record.logprobs.assign(from.logprobs().begin(), from.logprobs().end());
  record.entropies.assign(from.entropies().begin(), from.entropies().end());
  record.prompt_tokens = from.prompt_tokens();
  record.finish_reason = from.finish_reason();
  record.truncated = from.truncated();
  record.source_index = from.source_index();
  return record;
}

// Job ids have no line break.
std::string JobAndId(std::string_view job, std::string_view id) {
  return fmt::format("{}\n{}", job, id);
}

absl::Status Unfit(std::string_view id, std::string_view what) {
  return absl::DataLossError(fmt::format("the stream's sample \"{}\" {}", id, what));
}

}  // namespace

ReceivedAssembler::ReceivedAssembler(const v1::StreamHeader& header)
    : hidden_(static_cast<size_t>(std::max(0, header.hidden()))),
      boundaries_(header.boundaries().begin(), header.boundaries().end()) {}

absl::Status ReceivedAssembler::Begin(const v1::SampleHeader& sample) {
  if (started_) return Unfit(sample_.record.id, "was not finished before the next one");
  sample_ = {};
  sample_.record = RecordOf(sample);
  const size_t tokens = sample_.record.input_ids.size();
  if (sample_.record.loss_mask.size() != tokens || tokens > kMaxTokens)
    return Unfit(sample.id(), fmt::format("has {} ids and {} mask values", tokens,
                                          sample_.record.loss_mask.size()));
  sample_.job_index = sample.job_index();
  delivery_ = sample.delivery();
  checksum_ = sample.checksum();
  sample_.states.assign(boundaries_.size(), std::vector<uint16_t>(tokens * hidden_));
  filled_.assign(boundaries_.size(), 0);
  missing_ = boundaries_.size() * tokens * hidden_;
  started_ = true;
  return absl::OkStatus();
}

absl::Status ReceivedAssembler::Add(const v1::SampleData& data) {
  if (!started_ || data.delivery() != delivery_)
    return absl::DataLossError(
        fmt::format("states of delivery {} came without its sample", data.delivery()));
  const auto found = std::find(boundaries_.begin(), boundaries_.end(), data.boundary());
  if (found == boundaries_.end())
    return Unfit(sample_.record.id, fmt::format("has states of boundary {}", data.boundary()));
  const auto b = static_cast<size_t>(found - boundaries_.begin());
  std::vector<uint16_t>& to = sample_.states[b];
  const size_t values = data.states().size() / sizeof(uint16_t);
  // Pieces of a boundary come in order, so that none can be missing or twice.
  if (data.states().size() % sizeof(uint16_t) != 0 || data.first_row() < 0 ||
      static_cast<size_t>(data.first_row()) * hidden_ != filled_[b] ||
      values > to.size() - filled_[b])
    return Unfit(sample_.record.id,
                 fmt::format("has {} bytes at row {} of boundary {}", data.states().size(),
                             data.first_row(), data.boundary()));
  std::memcpy(to.data() + filled_[b], data.states().data(), data.states().size());
  filled_[b] += values;
  missing_ -= values;
  return absl::OkStatus();
}

absl::StatusOr<ReceivedSample> ReceivedAssembler::Take(Boundaries boundaries) {
  started_ = false;
  if (boundaries == Boundaries::kAll) {
    const std::vector<std::span<const uint16_t>> states(sample_.states.begin(),
                                                        sample_.states.end());
    if (SampleChecksum(sample_.record, states) != checksum_)
      return Unfit(sample_.record.id, "arrived damaged: its checksum differs");
  }
  return std::move(sample_);
}

absl::StatusOr<FetchedSample> FetchSample(Client& client, const std::string& job,
                                          const std::string& id) {
  v1::GetSampleRequest request;
  request.set_job(job);
  request.set_id(id);
  Client::Call call(client);
  const auto reader = client.features().GetSample(call.context(), request);
  FetchedSample fetched;
  std::unique_ptr<ReceivedAssembler> assembler;
  absl::Status status;
  v1::StreamFeaturesResponse message;
  while (status.ok() && reader->Read(&message)) {
    if (message.has_header()) {
      fetched.header = message.header();
      assembler = std::make_unique<ReceivedAssembler>(fetched.header);
    } else if (assembler != nullptr && message.has_sample()) {
      status = assembler->Begin(message.sample());
    } else if (assembler != nullptr && message.has_data()) {
      status = assembler->Add(message.data());
    }
  }
  if (!status.ok()) call.context()->TryCancel();
  const grpc::Status end = reader->Finish();
  STATETAP_RETURN_IF_ERROR(status);
  STATETAP_RETURN_IF_ERROR(client.StatusFrom(end));
  if (assembler == nullptr || !assembler->complete())
    return absl::DataLossError(fmt::format("the answer for sample \"{}\" is incomplete", id));
  STATETAP_ASSIGN_OR_RETURN(fetched.sample, assembler->Take(ReceivedAssembler::Boundaries::kAll));
  return fetched;
}

// One connection. The call outlives the stream.
struct FeatureReceiver::Stream {
  explicit Stream(Client& client)
      : call(client), rpc(client.features().StreamFeatures(call.context())) {}
  ~Stream() {
    if (finished) return;
    call.context()->TryCancel();
    (void)rpc->Finish();
  }
  grpc::Status Finish() {
    finished = true;
    return rpc->Finish();
  }
  Client::Call call;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StreamFeaturesRequest, v1::StreamFeaturesResponse>>
      rpc;
  bool finished = false;
};

FeatureReceiver::FeatureReceiver(Client& client, const v1::StreamStart& start, const Known& known,
                                 std::function<void()> on_lost)
    : client_(client), start_(start), on_lost_(std::move(on_lost)) {
  for (const auto& [job, ids] : known)
    for (const std::string& id : ids) sequences_[JobAndId(job, id)] = 0;
}

std::string FeatureReceiver::KeyOf(const ReceivedSample& sample) const {
  return JobAndId(header_of(sample).job(), sample.record.id);
}

FeatureReceiver::~FeatureReceiver() = default;

absl::StatusOr<std::unique_ptr<FeatureReceiver>> FeatureReceiver::Open(
    Client& client, const v1::StreamStart& start, const Known& known,
    std::function<void()> on_lost) {
  std::unique_ptr<FeatureReceiver> receiver(
      new FeatureReceiver(client, start, known, std::move(on_lost)));
  if (const absl::Status connected = receiver->Connect(); !connected.ok())
    STATETAP_RETURN_IF_ERROR(receiver->ConnectAgain(connected));
  return receiver;
}

// The header must be the same each time: a job does not change.
absl::Status FeatureReceiver::Connect() {
  stream_ = std::make_unique<Stream>(client_);
  v1::StreamFeaturesRequest request;
  *request.mutable_start() = start_;
  reached_ = stream_->rpc->Write(request) || reached_;
  v1::StreamFeaturesResponse message;
  if (!stream_->rpc->Read(&message)) {
    const grpc::Status status = stream_->Finish();
    return status.ok() ? absl::UnavailableError("the server ended the stream before its header")
                       : client_.StatusFrom(status);
  }
  if (!message.has_header())
    return absl::DataLossError("the stream does not begin with its header");
  headers_[message.header().job_index()] = message.header();
  assembler_ = std::make_unique<ReceivedAssembler>(message.header());
  deliveries_.clear();
  return absl::OkStatus();
}

absl::Status FeatureReceiver::ConnectAgain(absl::Status lost) {
  stream_.reset();
  // From the break on: before it the stream may have waited for hours for a job to go on.
  auto lost_at = std::chrono::steady_clock::now();
  while (absl::IsUnavailable(lost)) {
    if (!reached_ && attempt_ >= client_.options().attempts) break;
    if (reached_ && attempt_ == 1 && on_lost_ != nullptr) on_lost_();
    STATETAP_RETURN_IF_ERROR(client_.Backoff(attempt_++));
    const auto began = std::chrono::steady_clock::now();
    lost = Connect();
    if (lost.ok()) {
      ++reconnects_;
      return lost;
    }
    stream_.reset();
    const auto now = std::chrono::steady_clock::now();
    if (reached_ && now - began > kWaitedForHeader) {
      lost_at = now;
      attempt_ = 1;
    } else if (now - lost_at > client_.options().patience) {
      break;
    }
  }
  return lost;
}

absl::StatusOr<bool> FeatureReceiver::Read(v1::StreamFeaturesResponse& message) {
  while (true) {
    if (stream_ != nullptr && stream_->rpc->Read(&message)) {
      attempt_ = 1;
      return !message.has_end();
    }
    absl::Status lost = absl::UnavailableError("the stream ended early");
    if (stream_ != nullptr) {
      if (const grpc::Status status = stream_->Finish(); !status.ok())
        lost = client_.StatusFrom(status);
    }
    STATETAP_RETURN_IF_ERROR(ConnectAgain(lost));
  }
}

absl::StatusOr<std::optional<ReceivedSample>> FeatureReceiver::Next() {
  v1::StreamFeaturesResponse message;
  while (true) {
    STATETAP_ASSIGN_OR_RETURN(const bool more, Read(message));
    if (!more) return std::nullopt;
    if (message.has_header()) {
      headers_[message.header().job_index()] = message.header();
    } else if (message.has_sample()) {
      if (!headers_.contains(message.sample().job_index()))
        return Unfit(message.sample().id(), "came without the header of its job");
      STATETAP_RETURN_IF_ERROR(assembler_->Begin(message.sample()));
    } else if (message.has_data()) {
      STATETAP_RETURN_IF_ERROR(assembler_->Add(message.data()));
    }
    if (!assembler_->complete()) continue;
    STATETAP_ASSIGN_OR_RETURN(std::optional<ReceivedSample> sample, Finished());
    if (sample.has_value()) return sample;
  }
}

void FeatureReceiver::SendCredit(const ReceivedSample& sample) {
  uint64_t bytes = 0;
  for (const auto& states : sample.states) bytes += states.size() * sizeof(uint16_t);
  if (bytes == 0) return;
  v1::StreamFeaturesRequest request;
  request.set_credit_bytes(bytes);
  stream_->rpc->Write(request);
}

absl::StatusOr<std::optional<ReceivedSample>> FeatureReceiver::Finished() {
  const uint64_t delivery = assembler_->delivery();
  STATETAP_ASSIGN_OR_RETURN(
      ReceivedSample sample,
      assembler_->Take(start_.boundaries().empty() ? ReceivedAssembler::Boundaries::kAll
                                                   : ReceivedAssembler::Boundaries::kSubset));
  SendCredit(sample);
  const auto [place, is_new] = sequences_.try_emplace(KeyOf(sample), next_sequence_);
  deliveries_[delivery] = place->second;
  if (is_new) {
    sample.sequence = next_sequence_++;
    return sample;
  }
  ++skipped_;
  SendAck();
  return std::nullopt;
}

void FeatureReceiver::Ack(uint64_t sequence) {
  acked_sequence_ = std::max(acked_sequence_, sequence);
  SendAck();
}

// An acknowledgement covers all deliveries before it, so it goes as far as all of them are done
// with.
void FeatureReceiver::SendAck() {
  uint64_t delivery = 0;
  while (!deliveries_.empty() && deliveries_.begin()->second <= acked_sequence_) {
    delivery = deliveries_.begin()->first;
    deliveries_.erase(deliveries_.begin());
  }
  if (delivery == 0 || stream_ == nullptr) return;
  v1::StreamFeaturesRequest request;
  request.mutable_ack()->set_delivery(delivery);
  stream_->rpc->Write(request);
}

absl::Status FeatureReceiver::Close() {
  if (stream_ == nullptr) return absl::OkStatus();
  stream_->rpc->WritesDone();
  v1::StreamFeaturesResponse ignored;
  while (stream_->rpc->Read(&ignored)) {
  }
  const grpc::Status status = stream_->Finish();
  stream_.reset();
  return client_.StatusFrom(status);
}

}  // namespace statetap
