// The services, over loopback, before a fake engine.
#include "tests/support/server_fixture.h"

namespace statetap {
namespace {

using testing::ChatSample;
using ::testing::HasSubstr;
using testing::IdsSample;
using ServerTest = testing::ServerFixture;

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

// A stock client takes 4 MiB a message and 8 KiB of status.
TEST_F(ServerTest, PagesAndErrorsFitAStockClient) {
  std::vector<v1::SampleInput> samples;
  for (int i = 0; i < 120; ++i) {
    samples.push_back(IdsSample(fmt::format("s{}", i), {1, 2, 3}));
    samples.back().set_meta_json(fmt::format("{{\"note\":\"{}\"}}", std::string(60'000, 'n')));
  }
  v1::Job job;
  const grpc::Status submitted = Submit({}, samples, &job);
  ASSERT_TRUE(submitted.ok()) << submitted.error_message();
  ASSERT_EQ(Watch(job.id()).counts().stored(), 120);
  v1::ListSamplesRequest list;
  list.set_job(job.id());
  list.set_page_size(10'000);
  std::vector<std::string> ids;
  int pages = 0;
  do {
    grpc::ClientContext context;
    v1::ListSamplesResponse page;
    const grpc::Status status = jobs_->ListSamples(&context, list, &page);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_LE(page.ByteSizeLong(), size_t{4} << 20);
    for (const v1::Sample& sample : page.samples()) ids.push_back(sample.id());
    list.set_page_token(page.next_page_token());
    ++pages;
  } while (!list.page_token().empty());
  EXPECT_GE(pages, 3);
  ASSERT_EQ(ids.size(), 120u);
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(ids[i], fmt::format("s{}", i));

  grpc::ClientContext context;
  v1::GetJobRequest request;
  for (int i = 0; i < 20'000; ++i) *request.mutable_job() += "ü";
  const grpc::Status status = jobs_->GetJob(&context, request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("`statetap list` shows all"));
  EXPECT_THAT(status.error_message(), HasSubstr("bytes left out"));
}

// Only admission decides that a sample is too long, whatever its size.
TEST_F(ServerTest, SampleOf100MBIsRejectedAndTheNextOneStored) {
  std::vector<v1::SampleInput> samples = {IdsSample("good", {1, 2, 3})};
  samples.push_back(IdsSample("large", std::vector<int32_t>(70'000'000, 1)));
  samples.push_back(IdsSample("other", {1, 2, 3}));
  v1::Job job;
  const grpc::Status submitted = Submit({}, samples, &job);
  ASSERT_TRUE(submitted.ok()) << submitted.error_message();
  job = Watch(job.id());
  EXPECT_EQ(job.counts().stored(), 2);
  EXPECT_EQ(job.counts().rejected(), 1);
}

TEST_F(ServerTest, WhatIsInTheOpenShardIsCountedAsCaptured) {
  engine_->faults.step = std::chrono::milliseconds(2);
  v1::Job job;
  ASSERT_TRUE(Submit({}, Chats(100), &job).ok());
  grpc::ClientContext context;
  v1::GetJobRequest request;
  request.set_job(job.id());
  const auto reader = jobs_->WatchJob(&context, request);
  int64_t most = 0;
  while (reader->Read(&job)) {
    const v1::Counts& counts = job.counts();
    EXPECT_LE(counts.captured(), counts.to_do());
    if (counts.stored() == 0) most = std::max(most, counts.captured());
  }
  EXPECT_GT(most, 0);
  EXPECT_EQ(job.counts().stored(), 100);
  EXPECT_EQ(job.counts().captured(), 0);
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

}  // namespace
}  // namespace statetap
