// What a stream stands and what it costs, with statetapd as a process: many clients half of which
// sleep, a sample above 2 GiB, quiet minutes, thousands of tiny samples.
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "statetap/v1/features.grpc.pb.h"
#include "statetap/v1/jobs.grpc.pb.h"
#include "tests/support/server_process.h"
#include "tests/support/status_matchers.h"
#include "tests/support/stored_job.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using testing::ServerProcess;
using testing::StoreJob;
using testing::TempDir;

constexpr int64_t kMiB = int64_t{1} << 20;

// A server on a data folder, and stubs with a connection of their own each.
struct Served {
  explicit Served(const TempDir& data)
      : process({"--model", STATETAP_SOURCE_DIR "/models/tiny-kimi", "--data", data.path().string(),
                 "--listen", "127.0.0.1:0", "--http", ""},
                logs.path()),
        address(process.WaitUntilReady()) {}
  std::unique_ptr<v1::Features::Stub> Connect() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::Features::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  }
  // Of memory that is the process's own: mapped files are the page cache's.
  int64_t OwnBytes() const {
    std::ifstream status(fmt::format("/proc/{}/status", process.id()));
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("RssAnon:")) return std::stoll(line.substr(8)) << 10;
    ADD_FAILURE() << "no RssAnon";
    return 0;
  }
  TempDir logs;
  ServerProcess process;
  std::string address;
};

class Stream {
 public:
  Stream(const Served& served, const v1::StreamStart& start)
      : stub_(served.Connect()), rpc_(stub_->StreamFeatures(&context_)) {
    v1::StreamFeaturesRequest request;
    *request.mutable_start() = start;
    rpc_->Write(request);
  }
  ~Stream() { context_.TryCancel(); }
  bool Read(v1::StreamFeaturesResponse& message) { return rpc_->Read(&message); }
  void Write(const v1::StreamFeaturesRequest& message) { rpc_->Write(message); }
  // Reads to the end, giving credit at first and as it goes; the bytes of states that came.
  int64_t ReadAll(uint64_t credit = 0) {
    int64_t bytes = 0;
    v1::StreamFeaturesResponse message;
    v1::StreamFeaturesRequest request;
    request.set_credit_bytes(credit);
    rpc_->Write(request);
    while (rpc_->Read(&message) && !message.has_end()) {
      const auto piece = static_cast<int64_t>(message.data().states().size());
      bytes += piece;
      if (piece == 0) continue;
      request.set_credit_bytes(static_cast<uint64_t>(piece));
      rpc_->Write(request);
    }
    return bytes;
  }
  grpc::Status Close() {
    rpc_->WritesDone();
    v1::StreamFeaturesResponse message;
    while (rpc_->Read(&message)) {
    }
    return rpc_->Finish();
  }

 private:
  std::unique_ptr<v1::Features::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StreamFeaturesRequest, v1::StreamFeaturesResponse>>
      rpc_;
};

v1::StreamStart StartOf(const std::string& job, const std::string& group) {
  v1::StreamStart start;
  start.set_job(job);
  start.set_group(group);
  start.set_order(v1::STREAM_ORDER_SHUFFLED);
  return start;
}

// The bound of docs/operate.md: 2 MiB a stream and 64 bytes a sample of a shuffled one.
TEST(StreamLimitsTest, SixtyFourStreamsWithHalfAsleepStayWithinTheStatedMemory) {
  constexpr int kStreams = 64, kSamples = 200, kTokens = 64, kHidden = 1024;
  TempDir data;
  ASSERT_OK(StoreJob(data.path(), {"job", kSamples, kTokens, kHidden, {2, 4}}));
  const Served served(data);
  {
    Stream first(served, StartOf("job", "first"));
    first.ReadAll();
    EXPECT_TRUE(first.Close().ok());
  }
  const int64_t before = served.OwnBytes();
  std::vector<std::unique_ptr<Stream>> asleep;
  for (int i = 0; i < kStreams / 2; ++i) {
    asleep.push_back(std::make_unique<Stream>(served, StartOf("job", fmt::format("asleep-{}", i))));
    v1::StreamFeaturesResponse message;
    EXPECT_TRUE(asleep.back()->Read(message));  // its header; nothing more is read
  }
  std::vector<std::thread> readers;
  std::vector<int64_t> bytes(kStreams / 2);
  for (size_t i = 0; i < bytes.size(); ++i) {
    readers.emplace_back([&, i] {
      Stream stream(served, StartOf("job", fmt::format("awake-{}", i)));
      bytes[i] = stream.ReadAll();
      EXPECT_TRUE(stream.Close().ok());
    });
  }
  int64_t most = 0;
  for (int i = 0; i < 20; ++i) {
    most = std::max(most, served.OwnBytes());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  for (std::thread& reader : readers) reader.join();
  most = std::max(most, served.OwnBytes());
  for (const int64_t of_one : bytes)
    EXPECT_EQ(of_one, int64_t{kSamples} * kTokens * kHidden * 2 * 2);
  EXPECT_LE(most - before, kStreams * (2 * kMiB + 64 * kSamples));
  // The sleepers wake up and lack nothing.
  EXPECT_EQ(asleep[0]->ReadAll(), int64_t{kSamples} * kTokens * kHidden * 2 * 2);
  EXPECT_TRUE(asleep[0]->Close().ok());
}

TEST(StreamLimitsTest, TwoHundredVanishedClientsLeaveNothingBehind) {
  TempDir data;
  ASSERT_OK(StoreJob(data.path(), {"job", 20, 64, 1024, {2, 4}}));
  const Served served(data);
  const auto vanish = [&](int count) {
    for (int i = 0; i < count; ++i) {
      Stream stream(served, StartOf("job", "shared"));
      v1::StreamFeaturesResponse message;
      EXPECT_TRUE(stream.Read(message));  // and it is gone
    }
  };
  vanish(20);
  const int64_t before = served.OwnBytes();
  vanish(200);
  EXPECT_LE(served.OwnBytes() - before, 8 * kMiB);
  // What they had leased comes to the next one, all of it.
  Stream stream(served, StartOf("job", "shared"));
  EXPECT_EQ(stream.ReadAll(), 20 * 64 * 1024 * 2 * 2);
}

TEST(StreamLimitsTest, HundredsOfShardsNeedFewHandles) {
  TempDir data;
  ASSERT_OK(StoreJob(data.path(), {"job", 200, 4, 64, {2}, /*shards=*/200}));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 64;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const Served served(data);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  Stream stream(served, StartOf("job", "g"));
  EXPECT_EQ(stream.ReadAll(), 200 * 4 * 64 * 2);
  const grpc::Status status = stream.Close();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// A newer client's fields and messages are passed over, as an older client passes over ours.
TEST(StreamLimitsTest, FieldsAndMessagesOfTheFutureArePassedOver) {
  TempDir data;
  ASSERT_OK(StoreJob(data.path(), {"job", 3, 8, 64, {2}}));
  const Served served(data);
  v1::StreamStart start = StartOf("job", "g");
  start.GetReflection()->MutableUnknownFields(&start)->AddVarint(1000, 7);
  Stream stream(served, start);
  v1::StreamFeaturesRequest request;
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(1001, "?");
  stream.Write(request);
  EXPECT_EQ(stream.ReadAll(), 3 * 8 * 64 * 2);
  EXPECT_TRUE(stream.Close().ok());
}

// 73 tokens of 57,344 bytes are less than gRPC's limit of 4 MiB a message, 74 are more: pieces are
// smaller.
TEST(StreamLimitsTest, SamplesAroundTheMessageLimitReachAStockClient) {
  TempDir data;
  ASSERT_OK(StoreJob(data.path(), {"73", 2, 73, 7168, {2, 30, 58, 61}}));
  ASSERT_OK(StoreJob(data.path(), {"74", 2, 74, 7168, {2, 30, 58, 61}}));
  const Served served(data);
  for (const int tokens : {73, 74}) {
    Stream stream(served, StartOf(std::to_string(tokens), "g"));
    EXPECT_EQ(stream.ReadAll(), int64_t{2} * tokens * 57'344);
    EXPECT_TRUE(stream.Close().ok());
  }
}

TEST(StreamLimitsTest, ASampleAboveTwoGibibytesArrivesInPieces) {
  // 9 boundaries of 17,000 rows of 7,168 values: 2.19 GB, one buffer of 244 MB behind all of them.
  constexpr int kTokens = 17'000, kHidden = 7168;
  const std::vector<int> boundaries = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const int64_t expected = int64_t{kTokens} * kHidden * 2 * static_cast<int64_t>(boundaries.size());
  ASSERT_GT(expected, int64_t{1} << 31);
  TempDir data;
  ASSERT_OK(StoreJob(data.path(), {"large", 1, kTokens, kHidden, boundaries}));
  const Served served(data);
  const int64_t before = served.OwnBytes();
  Stream stream(served, StartOf("large", "g"));
  EXPECT_EQ(stream.ReadAll(), expected);
  EXPECT_TRUE(stream.Close().ok());
  EXPECT_LE(served.OwnBytes() - before, 16 * kMiB);
}

// Three seconds; STATETAP_QUIET_SECONDS=600 for the ten minutes after which routers forget.
TEST(StreamLimitsTest, AQuietStreamLives) {
  const char* given = std::getenv("STATETAP_QUIET_SECONDS");
  TempDir data;
  ASSERT_OK(StoreJob(data.path(), {"job", 3, 8, 64, {2}}));
  const Served served(data);
  v1::StreamStart start = StartOf("job", "g");
  start.set_credit_bytes(1);  // one sample, then the server waits for the client
  Stream stream(served, start);
  v1::StreamFeaturesResponse message;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream.Read(message));  // header, sample, its states
  std::this_thread::sleep_for(std::chrono::seconds(given == nullptr ? 3 : std::atoi(given)));
  EXPECT_EQ(stream.ReadAll(uint64_t{1} << 20), 2 * 8 * 64 * 2);
  EXPECT_TRUE(stream.Close().ok());
}

// Samples of 2 to 40 tokens from submission to the last acknowledgement. STATETAP_TINY_SAMPLES for
// more than 800.
TEST(StreamLimitsTest, ManyTinySamplesLeaveMemoryFlat) {
  const char* given = std::getenv("STATETAP_TINY_SAMPLES");
  const int count = given == nullptr ? 800 : std::max(100, std::atoi(given));
  TempDir data;
  const Served served(data);
  const auto jobs =
      v1::Jobs::NewStub(grpc::CreateChannel(served.address, grpc::InsecureChannelCredentials()));
  v1::Job job;
  int64_t tokens = 0;
  {
    grpc::ClientContext context;
    const auto writer = jobs->CreateJob(&context, &job);
    v1::CreateJobRequest request;
    request.mutable_options()->set_name("tiny");
    request.mutable_options()->set_shard_bytes(static_cast<uint64_t>(4 * kMiB));
    for (int i = 0; i < count; ++i) {
      v1::SampleInput& sample = *request.add_samples();
      sample.set_id(fmt::format("tiny-{}", i));
      for (int t = 0; t < 2 + i % 39; ++t) sample.mutable_tokens()->add_ids((7 * i + t) % 2000);
      tokens += 2 + i % 39;
      if (request.samples_size() < 1000) continue;
      writer->Write(request);
      request.Clear();
    }
    if (request.samples_size() > 0) writer->Write(request);
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  int64_t early = 0;
  while (job.counts().stored() < count) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_job("tiny");
    ASSERT_TRUE(jobs->GetJob(&context, request, &job).ok());
    ASSERT_NE(job.state(), v1::JOB_STATE_FAILED) << job.message();
    const int64_t done = job.counts().stored() + job.counts().captured();
    if (early == 0 && done >= count / 4) early = served.OwnBytes();
  }
  EXPECT_EQ(job.tokens(), tokens);
  const int64_t late = served.OwnBytes();
  Stream stream(served, StartOf("tiny", "g"));
  EXPECT_EQ(stream.ReadAll(), tokens * 4 * 128 * 2);
  EXPECT_TRUE(stream.Close().ok());
  fmt::print("{} samples: {:.1f} MiB after a quarter, {:.1f} at the end, {:.1f} after the stream\n",
             count, static_cast<double>(early) / kMiB, static_cast<double>(late) / kMiB,
             static_cast<double>(served.OwnBytes()) / kMiB);
  EXPECT_LE(served.OwnBytes() - early, 32 * kMiB);
}

}  // namespace
}  // namespace statetap
