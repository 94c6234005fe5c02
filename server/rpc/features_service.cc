#include "server/rpc/features_service.h"

#include <filesystem>

#include "proto/messages/shard_check.h"
#include "proto/messages/statistics.h"
#include "server/features/sample_fetch.h"
#include "server/rpc/blocking_stream.h"
#include "server/rpc/convert.h"
#include "server/rpc/feature_wire.h"

namespace statetap {
namespace {

using Bidi = BlockingBidi<grpc::ByteBuffer, grpc::ByteBuffer>;

template <typename Request>
absl::StatusOr<Request> Parse(grpc::ByteBuffer bytes) {
  Request request;
  if (grpc::SerializationTraits<Request>::Deserialize(&bytes, &request).ok()) return request;
  return absl::InternalError(
      fmt::format("a request cannot be read as {}", Request::descriptor()->name()));
}

void Take(FeatureStream& stream, grpc::ByteBuffer bytes) {
  const absl::StatusOr<v1::StreamFeaturesRequest> parsed = Parse<v1::StreamFeaturesRequest>(bytes);
  if (!parsed.ok()) return stream.Stop(parsed.status());
  const v1::StreamFeaturesRequest& request = *parsed;
  absl::Status status;
  if (request.has_ack()) {
    status = stream.Acknowledge(request.ack().delivery());
  } else if (request.message_case() == v1::StreamFeaturesRequest::kCreditBytes) {
    stream.AddCredit(request.credit_bytes());
  } else if (request.has_start()) {
    status = absl::InvalidArgumentError("start: only the first message may have it");
  }
  if (!status.ok()) stream.Stop(status);
}

v1::CheckResult CheckRow(ShardCache& shards, const ShardRow& shard, const ShardFolders& folders) {
  v1::CheckResult result;
  const auto check = [&]() -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const auto reader, shards.OpenAnew(shard));
    if (reader->digest() != shard.digest) {
      return absl::DataLossError(
          fmt::format("its digest is {}, the store has {}", reader->digest(), shard.digest));
    }
    result = CheckShard(*reader);
    return absl::OkStatus();
  };
  if (const absl::Status status = check(); !status.ok())
    result.set_message(std::string(MessageOf(status)));
  result.set_shard(folders.FromStored(shard.path).filename().string());
  return result;
}

}  // namespace

void FeaturesService::Register(const std::shared_ptr<FeatureStream>& stream) {
  const std::lock_guard lock(mutex_);
  std::erase_if(streams_, [](const auto& known) { return known.expired(); });
  streams_.push_back(stream);
}

void FeaturesService::StopStreams() {
  const std::lock_guard lock(mutex_);
  for (const auto& known : streams_) {
    if (const auto stream = known.lock()) stream->Stop(Draining());
  }
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* FeaturesService::StreamFeatures(
    grpc::CallbackServerContext*) {
  return Bidi::Start([this](Bidi& bidi) {
    grpc::ByteBuffer first;
    if (!bidi.Read(&first))
      return ToGrpc(absl::InvalidArgumentError("start: the first message must have it"));
    const absl::StatusOr<v1::StreamFeaturesRequest> request =
        Parse<v1::StreamFeaturesRequest>(first);
    if (!request.ok()) return ToGrpc(request.status());
    if (!request->has_start())
      return ToGrpc(absl::InvalidArgumentError("start: the first message must have it"));
    auto opened =
        FeatureStream::Open(context_.store, context_.shards, context_.groups, request->start(),
                            [this](int64_t job) { context_.runner.Acknowledged(job); });
    if (!opened.ok()) return ToGrpc(opened.status());
    const std::shared_ptr<FeatureStream> stream = *std::move(opened);
    Register(stream);
    if (context_.draining) return ToGrpc(Draining());
    bidi.Listen({[stream](const grpc::ByteBuffer& next) { Take(*stream, next); },
                 [stream] { stream->Close(); },
                 [stream] { stream->Stop(absl::CancelledError("the client has gone")); }});
    return ToGrpc(
        stream->Run([&](const v1::StreamFeaturesResponse& response, const StatesView& states) {
          return bidi.Write(ToWire(response, states));
        }));
  });
}

grpc::Status FeaturesService::ListShards(grpc::ServerContext*, const v1::ListShardsRequest* request,
                                         v1::ListShardsResponse* response) {
  const absl::StatusOr<JobRecord> job = context_.store.GetJob(request->job());
  if (!job.ok()) return ToGrpc(job.status());
  const absl::StatusOr<std::vector<ShardRow>> shards = context_.store.Shards(job->key);
  if (!shards.ok()) return ToGrpc(shards.status());
  for (const ShardRow& shard : *shards) *response->add_shards() = ToProto(shard, context_.folders);
  return grpc::Status::OK;
}

grpc::Status FeaturesService::GetStatistics(grpc::ServerContext* call,
                                            const v1::GetStatisticsRequest* request,
                                            v1::Statistics* response) {
  const absl::StatusOr<JobRecord> job = context_.store.GetJob(request->job());
  if (!job.ok()) return ToGrpc(job.status());
  const absl::StatusOr<SampleFilter> where = SampleFilter::Parse(request->where());
  if (!where.ok()) return ToGrpc(WithContext(where.status(), "where"));
  const absl::StatusOr<JoinedStatistics> joined =
      context_.shards.Statistics(*job, *where, [call] { return call->IsCancelled(); });
  if (!joined.ok()) return ToGrpc(joined.status());
  *response = StatisticsMessage(*joined, request->channels() ? Channels::kYes : Channels::kNo);
  return grpc::Status::OK;
}

grpc::Status FeaturesService::CheckShards(grpc::ServerContext* call,
                                          const v1::ListShardsRequest* request,
                                          v1::CheckShardsResponse* response) {
  const absl::StatusOr<JobRecord> job = context_.store.GetJob(request->job());
  if (!job.ok()) return ToGrpc(job.status());
  const absl::StatusOr<std::vector<ShardRow>> shards = context_.store.Shards(job->key);
  if (!shards.ok()) return ToGrpc(shards.status());
  for (const ShardRow& shard : *shards) {
    if (call->IsCancelled()) return Cut(context_);
    *response->add_results() = CheckRow(context_.shards, shard, context_.folders);
  }
  return grpc::Status::OK;
}

grpc::Status FeaturesService::DescribeStream(grpc::ServerContext*, const v1::StreamStart* request,
                                             v1::StreamDescription* response) {
  const absl::StatusOr<SampleOrder> order = SampleOrder::Of(context_.store, *request);
  if (!order.ok()) return ToGrpc(order.status());
  absl::StatusOr<v1::StreamDescription> description = order->Describe();
  if (!description.ok()) return ToGrpc(description.status());
  *response = *std::move(description);
  return grpc::Status::OK;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* FeaturesService::GetSamples(
    grpc::CallbackServerContext*, const grpc::ByteBuffer* bytes) {
  return Send(Parse<v1::GetSamplesRequest>(*bytes));
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* FeaturesService::GetSample(
    grpc::CallbackServerContext*, const grpc::ByteBuffer* bytes) {
  auto request = Parse<v1::GetSampleRequest>(*bytes);
  if (!request.ok()) return Send(request.status());
  v1::GetSamplesRequest one;
  one.set_job(request->job());
  one.add_ids(request->id());
  one.mutable_boundaries()->Swap(request->mutable_boundaries());
  return Send(std::move(one));
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* FeaturesService::Send(
    absl::StatusOr<v1::GetSamplesRequest> request) {
  return BlockingWriter<grpc::ByteBuffer>::Start([this, request = std::move(request)](auto& call) {
    if (!request.ok()) return ToGrpc(request.status());
    return ToGrpc(
        SendSamples(context_.store, context_.shards, *request,
                    [&](const v1::StreamFeaturesResponse& message, const StatesView& states) {
                      return !context_.draining && call.Write(ToWire(message, states));
                    }));
  });
}

grpc::Status FeaturesService::Acknowledge(grpc::ServerContext*,
                                          const v1::AcknowledgeRequest* request,
                                          v1::AcknowledgeResponse*) {
  const absl::StatusOr<int64_t> job = AcknowledgeSamples(context_.store, *request);
  if (!job.ok()) return ToGrpc(job.status());
  context_.runner.Acknowledged(*job);
  return grpc::Status::OK;
}

}  // namespace statetap
