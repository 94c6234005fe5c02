// statetap.v1.Model: decode, call, encode.
#pragma once

#include "server/rpc/service_context.h"
#include "statetap/v1/model.grpc.pb.h"

namespace statetap {

class ModelService final : public v1::Model::Service {
 public:
  explicit ModelService(const ServiceContext& context) : context_(context) {}

  grpc::Status DescribeModel(grpc::ServerContext* call, const v1::DescribeModelRequest* request,
                             v1::ModelDescription* response) override;
  grpc::Status Render(grpc::ServerContext* call,
                      grpc::ServerReaderWriter<v1::Rendered, v1::RenderRequest>* stream) override;
  grpc::Status Estimate(grpc::ServerContext* call, grpc::ServerReader<v1::EstimateRequest>* reader,
                        v1::EstimateResponse* response) override;
  grpc::Status Generate(grpc::ServerContext* call, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override;

 private:
  const ServiceContext context_;
};

}  // namespace statetap
