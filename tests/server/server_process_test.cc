// statetapd itself, serving tiny-kimi: crashes, signals, a second server.
#include "tests/support/server_process.h"

#include <grpcpp/grpcpp.h>
#include <sys/resource.h>

#include <fstream>
#include <functional>
#include <map>
#include <memory>

#include "extractor/base/json.h"
#include "extractor/shard/shard_reader.h"
#include "statetap/v1/jobs.grpc.pb.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using ::testing::HasSubstr;
using testing::ServerProcess;
using testing::TempDir;

constexpr int kSamples = 24;

std::vector<std::string> Arguments(const TempDir& data) {
  return {"--model",  STATETAP_SOURCE_DIR "/models/tiny-kimi",
          "--data",   data.path().string(),
          "--listen", "127.0.0.1:0",
          "--http",   ""};
}

class Client {
 public:
  explicit Client(const std::string& address)
      : stub_(v1::Jobs::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {
  }

  // Chats of different lengths; shards of 1 MiB, of which each sample fills a good part.
  std::string Submit() {
    grpc::ClientContext context;
    v1::Job job;
    auto writer = stub_->CreateJob(&context, &job);
    v1::CreateJobRequest request;
    request.mutable_options()->set_shard_bytes(1 << 20);
    request.mutable_options()->set_max_new_tokens(12);
    for (int i = 0; i < kSamples; ++i) {
      v1::SampleInput& sample = *request.add_samples();
      sample.set_id(fmt::format("sample-{}", i));
      std::string text = fmt::format("Tell me about number {}.", i);
      for (int k = 0; k < 6 + i % 5; ++k) text += " And then tell me something else about it.";
      sample.mutable_chat()->set_messages_json(
          DumpJson(Json::array({{{"role", "user"}, {"content", text}}})));
    }
    writer->Write(request);
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job.id();
  }
  v1::Job Get(const std::string& id) {
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_job(id);
    v1::Job job;
    const grpc::Status status = stub_->GetJob(&context, request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }
  v1::Job WaitUntil(const std::string& id, const std::function<bool(const v1::Job&)>& done) {
    for (int i = 0; i < 6000; ++i) {
      const v1::Job job = Get(id);
      if (done(job)) return job;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return Get(id);
  }
  v1::Job WaitForEnd(const std::string& id) {
    return WaitUntil(id, [](const v1::Job& job) { return job.counts().to_do() == 0; });
  }

 private:
  std::unique_ptr<v1::Jobs::Stub> stub_;
};

// By id; each covers ids, mask, scores and all states.
std::map<std::string, uint64_t> Checksums(const std::string& folder) {
  std::map<std::string, uint64_t> sums;
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(folder, error)) {
    EXPECT_EQ(file.path().extension(), ".h5") << "left behind: " << file.path();
    const auto reader = ShardReader::Open(file.path());
    EXPECT_OK(reader);
    if (!reader.ok()) continue;
    for (const SampleEntry& entry : (*reader)->samples())
      EXPECT_TRUE(sums.emplace(entry.id, entry.checksum).second) << entry.id << " twice";
  }
  return sums;
}

std::map<std::string, uint64_t> CleanRun() {
  TempDir data, logs;
  ServerProcess server(Arguments(data), logs.path());
  Client client(server.WaitUntilReady());
  const v1::Job job = client.WaitForEnd(client.Submit());
  EXPECT_EQ(job.counts().stored(), kSamples);
  return Checksums(job.shards_path());
}

TEST(ServerProcessTest, KilledInMidJobGoesOnAndEqualsACleanRun) {
  const auto expected = CleanRun();
  ASSERT_EQ(expected.size(), size_t{kSamples});
  TempDir data, logs;
  std::string id;
  const std::vector<std::function<bool(const v1::Job&)>> moments = {
      [](const v1::Job&) { return true; },  // before the first sample
      [](const v1::Job& job) { return job.counts().running() > 0; },
      [](const v1::Job& job) { return job.counts().stored() > 0; }};
  for (const auto& moment : moments) {
    ServerProcess server(Arguments(data), logs.path());
    Client client(server.WaitUntilReady());
    if (id.empty()) id = client.Submit();
    client.WaitUntil(id, moment);
    server.Signal(SIGKILL);
    EXPECT_EQ(server.WaitForExit(), 128 + SIGKILL);
  }
  ServerProcess server(Arguments(data), logs.path());
  Client client(server.WaitUntilReady());
  const v1::Job job = client.WaitForEnd(id);
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(job.counts().stored(), kSamples);
  EXPECT_EQ(Checksums(job.shards_path()), expected);
}

TEST(ServerProcessTest, DrainsOnSigtermAndGoesOnAfterwards) {
  TempDir data, logs;
  std::string id;
  {
    ServerProcess server(Arguments(data), logs.path());
    Client client(server.WaitUntilReady());
    id = client.Submit();
    client.WaitUntil(id, [](const v1::Job& job) { return job.counts().running() > 0; });
    server.Signal(SIGTERM);
    EXPECT_EQ(server.WaitForExit(), 0) << server.Errors();
    EXPECT_THAT(server.Errors(), HasSubstr("drained"));
    // The ready line was all on stdout.
    const std::string output = server.Output();
    EXPECT_EQ(std::count(output.begin(), output.end(), '\n'), 1);
    EXPECT_THAT(output, HasSubstr("statetapd ready grpc=127.0.0.1:"));
    EXPECT_THAT(output, HasSubstr(" http=off model=tiny-kimi ranks=1 backend=cpu\n"));
  }
  ServerProcess server(Arguments(data), logs.path());
  Client client(server.WaitUntilReady());
  EXPECT_EQ(client.WaitForEnd(id).counts().stored(), kSamples);
}

TEST(ServerProcessTest, SecondSignalEndsAtOnce) {
  TempDir data, logs;
  std::vector<std::string> arguments = Arguments(data);
  arguments.insert(arguments.end(), {"--drain-seconds", "600", "--max-batch-tokens", "1"});
  ServerProcess server(arguments, logs.path());
  Client client(server.WaitUntilReady());
  const std::string id = client.Submit();
  client.WaitUntil(id, [](const v1::Job& job) { return job.counts().running() > 0; });
  server.Signal(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(), 128 + SIGTERM);
}

TEST(ServerProcessTest, ACacheThatHoldsLessThanAStepIsSaid) {
  TempDir data, logs;
  std::vector<std::string> arguments = Arguments(data);
  arguments.insert(arguments.end(), {"--backend", "cpu", "--kv-cache-gib", "0.0005"});
  ServerProcess server(arguments, logs.path());
  ASSERT_NE(server.WaitUntilReady(), "");
  EXPECT_THAT(server.Errors(), HasSubstr("--kv-cache-gib holds 192 tokens at once, fewer than"));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(), 0);
}

#ifdef STATETAP_FAILING_MALLOC
// With failing_malloc.c, which looks for the file `goes_wrong` that `variable` names.
std::unique_ptr<ServerProcess> PreloadedServer(const std::vector<std::string>& arguments,
                                               const TempDir& logs, const char* variable,
                                               const std::filesystem::path& goes_wrong) {
  setenv(variable, goes_wrong.c_str(), 1);
  setenv("LD_PRELOAD", STATETAP_FAILING_MALLOC, 1);
  auto server = std::make_unique<ServerProcess>(arguments, logs.path());
  unsetenv("LD_PRELOAD");
  unsetenv(variable);
  return server;
}

// Fault class 31, with a supervisor: the server ends, and the next one goes on.
TEST(ServerProcessTest, EndsWhenTheEngineHasFailedWhereThatIsAsked) {
  TempDir data, logs;
  const std::filesystem::path fails = logs / "fails";
  std::vector<std::string> arguments = Arguments(data);
  arguments.insert(arguments.end(), {"--backend", "cpu", "--engine-failure", "exit"});
  const auto running = PreloadedServer(arguments, logs, "STATETAP_FAIL_MALLOC", fails);
  ServerProcess& server = *running;
  const std::string address = server.WaitUntilReady();
  ASSERT_NE(address, "");
  std::ofstream(fails) << "from here on";
  const std::string id = Client(address).Submit();
  EXPECT_EQ(server.WaitForExit(), 1) << server.Errors();
  EXPECT_THAT(server.Errors(), HasSubstr("the engine has failed: rank 0 failed: std::bad_alloc"));
  ServerProcess next(arguments, logs.path());
  Client client(next.WaitUntilReady());
  EXPECT_EQ(client.WaitForEnd(id).counts().stored(), kSamples);
}

TEST(ServerProcessTest, AStepThatDoesNotEndIsLeftWhenTheDrainIsOver) {
  TempDir data, logs;
  const std::filesystem::path hangs = logs / "hangs";
  std::vector<std::string> arguments = Arguments(data);
  arguments.insert(arguments.end(), {"--backend", "cpu", "--drain-seconds", "1"});
  const auto running = PreloadedServer(arguments, logs, "STATETAP_HANG_MALLOC", hangs);
  ServerProcess& server = *running;
  const std::string address = server.WaitUntilReady();
  ASSERT_NE(address, "");
  std::ofstream(hangs) << "the next step";
  const std::string id = Client(address).Submit();
  for (int i = 0; i < 6000 && std::filesystem::exists(hangs); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_FALSE(std::filesystem::exists(hangs));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(), 0) << server.Errors();
  EXPECT_THAT(server.Errors(), HasSubstr("left a step that was still running"));
  ServerProcess next(arguments, logs.path());
  Client client(next.WaitUntilReady());
  EXPECT_EQ(client.WaitForEnd(id).counts().stored(), kSamples);
}
#endif

// A limit on the size of files (ulimit -f) is a failed write: the job waits, the server goes on.
TEST(ServerProcessTest, FileSizeLimitMakesTheJobWait) {
  TempDir data, logs;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 768 << 10;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  ServerProcess server(Arguments(data), logs.path());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  Client client(server.WaitUntilReady());
  const std::string id = client.Submit();
  const v1::Job job =
      client.WaitUntil(id, [](const v1::Job& now) { return now.state() == v1::JOB_STATE_WAITING; });
  EXPECT_EQ(job.state(), v1::JOB_STATE_WAITING) << server.Errors();
  EXPECT_THAT(job.message(), HasSubstr("shard-000001.h5"));
  EXPECT_EQ(job.counts().to_do(), kSamples);
  EXPECT_EQ(client.Get(id).id(), id);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(), 0) << server.Errors();
}

TEST(ServerProcessTest, SecondServerOnADataFolderOrPortExitsWithOne) {
  TempDir data, other, logs, more_logs;
  ServerProcess first(Arguments(data), logs.path());
  const std::string address = first.WaitUntilReady();
  ASSERT_FALSE(address.empty());
  {
    ServerProcess second(Arguments(data), more_logs.path());
    EXPECT_EQ(second.WaitForExit(), 1);
    EXPECT_THAT(second.Errors(), HasSubstr("is in use by the server with process id"));
  }
  std::vector<std::string> arguments = Arguments(other);
  arguments[5] = address;
  ServerProcess second(arguments, more_logs.path());
  EXPECT_EQ(second.WaitForExit(), 1);
  EXPECT_THAT(second.Errors(), HasSubstr("cannot listen on " + address));
  EXPECT_EQ(second.Output(), "");
}

TEST(ServerProcessTest, WrongUsageExitsWithTwoAndMissingModelWithOne) {
  TempDir data, logs;
  {
    ServerProcess server({"--modle", "x", "--data", data.path().string()}, logs.path());
    EXPECT_EQ(server.WaitForExit(), 2);
    EXPECT_THAT(server.Errors(), HasSubstr("did you mean --model?"));
  }
  ServerProcess server({"--model", "no/such-model", "--data", data.path().string()}, logs.path());
  EXPECT_EQ(server.WaitForExit(), 1);
  EXPECT_THAT(server.Errors(), HasSubstr("no/such-model"));
}

}  // namespace
}  // namespace statetap
