// The whole server in process, over loopback, before a fake engine.
#include "server/server.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <httplib.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "server/config.h"
#include "statetap/v1/features.grpc.pb.h"
#include "statetap/v1/jobs.grpc.pb.h"
#include "statetap/v1/model.grpc.pb.h"
#include "tests/support/job_harness.h"

namespace statetap {
namespace {

using testing::ChatSample;
using testing::FakeEngine;
using testing::FakeModel;
using ::testing::HasSubstr;
using testing::IdsSample;
using testing::StatusIs;

class ServerTest : public ::testing::Test {
 protected:
  void SetUp() override { Start(); }
  void Start() {
    const ServedModel model = FakeModel();
    engine_ = std::make_unique<FakeEngine>(testing::kHidden, model.config.vocab, model.max_seq_len);
    Server::Options options;
    options.data = dir_.path();
    options.http = "127.0.0.1:0";
    options.verify_counts = true;
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

  testing::TempDir dir_;
  std::unique_ptr<FakeEngine> engine_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Jobs::Stub> jobs_;
  std::unique_ptr<v1::Features::Stub> features_;
  std::unique_ptr<v1::Model::Stub> model_;
};

TEST_F(ServerTest, JobFromUploadToStream) {
  v1::Job job;
  std::vector<v1::SampleInput> samples = Chats(25);
  samples[7] = IdsSample("bad", {1, 99999});
  samples[7].set_source_line(8);
  v1::JobOptions options;
  options.set_name("first");
  options.set_mode(v1::JOB_MODE_GENERATE);
  const grpc::Status submitted = Submit(options, samples, &job);
  ASSERT_TRUE(submitted.ok()) << submitted.error_message();
  EXPECT_EQ(job.counts().submitted(), 25);
  EXPECT_EQ(job.options().max_length(), 512);
  job = Watch(job.id());
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(job.counts().stored(), 24);
  EXPECT_THAT(job.layer_outputs(), ::testing::ElementsAre(1, 3, 4, 7));
  EXPECT_FALSE(job.digest().empty());

  v1::ListSamplesRequest list;
  list.set_job("first");
  list.set_page_size(10);
  int listed = 0;
  while (true) {
    grpc::ClientContext context;
    v1::ListSamplesResponse page;
    ASSERT_TRUE(jobs_->ListSamples(&context, list, &page).ok());
    for (const auto& sample : page.samples()) {
      EXPECT_GT(sample.tokens(), sample.prompt_tokens());
      EXPECT_EQ(sample.supervised_tokens(), sample.tokens() - sample.prompt_tokens());
      EXPECT_EQ(sample.shard(), "shard-000001.h5");
    }
    listed += page.samples_size();
    if (page.next_page_token().empty()) break;
    list.set_page_token(page.next_page_token());
  }
  EXPECT_EQ(listed, 24);
  {
    grpc::ClientContext context;
    v1::ListRejectedResponse rejected;
    list.clear_page_token();
    ASSERT_TRUE(jobs_->ListRejected(&context, list, &rejected).ok());
    ASSERT_EQ(rejected.rejected_size(), 1);
    EXPECT_EQ(rejected.rejected(0).reason(), "token_id");
    EXPECT_EQ(rejected.rejected(0).source_line(), 8);
    EXPECT_FALSE(rejected.rejected(0).has_layer());
    EXPECT_EQ(rejected.rejected(0).token(), 1);
  }
  for (int round = 0; round < 2; ++round) {
    grpc::ClientContext context;
    auto stream = features_->StreamFeatures(&context);
    v1::StreamFeaturesRequest request;
    request.mutable_start()->set_job("first");
    stream->Write(request);
    v1::StreamFeaturesResponse response;
    int received = 0;
    while (stream->Read(&response)) {
      if (response.has_sample()) {
        ++received;
        v1::StreamFeaturesRequest ack;
        ack.mutable_ack()->set_delivery(response.sample().delivery());
        stream->Write(ack);
      }
    }
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(received, round == 0 ? 24 : 0);
  }
  {
    grpc::ClientContext context;
    v1::GetSampleRequest request;
    request.set_job(job.id());
    request.set_id("c3");
    request.add_boundaries(8);
    auto reader = features_->GetSample(&context, request);
    v1::StreamFeaturesResponse response;
    std::string states;
    int tokens = 0;
    while (reader->Read(&response)) {
      if (response.has_sample()) tokens = response.sample().input_ids_size();
      if (response.has_data()) states += response.data().states();
    }
    EXPECT_TRUE(reader->Finish().ok());
    EXPECT_GT(tokens, 0);
    EXPECT_EQ(states.size(), static_cast<size_t>(tokens * testing::kHidden * 2));
  }
  {
    grpc::ClientContext context;
    v1::Statistics statistics;
    v1::GetStatisticsRequest request;
    request.set_job("first");
    request.set_channels(true);
    ASSERT_TRUE(features_->GetStatistics(&context, request, &statistics).ok());
    EXPECT_EQ(statistics.samples(), 24);
    ASSERT_EQ(statistics.boundaries_size(), 4);
    EXPECT_EQ(statistics.boundaries(0).count(), job.tokens());
    EXPECT_EQ(statistics.boundaries(0).channel_mean_size(), testing::kHidden);
  }
  {
    grpc::ClientContext context;
    v1::CheckShardsResponse check;
    v1::ListShardsRequest request;
    request.set_job("first");
    ASSERT_TRUE(features_->CheckShards(&context, request, &check).ok());
    ASSERT_EQ(check.results_size(), 1);
    EXPECT_TRUE(check.results(0).ok()) << check.results(0).message();
  }
}

TEST_F(ServerTest, BrokenUploadLeavesNothing) {
  {
    grpc::ClientContext context;
    v1::Job job;
    auto writer = jobs_->CreateJob(&context, &job);
    v1::CreateJobRequest request;
    request.mutable_options();
    for (const auto& sample : Chats(5)) *request.add_samples() = sample;
    writer->Write(request);
    context.TryCancel();
    EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  grpc::ClientContext context;
  v1::ListJobsResponse list;
  ASSERT_TRUE(jobs_->ListJobs(&context, {}, &list).ok());
  EXPECT_EQ(list.jobs_size(), 0);
}

TEST_F(ServerTest, ErrorsCarryCodeFieldAndRemedy) {
  v1::Job job;
  v1::JobOptions options;
  options.add_taps(99);
  grpc::Status status = Submit(options, Chats(1), &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("options.taps: 99"));
  status = Submit({}, {}, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  std::vector<v1::SampleInput> twice = {ChatSample("a", "x"), ChatSample("a", "y")};
  twice[0].set_source_line(3);
  twice[1].set_source_line(4);
  status = Submit({}, twice, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("lines 3 and 4"));
  {
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_job("nobody");
    status = jobs_->GetJob(&context, request, &job);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_THAT(status.error_message(), HasSubstr("nobody"));
  }
  ASSERT_TRUE(Submit({}, Chats(2), &job).ok());
  Watch(job.id());
  {
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_job(job.id());
    status = jobs_->CancelJob(&context, request, &job);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  }
  for (const std::string token : {"abc", "12x"}) {
    grpc::ClientContext context;
    v1::ListSamplesRequest request;
    request.set_job(job.id());
    request.set_page_token(token);
    v1::ListSamplesResponse response;
    EXPECT_EQ(jobs_->ListSamples(&context, request, &response).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
  }
  {
    grpc::ClientContext context;
    auto stream = features_->StreamFeatures(&context);
    v1::StreamFeaturesRequest request;
    request.mutable_start()->set_job("nobody");
    stream->Write(request);
    v1::StreamFeaturesResponse response;
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  }
  {
    grpc::ClientContext context;
    auto stream = features_->StreamFeatures(&context);
    v1::StreamFeaturesRequest request;
    request.mutable_start()->set_job(job.id());
    stream->Write(request);
    request.mutable_ack()->set_delivery(1000);
    stream->Write(request);
    v1::StreamFeaturesResponse response;
    while (stream->Read(&response)) {
    }
    stream->WritesDone();
    // Before or after the last sample went out: an error, or a stream that ended.
    const auto code = stream->Finish().error_code();
    EXPECT_TRUE(code == grpc::StatusCode::OUT_OF_RANGE || code == grpc::StatusCode::OK) << code;
  }
}

TEST_F(ServerTest, CancelStopsARunningJob) {
  engine_->faults.step = std::chrono::milliseconds(2);
  v1::Job job;
  ASSERT_TRUE(Submit({}, Chats(200), &job).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  grpc::ClientContext context;
  v1::GetJobRequest request;
  request.set_job(job.id());
  const grpc::Status status = jobs_->CancelJob(&context, request, &job);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(job.counts().to_do(), 0);
  EXPECT_GT(job.counts().cancelled(), 0);
  EXPECT_EQ(Watch(job.id()).counts().submitted(), 200);
}

TEST_F(ServerTest, RendersInOrderAndRefusesOne) {
  grpc::ClientContext context;
  auto stream = model_->Render(&context);
  v1::RenderRequest request;
  request.mutable_options()->set_mode(v1::JOB_MODE_GENERATE);
  *request.mutable_sample() = ChatSample("a", "Hello <|im_end|>");
  stream->Write(request);
  request.clear_options();
  *request.mutable_sample() = IdsSample("b", {5000});
  stream->Write(request);
  *request.mutable_sample() = IdsSample("c", std::vector<int32_t>(2000, 7));  // no length limit
  stream->Write(request);
  stream->WritesDone();
  std::vector<v1::Rendered> answers;
  v1::Rendered rendered;
  while (stream->Read(&rendered)) answers.push_back(rendered);
  ASSERT_TRUE(stream->Finish().ok());
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_EQ(answers[0].id(), "a");
  EXPECT_EQ(answers[0].input_ids_size(), static_cast<int>(answers[0].loss_mask().size()));
  EXPECT_THAT(answers[0].text(), HasSubstr("<think>"));
  // The user's text did not become structure: one <|im_end|> of the user's turn.
  EXPECT_EQ(std::count(answers[0].input_ids().begin(), answers[0].input_ids().end(), 2050),
            std::count(answers[0].loss_mask().begin(), answers[0].loss_mask().end(), '\1') + 1);
  EXPECT_THAT(answers[1].error(), HasSubstr("5000"));
  EXPECT_EQ(answers[2].input_ids_size(), 2000);
}

TEST_F(ServerTest, GeneratesOneAnswer) {
  grpc::ClientContext context;
  v1::GenerateRequest request;
  *request.mutable_sample() = ChatSample("", "Hello");
  request.mutable_options()->set_max_new_tokens(6);
  request.mutable_options()->set_thinking(false);
  auto reader = model_->Generate(&context, request);
  v1::GenerateResponse response;
  int tokens = 0;
  while (reader->Read(&response)) tokens += response.token() >= 0 ? 1 : 0;
  ASSERT_TRUE(reader->Finish().ok());
  EXPECT_EQ(response.tokens(), tokens);
  EXPECT_GT(tokens, 0);
  EXPECT_LE(tokens, 6);
  EXPECT_GT(response.prompt_tokens(), 2);
  EXPECT_FALSE(response.finish_reason().empty());
}

TEST_F(ServerTest, DescribesTheModel) {
  grpc::ClientContext context;
  v1::ModelDescription description;
  ASSERT_TRUE(model_->DescribeModel(&context, {}, &description).ok());
  EXPECT_EQ(description.layers(), 8);
  EXPECT_THAT(description.taps(), ::testing::ElementsAre(2, 4, 5));
  EXPECT_THAT(description.tap_layer_outputs(), ::testing::ElementsAre(1, 3, 4));
  EXPECT_EQ(description.template_(), "kimi-k2.5");
  EXPECT_EQ(description.max_seq_len(), 512);
}

TEST_F(ServerTest, DrainFinishesWhatRunsAndARestartGoesOn) {
  engine_->faults.step = std::chrono::milliseconds(1);
  v1::Job job;
  ASSERT_TRUE(Submit({}, Chats(120), &job).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(80));
  server_->Drain(std::chrono::seconds(20));
  const JobRecord before = [&] {
    const auto store = JobStore::Open(dir_ / "statetap.db", {.verify_counts = true});
    return *(*store)->GetJob(job.id());
  }();
  EXPECT_GT(before.counts.stored, 0);
  EXPECT_GT(before.counts.to_do, 0);
  server_.reset();
  Start();
  EXPECT_EQ(Watch(job.id()).counts().stored(), 120);
}

TEST_F(ServerTest, WatchersAndStreamsEndWhenTheServerDrains) {
  engine_->faults.step = std::chrono::milliseconds(5);
  v1::Job job;
  ASSERT_TRUE(Submit({}, Chats(400), &job).ok());
  grpc::Status watched;
  std::thread watcher([&] { Watch(job.id(), &watched); });
  grpc::ClientContext context;
  auto stream = features_->StreamFeatures(&context);
  v1::StreamFeaturesRequest request;
  request.mutable_start()->set_job(job.id());
  request.mutable_start()->set_follow(true);
  stream->Write(request);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto begun = std::chrono::steady_clock::now();
  server_->Drain(std::chrono::seconds(0));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(5));
  watcher.join();
  EXPECT_EQ(watched.error_code(), grpc::StatusCode::UNAVAILABLE);
  v1::StreamFeaturesResponse response;
  while (stream->Read(&response)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServerTest, QuietClientThatPingsOftenIsNotCut) {
  engine_->faults.step = std::chrono::milliseconds(20);
  v1::Job job;
  ASSERT_TRUE(Submit({}, Chats(100), &job).ok());
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 200);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel = grpc::CreateCustomChannel(server_->grpc_address(),
                                                 grpc::InsecureChannelCredentials(), arguments);
  const auto features = v1::Features::NewStub(channel);
  grpc::ClientContext context;
  auto stream = features->StreamFeatures(&context);
  v1::StreamFeaturesRequest request;
  request.mutable_start()->set_job(job.id());
  request.mutable_start()->set_follow(true);
  stream->Write(request);
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // a dozen pings, no data
  EXPECT_EQ(channel->GetState(false), GRPC_CHANNEL_READY);
  grpc::ClientContext cancel;
  v1::GetJobRequest which;
  which.set_job(job.id());
  ASSERT_TRUE(jobs_->CancelJob(&cancel, which, &job).ok());
  stream->WritesDone();
  v1::StreamFeaturesResponse response;
  while (stream->Read(&response)) {
  }
  const grpc::Status status = stream->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(ServerTest, StandardHealthAndReflectionAnswer) {
  // As any generic client: bytes by hand. grpc.health.v1: field 1 of the answer is the status.
  grpc::GenericStub stub(channel_);
  const auto call = [&](const std::string& method, const std::string& request) {
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const grpc::Slice slice(request);
    const grpc::ByteBuffer bytes(&slice, 1);
    auto reader = stub.PrepareUnaryCall(&context, method, bytes, &queue);
    reader->StartCall();
    grpc::ByteBuffer answer;
    grpc::Status status;
    reader->Finish(&answer, &status, nullptr);
    void* tag;
    bool ok;
    queue.Next(&tag, &ok);
    EXPECT_TRUE(status.ok()) << method << ": " << status.error_message();
    grpc::Slice whole;
    return answer.DumpToSingleSlice(&whole).ok()
               ? std::string(reinterpret_cast<const char*>(whole.begin()), whole.size())
               : std::string();
  };
  const std::string serving = "\x08\x01";
  EXPECT_EQ(call("/grpc.health.v1.Health/Check", ""), serving);
  EXPECT_EQ(call("/grpc.health.v1.Health/Check", "\x0a\x10statetap.v1.Jobs"), serving);
  // list_services is field 7 of the request.
  const std::string services = call(
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", std::string("\x3a\x00", 2));
  EXPECT_THAT(services, HasSubstr("statetap.v1.Features"));
}

TEST_F(ServerTest, FailedEngineIsUnavailable) {
  engine_->faults.fail = true;
  v1::Job job;
  Submit({}, Chats(1), &job).ok();
  for (int i = 0; i < 500 && server_->runner().engine_status().ok(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const grpc::Status status = Submit({}, Chats(2), &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("a rank has failed"));
  httplib::Client client("http://" + server_->http_address());
  const auto health = client.Get("/healthz");
  ASSERT_TRUE(health);
  EXPECT_EQ(health->status, 503);
}

TEST_F(ServerTest, HttpTellsHealthAndMetrics) {
  const auto where = server_->http_address();
  httplib::Client client("http://" + where);
  const auto health = client.Get("/healthz");
  ASSERT_TRUE(health);
  EXPECT_EQ(health->status, 200);
  v1::Job job;
  ASSERT_TRUE(Submit({}, Chats(3), &job).ok());
  Watch(job.id());
  const auto metrics = client.Get("/metrics");
  ASSERT_TRUE(metrics);
  EXPECT_THAT(metrics->body, HasSubstr("statetap_samples{state=\"stored\"} 3"));
  EXPECT_THAT(metrics->body, HasSubstr("statetap_engine_up 1"));
}

TEST_F(ServerTest, TakenPortsAreRefused) {
  testing::TempDir other;
  Server::Options options;
  options.data = other.path();
  options.listen = server_->grpc_address();
  EXPECT_THAT(Server::Start(options, FakeModel(), *engine_).status(),
              StatusIs(absl::StatusCode::kAlreadyExists, options.listen));
  options.listen = "127.0.0.1:0";
  options.http = server_->http_address();
  EXPECT_THAT(Server::Start(options, FakeModel(), *engine_).status(),
              StatusIs(absl::StatusCode::kAlreadyExists, options.http));
}

TEST(DataFolderLockTest, SecondServerIsToldWhoHasIt) {
  testing::TempDir dir;
  {
    ASSERT_OK_AND_ASSIGN(const auto lock, DataFolderLock::Acquire(dir.path()));
    EXPECT_THAT(
        DataFolderLock::Acquire(dir.path()).status(),
        StatusIs(absl::StatusCode::kFailedPrecondition, fmt::format("process id {}", getpid())));
  }
  EXPECT_OK(DataFolderLock::Acquire(dir.path()));
}

ParsedArguments Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "statetapd");
  return ParseArguments(static_cast<int>(arguments.size()), arguments.data());
}

TEST(ServerConfigTest, FlagsAndFileGiveTheSame) {
  testing::TempDir dir;
  std::ofstream(dir / "config") << "model = \"m\"\ndata = \"d\"\nmax-batch-tokens = 77\ntp = 2\n";
  const std::string file = dir / "config";
  const ParsedArguments parsed = Parse({"--config", file.c_str(), "--kv-cache-gib", "0.5"});
  ASSERT_TRUE(parsed.config) << parsed.text;
  EXPECT_EQ(parsed.config->model, "m");
  EXPECT_EQ(parsed.config->engine.max_batch_tokens, 77);
  EXPECT_EQ(parsed.config->engine.ranks, 2);
  EXPECT_EQ(parsed.config->engine.kv_cache_bytes, int64_t{1} << 29);
  const ParsedArguments flags = Parse(
      {"--model", "m", "--data", "d", "--shards", "a,b", "--http", "", "--experts", "tensor"});
  ASSERT_TRUE(flags.config) << flags.text;
  EXPECT_EQ(flags.config->shards.size(), 2u);
  EXPECT_TRUE(flags.config->http.empty());
  EXPECT_EQ(flags.config->engine.experts, EngineOptions::Experts::kTensor);
}

TEST(ServerConfigTest, WrongUsageExitsWithTwoAndSaysWhatIsNear) {
  const auto wrong = [](std::vector<const char*> arguments, std::string_view part) {
    const ParsedArguments parsed = Parse(std::move(arguments));
    EXPECT_FALSE(parsed.config);
    EXPECT_EQ(parsed.exit_code, 2);
    EXPECT_THAT(parsed.text, HasSubstr(std::string(part)));
  };
  wrong({"--modle", "m", "--data", "d"}, "did you mean --model?");
  wrong({"--model", "m", "--data", "d", "--max-batch-token", "4"}, "--max-batch-tokens?");
  wrong({"--model", "m"}, "--data");
  wrong({"--model", "m", "--data", "d", "--tp", "0"}, "--tp");
  wrong({"--model", "m", "--data", "d", "--listen", "nowhere"}, "--listen");
  wrong({"--model", "m", "--data", "d", "--backend", "tpu"}, "--backend");
  EXPECT_EQ(Parse({"--help"}).exit_code, 0);
  EXPECT_THAT(Parse({"--help"}).text, HasSubstr("--drain-seconds"));
  EXPECT_THAT(FindModel("org/none").status(), StatusIs(absl::StatusCode::kNotFound, "downloaded"));
}

}  // namespace
}  // namespace statetap
