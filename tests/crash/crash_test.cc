// statetapd is killed (SIGKILL) at a random moment of a generate, a prefill, a stream, a deletion
// and an eviction, and started again: then everything adds up and equals a run that was left alone.
// STATETAP_CRASH_ROUNDS (2) kills of each kind; STATETAP_CRASH_SEED repeats a run.
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "client/lib/feature_receiver.h"
#include "extractor/base/json.h"
#include "extractor/shard/shard_reader.h"
#include "tests/support/server_process.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
using testing::ServerProcess;
using testing::TempDir;
using Content = std::map<std::string, uint64_t>;  // id → checksum over ids, mask, scores and states

constexpr int kSamples = 20;

int Rounds() {
  const char* given = std::getenv("STATETAP_CRASH_ROUNDS");
  return given == nullptr ? 2 : std::max(1, std::atoi(given));
}

std::mt19937& Random() {
  static std::mt19937 random = [] {
    const char* given = std::getenv("STATETAP_CRASH_SEED");
    const auto seed = given == nullptr ? std::random_device()()
                                       : static_cast<unsigned>(std::strtoul(given, nullptr, 10));
    fmt::print("STATETAP_CRASH_SEED={}\n", seed);
    return std::mt19937(seed);
  }();
  return random;
}

void SleepUpTo(std::chrono::milliseconds most) {
  std::this_thread::sleep_for(
      std::chrono::microseconds(Random()() % (1 + static_cast<unsigned>(most.count()) * 1000)));
}

Content Stored(const v1::Job& job) {
  Content content;
  std::error_code none;
  for (const auto& file : fs::directory_iterator(job.shards_path(), none)) {
    EXPECT_EQ(file.path().extension(), ".h5") << "left behind: " << file.path();
    const auto reader = ShardReader::Open(file.path());
    EXPECT_OK(reader);
    if (!reader.ok()) continue;
    const auto damaged = (*reader)->Verify();
    EXPECT_OK(damaged);
    EXPECT_TRUE(damaged.ok() && damaged->empty()) << file.path();
    for (const SampleEntry& entry : (*reader)->samples())
      EXPECT_TRUE(content.emplace(entry.id, entry.checksum).second) << entry.id << " twice";
  }
  return content;
}

// A server that comes back on the same folder and port, and a client that finds it again.
class Killable {
 public:
  Killable() {
    Restart();
    auto client = Client::Create(listen_, {});
    EXPECT_OK(client);
    client_ = *std::move(client);
  }
  void Restart() {
    process_.reset();
    process_ = std::make_unique<ServerProcess>(
        std::vector<std::string>{"--model", STATETAP_SOURCE_DIR "/models/tiny-kimi", "--data",
                                 data_.path().string(), "--listen", listen_, "--http", ""},
        logs_.path());
    listen_ = process_->WaitUntilReady();
    ASSERT_FALSE(listen_.empty()) << process_->Errors();
  }
  void Kill() {
    process_->Signal(SIGKILL);
    EXPECT_EQ(process_->WaitForExit(), 128 + SIGKILL);
  }
  Client& client() { return *client_; }

  // 20 samples, a shard for every few.
  std::string Submit(v1::JobMode mode) {
    v1::JobOptions options;
    options.set_name(mode == v1::JOB_MODE_GENERATE ? "generate" : "prefill");
    options.set_mode(mode);
    options.set_shard_bytes(1 << 20);
    if (mode == v1::JOB_MODE_GENERATE) options.set_max_new_tokens(8);
    const auto job = client_->CreateJob(options, [&](const Client::SendSamples& send) {
      SampleBatcher batcher(send);
      for (int i = 0; i < kSamples; ++i) {
        v1::SampleInput sample;
        sample.set_id(fmt::format("sample-{}", i));
        std::string text = fmt::format("Tell me about number {}.", i);
        for (int k = 0; k < 6 + i % 5; ++k) text += " And then tell me something else about it.";
        if (mode == v1::JOB_MODE_GENERATE) {
          sample.mutable_chat()->set_messages_json(
              DumpJson(Json::array({{{"role", "user"}, {"content", text}}})));
        } else {
          sample.set_prompt(text);
        }
        const absl::Status added = batcher.Add(std::move(sample));
        if (!added.ok()) return added;
      }
      return batcher.Flush();
    });
    EXPECT_OK(job);
    return job.ok() ? job->id() : "";
  }
  v1::Job WaitForEnd(const std::string& id) {
    const auto job = client_->WatchJob(
        id, [](const v1::Job&) { return true; }, nullptr);
    EXPECT_OK(job);
    return job.ok() ? *job : v1::Job();
  }

 private:
  TempDir data_, logs_;
  std::string listen_ = "127.0.0.1:0";
  std::unique_ptr<ServerProcess> process_;
  std::unique_ptr<Client> client_;
};

void ExpectAddsUp(const v1::Job& job) {
  const v1::Counts& counts = job.counts();
  EXPECT_EQ(counts.submitted(), kSamples);
  EXPECT_EQ(counts.submitted(),
            counts.stored() + counts.rejected() + counts.cancelled() + counts.to_do());
}

// Kills a job `Rounds()` times in mid run; its content in the end.
void KillWhileItRuns(v1::JobMode mode) {
  Content expected;
  std::chrono::milliseconds duration{};
  {
    Killable server;
    const auto begun = std::chrono::steady_clock::now();
    expected = Stored(server.WaitForEnd(server.Submit(mode)));
    duration = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - begun);
  }
  ASSERT_EQ(expected.size(), size_t{kSamples});
  Killable server;
  const std::string id = server.Submit(mode);
  for (int round = 0; round < Rounds(); ++round) {
    SleepUpTo(duration);
    server.Kill();
    server.Restart();
    const auto job = server.client().GetJob(id);
    ASSERT_OK(job);
    ExpectAddsUp(*job);
  }
  const v1::Job job = server.WaitForEnd(id);
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED) << job.message();
  EXPECT_EQ(job.counts().stored(), kSamples);
  EXPECT_EQ(Stored(job), expected);
}

TEST(CrashTest, Generate) { KillWhileItRuns(v1::JOB_MODE_GENERATE); }
TEST(CrashTest, Prefill) { KillWhileItRuns(v1::JOB_MODE_PREFILL); }

TEST(CrashTest, Stream) {
  Killable server;
  const v1::Job job = server.WaitForEnd(server.Submit(v1::JOB_MODE_PREFILL));
  const Content expected = Stored(job);
  for (int round = 0; round < Rounds(); ++round) {
    v1::StreamStart start;
    start.set_job(job.id());
    start.set_group(fmt::format("round-{}", round));
    start.set_credit_bytes(1);  // a sample at a time
    const auto opened = FeatureReceiver::Open(server.client(), start, {});
    ASSERT_OK(opened);
    FeatureReceiver& receiver = **opened;
    auto received = std::async(std::launch::async, [&]() -> absl::StatusOr<Content> {
      Content content;
      while (true) {
        STATETAP_ASSIGN_OR_RETURN(const auto sample, receiver.Next());
        if (!sample) return content;
        const std::vector<std::span<const uint16_t>> states(sample->states.begin(),
                                                            sample->states.end());
        if (!content.emplace(sample->record.id, SampleChecksum(sample->record, states)).second)
          return absl::InternalError(sample->record.id + " came twice");
        receiver.Ack(sample->sequence);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
    SleepUpTo(std::chrono::milliseconds(80));
    server.Kill();
    server.Restart();
    const auto content = received.get();
    ASSERT_OK(content);
    EXPECT_EQ(*content, expected);
    // What was acknowledged too late comes once more, and then nothing.
    ASSERT_OK(server.client().GetJob(job.id()));  // the connection is there again
    FeatureReceiver::Known known;
    for (const auto& [id, checksum] : *content) known[job.id()].insert(id);
    const auto rest = FeatureReceiver::Open(server.client(), start, known);
    ASSERT_OK(rest);
    const auto none = (*rest)->Next();
    ASSERT_OK(none);
    EXPECT_FALSE(none->has_value());
    EXPECT_OK((*rest)->Close());
    const auto last = FeatureReceiver::Open(server.client(), start, {});
    ASSERT_OK(last);
    EXPECT_EQ((*last)->header().remaining(), 0);
  }
}

TEST(CrashTest, Delete) {
  for (int round = 0; round < Rounds(); ++round) {
    Killable server;
    const v1::Job job = server.WaitForEnd(server.Submit(v1::JOB_MODE_PREFILL));
    const Content expected = Stored(job);
    auto deleted = std::async(std::launch::async,
                              [&] { return server.client().DeleteJob(job.id()).status(); });
    SleepUpTo(std::chrono::milliseconds(30));
    server.Kill();
    const absl::Status told = deleted.get();
    server.Restart();
    const auto now = server.client().GetJob(job.id());
    EXPECT_TRUE(!told.ok() || absl::IsNotFound(now.status()));  // told so is done
    if (now.ok()) {                                             // whole, or gone
      ExpectAddsUp(*now);
      EXPECT_EQ(Stored(*now), expected);
      EXPECT_OK(server.client().DeleteJob(job.id()));
    }
    std::error_code none;
    EXPECT_FALSE(fs::exists(job.shards_path(), none)) << job.shards_path();
  }
}

TEST(CrashTest, Evict) {
  for (int round = 0; round < Rounds(); ++round) {
    Killable server;
    const v1::Job job = server.WaitForEnd(server.Submit(v1::JOB_MODE_PREFILL));
    const size_t samples = Stored(job).size();
    auto evicted =
        std::async(std::launch::async, [&] { return server.client().EvictJob(job.id()).status(); });
    SleepUpTo(std::chrono::milliseconds(60));
    server.Kill();
    evicted.get().IgnoreError();
    server.Restart();
    const auto now = server.client().GetJob(job.id());
    ASSERT_OK(now);
    ExpectAddsUp(*now);
    EXPECT_EQ(now->counts().stored(), kSamples);
    EXPECT_EQ(Stored(*now).size(), samples);  // with states or without, each once and sound
    const auto finished = server.client().EvictJob(job.id());
    ASSERT_OK(finished);
    EXPECT_EQ(finished->job().counts().evicted(), kSamples);
    EXPECT_EQ(Stored(finished->job()).size(), samples);
    v1::StreamStart tokens;
    tokens.set_job(job.id());
    tokens.add_boundaries(-1);
    const auto receiver = FeatureReceiver::Open(server.client(), tokens, {});
    ASSERT_OK(receiver);
    int received = 0;
    for (auto sample = (*receiver)->Next(); sample.ok() && sample->has_value();
         sample = (*receiver)->Next())
      ++received;
    EXPECT_EQ(received, kSamples);
  }
}

}  // namespace
}  // namespace statetap
