// The server as an operator meets it: draining, health, ports, clients that ping, a failed engine.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <httplib.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <future>
#include <set>

#include "extractor/shard/shard_reader.h"
#include "tests/support/proxy.h"
#include "tests/support/server_fixture.h"

namespace statetap {
namespace {

using ::testing::AllOf;
using testing::FakeModel;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::StatusIs;
using ServerLifeTest = testing::ServerFixture;

TEST_F(ServerLifeTest, DrainFinishesWhatRunsAndARestartGoesOn) {
  engine_->faults.step = std::chrono::milliseconds(1);
  v1::Job job;
  ASSERT_TRUE(Submit({}, Chats(120), &job).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(80));
  EXPECT_TRUE(server_->Drain(std::chrono::seconds(20)));
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

TEST_F(ServerLifeTest, DrainLeavesAStepThatDoesNotEndAndARestartGoesOn) {
  v1::JobOptions options;
  options.set_shard_bytes(1 << 20);
  v1::Job job;
  engine_->faults.step = std::chrono::milliseconds(1);
  ASSERT_TRUE(Submit(options, Chats(400), &job).ok());
  v1::GetJobRequest which;
  which.set_job(job.id());
  for (int i = 0; i < 30000 && job.counts().captured() == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    grpc::ClientContext context;
    ASSERT_TRUE(jobs_->GetJob(&context, which, &job).ok());
  }
  engine_->faults.hang = true;
  for (int i = 0; i < 30000 && !engine_->hangs; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // An answer that is asked for meanwhile, and someone who waits for it on either port.
  httplib::Client http("http://" + server_->http_address());
  std::thread asks([&] { http.Post("/v1/completions", R"({"prompt": "a"})", "application/json"); });
  std::thread generates([&] {
    grpc::ClientContext context;
    v1::GenerateRequest request;
    *request.mutable_sample() = Chats(1)[0];
    v1::GenerateResponse response;
    const auto reader = model_->Generate(&context, request);
    while (reader->Read(&response)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  });
  for (int i = 0; i < 30000 && server_->runner().load().waiting_answers < 2; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  auto drained = std::async(std::launch::async, [&] { return server_->Drain({}); });
  EXPECT_EQ(drained.wait_for(std::chrono::minutes(1)), std::future_status::ready);
  {  // what was complete is stored, and nothing else is there: the process may end now
    ASSERT_OK_AND_ASSIGN(const auto store,
                         JobStore::Open(dir_ / "statetap.db", {.verify_counts = true}));
    ASSERT_OK_AND_ASSIGN(const JobRecord left, store->GetJob(job.id()));
    EXPECT_GT(left.counts.stored, 0);
    EXPECT_EQ(left.counts.stored + left.counts.to_do, 400);
    ASSERT_OK_AND_ASSIGN(const auto shards, store->Shards(left.key));
    const std::filesystem::directory_iterator files(job.shards_path());
    EXPECT_EQ(std::distance(begin(files), end(files)), std::ssize(shards));
  }
  engine_->faults.hang = false;
  EXPECT_FALSE(drained.get());
  generates.join();
  server_.reset();  // waits for the step
  asks.join();
  Start();
  EXPECT_EQ(Watch(job.id()).counts().stored(), 400);
}

TEST_F(ServerLifeTest, WatchersAndStreamsEndWhenTheServerDrains) {
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

TEST_F(ServerLifeTest, QuietClientThatPingsOftenIsNotCut) {
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

// As a machine does that loses its power: the samples that it holds go to others of its group.
TEST_F(ServerLifeTest, AReaderThatVanishedWithoutAWordGivesBack) {
  constexpr int kSamples = 8;
  server_.reset();
  options_.keepalive = std::chrono::seconds(1);
  options_.keepalive_timeout = std::chrono::seconds(5);
  Start();
  v1::Job job;
  ASSERT_TRUE(Submit({}, Chats(kSamples), &job).ok());
  Watch(job.id());
  v1::StreamFeaturesRequest request;
  request.mutable_start()->set_job(job.id());
  request.mutable_start()->set_group("g");
  request.mutable_start()->set_credit_bytes(1);  // one sample, then the server waits
  testing::Proxy proxy(server_->grpc_address());
  const auto features = v1::Features::NewStub(
      grpc::CreateChannel(proxy.address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto vanishing = features->StreamFeatures(&context);
  vanishing->Write(request);
  std::atomic<int> came = 0;
  auto reading = std::async(std::launch::async, [&] {
    v1::StreamFeaturesResponse message;
    while (vanishing->Read(&message)) came += message.has_sample() ? 1 : 0;
  });
  for (int i = 0; i < 30000 && came == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // Several pings, which it answers.
  EXPECT_EQ(reading.wait_for(std::chrono::seconds(4)), std::future_status::timeout);
  proxy.Freeze();
  // Others of the group take what it does not hold, and in the end all.
  request.mutable_start()->set_credit_bytes(1 << 30);
  const auto take = [&] {
    grpc::ClientContext each;
    const auto stream = features_->StreamFeatures(&each);
    stream->Write(request);
    v1::StreamFeaturesResponse message;
    v1::StreamFeaturesRequest ack;
    int samples = 0;
    while (stream->Read(&message) && !message.has_end()) {
      if (!message.has_sample()) continue;
      ++samples;
      ack.mutable_ack()->set_delivery(message.sample().delivery());
    }
    if (samples > 0) stream->Write(ack);
    stream->WritesDone();
    while (stream->Read(&message)) {
    }
    EXPECT_TRUE(stream->Finish().ok());
    return samples;
  };
  int taken = take();
  EXPECT_LT(taken, kSamples);
  for (int i = 0; i < 600 && taken < kSamples; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    taken += take();
  }
  EXPECT_EQ(taken, kSamples);
  context.TryCancel();
  reading.wait();
  vanishing->Finish();
}

// As any generic client: bytes by hand.
std::string Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                 const std::string& request) {
  grpc::GenericStub stub(channel);
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
}

// grpc.health.v1: field 1 of the answer is the status.
constexpr std::string_view kServing = "\x08\x01", kNotServing = "\x08\x02";

TEST_F(ServerLifeTest, StandardHealthAndReflectionAnswer) {
  const auto call = [&](const std::string& method, const std::string& request) {
    return Call(channel_, method, request);
  };
  EXPECT_EQ(call("/grpc.health.v1.Health/Check", ""), kServing);
  EXPECT_EQ(call("/grpc.health.v1.Health/Check", "\x0a\x10statetap.v1.Jobs"), kServing);
  // list_services is field 7 of the request.
  const std::string services = call(
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", std::string("\x3a\x00", 2));
  EXPECT_THAT(services, HasSubstr("statetap.v1.Features"));
}

TEST_F(ServerLifeTest, FailedEngineIsUnavailable) {
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
  const auto grpc_health = [&](const std::string& service) {
    for (int i = 0; i < 500; ++i) {  // flips a moment after the status
      if (Call(channel_, "/grpc.health.v1.Health/Check", service) == kNotServing) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  };
  EXPECT_TRUE(grpc_health(""));
  for (int i = 0; i < 500 && engine_failures_ == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(engine_failures_, 1);
  EXPECT_TRUE(grpc_health("\x0a\x10statetap.v1.Jobs"));
}

// Fault class 31: the engine fails in the middle of a job. The server says so, keeps what is
// stored, and a restart goes on.
TEST_F(ServerLifeTest, ARestartGoesOnAfterTheEngineFailed) {
  engine_->faults.step = std::chrono::milliseconds(1);
  v1::JobOptions options;
  options.set_shard_bytes(int64_t{1} << 20);
  v1::Job job;
  ASSERT_TRUE(Submit(options, Chats(400), &job).ok());
  v1::GetJobRequest which;
  which.set_job(job.id());
  const auto stored = [&] {
    grpc::ClientContext context;
    EXPECT_TRUE(jobs_->GetJob(&context, which, &job).ok());
    return job.counts().stored();
  };
  for (int i = 0; i < 2000 && engine_->steps < 60; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  engine_->faults.fail = true;
  for (int i = 0; i < 500 && server_->runner().engine_status().ok(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  int64_t before = stored();
  for (int i = 0; i < 500 && job.state() != v1::JOB_STATE_WAITING; ++i) {  // noted a moment later
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    before = stored();
  }
  EXPECT_LT(before, 400);
  EXPECT_EQ(job.state(), v1::JOB_STATE_WAITING);
  EXPECT_THAT(job.message(), HasSubstr("a rank has failed"));
  server_.reset();
  Start();
  EXPECT_EQ(Watch(job.id()).counts().stored(), 400);
}

TEST_F(ServerLifeTest, HttpTellsHealthAndMetrics) {
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

// The story of docs/operate.md, "A second disk, and one that fails", up to the last one.
TEST_F(ServerLifeTest, SaysWhichShardFolderFailedAndWhereAJobsShardsLie) {
  const testing::TempDir disks;
  server_.reset();
  options_.shards = {disks / "a", disks / "b"};
  Start();
  httplib::Client client("http://" + server_->http_address());
  const auto get = [&](const char* path) {
    const auto answer = client.Get(path);
    EXPECT_TRUE(answer && answer->status == 200) << path;
    return answer ? answer->body : std::string();
  };
  const auto texts = [](int count) {
    std::vector<v1::SampleInput> samples;
    for (int i = 0; i < count; ++i) {
      samples.push_back(
          testing::IdsSample(fmt::format("s{}", i), std::vector<int32_t>(250, i + 1)));
    }
    return samples;
  };
  const auto paths = [](const v1::Job& job) {
    return std::vector<std::string>(job.shards_paths().begin(), job.shards_paths().end());
  };
  v1::JobOptions options;
  options.set_mode(v1::JOB_MODE_PREFILL);
  options.set_shard_bytes(1 << 20);  // 33 samples
  EXPECT_EQ(get("/healthz"), "ok\n");

  // The folder that has its first shard is lost under a running job, which goes on in the other.
  engine_->faults.step = std::chrono::milliseconds(1);
  v1::Job job;
  ASSERT_TRUE(Submit(options, texts(400), &job).ok());
  for (int i = 0; i < 30000 && job.counts().stored() == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    grpc::ClientContext context;
    v1::GetJobRequest which;
    which.set_job(job.id());
    ASSERT_TRUE(jobs_->GetJob(&context, which, &job).ok());
  }
  const std::string here = job.shards_path();
  const auto one = std::filesystem::path(here).parent_path();
  const auto two = one == disks / "a" ? disks / "b" : disks / "a";
  const std::string there = (two / job.id()).string();
  std::filesystem::rename(here, one / "lost");
  std::ofstream(here) << "in the way";
  job = Watch(job.id());
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.message();
  EXPECT_EQ(paths(job), (std::vector{here, there}));
  EXPECT_EQ(job.shards_path(), here);
  const std::string out_of_use =
      fmt::format("ok; shard folder {} is out of use until a restart: ", one.string());
  EXPECT_THAT(get("/healthz"), AllOf(HasSubstr(out_of_use), HasSubstr(here)));
  EXPECT_THAT(get("/metrics"),
              HasSubstr(fmt::format("shard_folder_up{{path=\"{}\"}} 0", one.string())));
  EXPECT_THAT(get("/metrics"),
              HasSubstr(fmt::format("shard_folder_up{{path=\"{}\"}} 1", two.string())));
  // With the folder back, every sample is found there or here.
  std::filesystem::remove(here);
  std::filesystem::rename(one / "lost", here);
  std::set<std::string> ids;
  for (const std::string& path : paths(job)) {
    for (const auto& file : std::filesystem::directory_iterator(path)) {
      if (file.path().extension() == ".partial") continue;  // was open as the folder went
      ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(file.path()));
      for (const SampleEntry& entry : reader->samples()) ids.insert(entry.id);
    }
  }
  EXPECT_EQ(ids.size(), 400u);

  // The second is the last in use: it is named, and tried all the same.
  std::filesystem::rename(two, disks / "lost");
  std::ofstream(two) << "in the way";
  ASSERT_TRUE(Submit(options, texts(1), &job).ok());
  job = Watch(job.id());
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  const std::string cannot = fmt::format("; shard folder {} cannot be written: ", two.string());
  EXPECT_THAT(get("/healthz"), AllOf(HasSubstr(out_of_use), HasSubstr(cannot)));
  EXPECT_THAT(get("/metrics"),
              HasSubstr(fmt::format("shard_folder_up{{path=\"{}\"}} 0", two.string())));
  std::filesystem::remove(two);
  std::filesystem::rename(disks / "lost", two);
  ASSERT_TRUE(Submit(options, texts(2), &job).ok());
  job = Watch(job.id());
  EXPECT_EQ(job.counts().stored(), 2);
  EXPECT_EQ(paths(job), std::vector{(two / job.id()).string()});
  EXPECT_THAT(get("/healthz"), AllOf(HasSubstr(out_of_use), Not(HasSubstr(cannot))));
}

// Its disk is not mounted, or a file lies in its place.
TEST_F(ServerLifeTest, AShardFolderThatIsLostBeforeTheStartIsSaidAtTheStart) {
  const testing::TempDir disks;
  const auto get = [&](const char* path) {
    httplib::Client client("http://" + server_->http_address());
    const auto answer = client.Get(path);
    EXPECT_TRUE(answer && answer->status == 200) << path;
    return answer ? answer->body : std::string();
  };
  const auto up = [](const std::filesystem::path& folder, int value) {
    return HasSubstr(fmt::format("shard_folder_up{{path=\"{}\"}} {}", folder.string(), value));
  };
  server_.reset();
  options_.shards = {disks / "a", disks / "b"};
  Start();
  EXPECT_EQ(get("/healthz"), "ok\n");  // neither is there before its first shard
  v1::Job job;
  ASSERT_TRUE(Submit({}, Chats(3), &job).ok());
  const std::filesystem::path first = std::filesystem::path(Watch(job.id()).shards_path());
  const std::filesystem::path one = first.parent_path();
  const std::filesystem::path two = one == disks / "a" ? disks / "b" : disks / "a";
  enum Place { kNothing, kEmpty, kFile, kSound };
  for (const bool alone : {false, true}) {
    for (const Place place : {kNothing, kEmpty, kFile, kSound}) {
      server_.reset();
      std::filesystem::rename(one, disks / "lost");
      if (place == kEmpty) std::filesystem::create_directory(one);
      if (place == kFile) std::ofstream(one) << "in the way";
      if (place == kSound) std::filesystem::rename(disks / "lost", one);
      options_.shards = {one};
      if (!alone) options_.shards.push_back(two);
      Start();
      if (place == kSound) {
        EXPECT_EQ(get("/healthz"), "ok\n");
        EXPECT_THAT(get("/metrics"), up(one, 1));
        continue;
      }
      const std::string said = get("/healthz");
      EXPECT_THAT(said, HasSubstr(fmt::format("ok; shard folder {} ", one.string())));
      EXPECT_THAT(said, HasSubstr(place == kFile ? "is a file" : first.string()));
      EXPECT_THAT(said, HasSubstr("start the server again"));
      EXPECT_THAT(get("/metrics"), up(one, 0));
      // The others are used; the last one is tried all the same.
      v1::JobOptions options;
      options.set_name(fmt::format("{} {}", alone, static_cast<int>(place)));
      v1::Job other;
      ASSERT_TRUE(Submit(options, Chats(2), &other).ok());
      other = Watch(other.id());
      const bool failed = alone && place == kFile;
      EXPECT_EQ(other.state(), failed ? v1::JOB_STATE_FAILED : v1::JOB_STATE_SUCCEEDED);
      if (!alone) {
        EXPECT_EQ(other.shards_path(), (two / other.id()).string());
        EXPECT_THAT(get("/metrics"), up(two, 1));
      }
      // What is missing is not back with the next shard.
      EXPECT_THAT(get("/metrics"), up(one, 0));
      if (alone && !failed) {  // its shards go with the folder that they are in
        grpc::ClientContext context;
        v1::GetJobRequest which;
        which.set_job(other.id());
        v1::DeleteJobResponse gone;
        EXPECT_TRUE(jobs_->DeleteJob(&context, which, &gone).ok());
      }
      server_.reset();
      std::filesystem::remove_all(one);
      std::filesystem::rename(disks / "lost", one);
    }
  }
}

TEST_F(ServerLifeTest, PagesShowJobsSamplesAndRejects) {
  v1::SampleInput hostile = testing::ChatSample("<script>alert(1)</script>", "");
  const v1::SampleInput refused = testing::IdsSample("refused", {1 << 30});
  v1::JobOptions options;
  options.set_name("a <i>job</i>");
  options.set_mode(v1::JOB_MODE_PREFILL);
  const int layers = FakeModel().config.num_layers;
  options.add_taps(1);
  options.add_taps(layers);  // the final boundary, by name: once all the same
  hostile.mutable_chat()->set_messages_json(
      R"([{"role":"user","content":"<b>bold</b>"},{"role":"assistant","content":"<script>"}])");
  v1::Job job;
  ASSERT_TRUE(Submit(options, {hostile, refused}, &job).ok());
  Watch(job.id());

  httplib::Client client("http://" + server_->http_address());
  const auto page = [&](const std::string& path) {
    const auto answer = client.Get(path.c_str());
    EXPECT_TRUE(answer);
    if (!answer) return std::string();
    EXPECT_THAT(answer->get_header_value("Content-Security-Policy"),
                HasSubstr("script-src 'self'"));
    EXPECT_EQ(answer->status, 200) << path;
    // What people wrote never becomes a part of the page.
    EXPECT_THAT(answer->body, Not(HasSubstr("<script>alert")));
    EXPECT_THAT(answer->body, Not(HasSubstr("<b>bold")));
    EXPECT_THAT(answer->body, Not(HasSubstr("<i>job")));
    return answer->body;
  };
  EXPECT_THAT(page("/"), HasSubstr("a &lt;i&gt;job&lt;/i&gt;"));
  const std::string shown = page("/job?id=" + job.id());
  EXPECT_THAT(shown, HasSubstr("2 submitted = 1 stored + 1 rejected"));
  EXPECT_THAT(shown, HasSubstr(fmt::format("1, {} (outputs of layers 0, {})", layers, layers - 1)));
  EXPECT_THAT(shown, HasSubstr("<svg"));
  EXPECT_THAT(shown, HasSubstr("refused"));
  EXPECT_THAT(page("/samples?job=" + job.id()), HasSubstr("&lt;script&gt;alert(1)"));
  EXPECT_THAT(page("/sample?job=" + job.id() + "&id=%3Cscript%3Ealert(1)%3C/script%3E"),
              HasSubstr("class=\"s\""));
  // Started without a token it only reads, whatever is sent along.
  const httplib::Headers bearer = {{"Authorization", "Bearer "}};
  const auto act = client.Post(
      "/act", bearer, "job=" + job.id() + "&do=cancel&key=", "application/x-www-form-urlencoded");
  ASSERT_TRUE(act);
  EXPECT_EQ(act->status, 403);
  EXPECT_THAT(act->body, HasSubstr("without --http-token"));
  EXPECT_THAT(page("/job?id=" + job.id()), Not(HasSubstr("<form")));
  for (const char* missing : {"/nothing", "/job?id=none", "/sample?job=none&id=x"}) {
    const auto answer = client.Get(missing);
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->status, 404) << missing;
  }
}

TEST_F(ServerLifeTest, SilentHttpConnectionsKeepNoProbeWaiting) {
  const std::string where = server_->http_address();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(where.substr(where.rfind(':') + 1))));
  std::vector<int> silent;
  for (int i = 0; i < 24; ++i) {  // more than the library's threads
    silent.push_back(socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(connect(silent.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // all are taken
  const auto begun = std::chrono::steady_clock::now();
  httplib::Client client("http://" + where);
  const auto health = client.Get("/healthz");
  ASSERT_TRUE(health);
  EXPECT_EQ(health->status, 200);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(1));
  for (const int descriptor : silent) close(descriptor);
}

TEST_F(ServerLifeTest, TakenPortsAreRefused) {
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

}  // namespace
}  // namespace statetap
