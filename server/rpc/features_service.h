// statetap.v1.Features: decode, call, encode. What carries states goes out raw (feature_wire.h, by
// blocking_stream.h), the rest are plain calls.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "server/features/feature_stream.h"
#include "server/rpc/service_context.h"
#include "statetap/v1/features.grpc.pb.h"

namespace statetap {

class FeaturesService final
    : public v1::Features::WithRawCallbackMethod_StreamFeatures<
          v1::Features::WithRawCallbackMethod_GetSamples<
              v1::Features::WithRawCallbackMethod_GetSample<v1::Features::Service>>> {
 public:
  explicit FeaturesService(const ServiceContext& context) : context_(context) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StreamFeatures(
      grpc::CallbackServerContext* call) override;
  grpc::Status DescribeStream(grpc::ServerContext* call, const v1::StreamStart* request,
                              v1::StreamDescription* response) override;
  grpc::Status ListShards(grpc::ServerContext* call, const v1::ListShardsRequest* request,
                          v1::ListShardsResponse* response) override;
  grpc::Status GetStatistics(grpc::ServerContext* call, const v1::GetStatisticsRequest* request,
                             v1::Statistics* response) override;
  grpc::Status CheckShards(grpc::ServerContext* call, const v1::ListShardsRequest* request,
                           v1::CheckShardsResponse* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* GetSamples(grpc::CallbackServerContext* call,
                                                         const grpc::ByteBuffer* bytes) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* GetSample(grpc::CallbackServerContext* call,
                                                        const grpc::ByteBuffer* bytes) override;
  grpc::Status Acknowledge(grpc::ServerContext* call, const v1::AcknowledgeRequest* request,
                           v1::AcknowledgeResponse* response) override;

  // Ends every stream with UNAVAILABLE; what they had not acknowledged comes again next time.
  void StopStreams();

 private:
  void Register(const std::shared_ptr<FeatureStream>& stream);
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Send(absl::StatusOr<v1::GetSamplesRequest> request);
  const ServiceContext context_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<FeatureStream>> streams_;
};

}  // namespace statetap
