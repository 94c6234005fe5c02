// The whole server in process, over loopback, before a fake engine.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "server/server.h"
#include "statetap/v1/features.grpc.pb.h"
#include "statetap/v1/jobs.grpc.pb.h"
#include "statetap/v1/model.grpc.pb.h"
#include "tests/support/job_harness.h"

namespace statetap::testing {

class ServerFixture : public ::testing::Test {
 protected:
  void SetUp() override { Start(); }
  void Start() {
    const ServedModel model = FakeModel();
    engine_ = std::make_unique<FakeEngine>(kHidden, model.config.vocab, model.max_seq_len);
    Server::Options options = options_;
    options.data = dir_.path();
    options.http = "127.0.0.1:0";
    options.verify_counts = true;
    options.engine_failed = [this] { ++engine_failures_; };
    auto server = Server::Start(options, model, *engine_);
    ASSERT_OK(server);
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(server_->grpc_address(), grpc::InsecureChannelCredentials());
    jobs_ = v1::Jobs::NewStub(channel_);
    features_ = v1::Features::NewStub(channel_);
    model_ = v1::Model::NewStub(channel_);
  }

  grpc::Status Submit(const v1::JobOptions& options, const std::vector<v1::SampleInput>& samples,
                      v1::Job* job) {
    grpc::ClientContext context;
    auto writer = jobs_->CreateJob(&context, job);
    v1::CreateJobRequest request;
    *request.mutable_options() = options;
    for (const auto& sample : samples) {
      *request.add_samples() = sample;
      if (request.samples_size() < 10) continue;
      writer->Write(request);
      request.Clear();
    }
    if (request.has_options() || request.samples_size() > 0) writer->Write(request);
    writer->WritesDone();
    return writer->Finish();
  }
  v1::Job Watch(const std::string& id, grpc::Status* status = nullptr) {
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_job(id);
    auto reader = jobs_->WatchJob(&context, request);
    v1::Job job;
    while (reader->Read(&job)) {
      const v1::Counts& counts = job.counts();
      EXPECT_EQ(counts.submitted(),
                counts.stored() + counts.rejected() + counts.cancelled() + counts.to_do());
    }
    const grpc::Status ended = reader->Finish();
    if (status != nullptr) *status = ended;
    return job;
  }
  std::vector<v1::SampleInput> Chats(int count) {
    std::vector<v1::SampleInput> samples;
    for (int i = 0; i < count; ++i)
      samples.push_back(ChatSample(fmt::format("c{}", i), fmt::format("Question {}", i)));
    return samples;
  }

  TempDir dir_;
  Server::Options options_;  // what Start does not set itself
  std::atomic<int> engine_failures_{0};
  std::unique_ptr<FakeEngine> engine_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Jobs::Stub> jobs_;
  std::unique_ptr<v1::Features::Stub> features_;
  std::unique_ptr<v1::Model::Stub> model_;
};

}  // namespace statetap::testing
