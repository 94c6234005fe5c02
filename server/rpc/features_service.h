// statetap.v1.Features: decode, call, encode. The stream is asynchronous underneath
// (blocking_bidi.h says why) and its messages go out raw (feature_wire.h), the rest are plain
// calls.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "server/features/feature_stream.h"
#include "server/rpc/service_context.h"
#include "statetap/v1/features.grpc.pb.h"

namespace statetap {

class FeaturesService final
    : public v1::Features::WithRawCallbackMethod_StreamFeatures<v1::Features::Service> {
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
  grpc::Status GetSamples(grpc::ServerContext* call, const v1::GetSamplesRequest* request,
                          grpc::ServerWriter<v1::StreamFeaturesResponse>* writer) override;
  grpc::Status GetSample(grpc::ServerContext* call, const v1::GetSampleRequest* request,
                         grpc::ServerWriter<v1::StreamFeaturesResponse>* writer) override;

  // Ends every stream with UNAVAILABLE; what they had not acknowledged comes again next time.
  void StopStreams();

 private:
  void Register(const std::shared_ptr<FeatureStream>& stream);
  const ServiceContext context_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<FeatureStream>> streams_;
};

}  // namespace statetap
