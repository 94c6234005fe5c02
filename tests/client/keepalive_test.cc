// A server that vanishes without a word, as a machine does that loses its power, or a route.
#include <future>

#include "client/lib/client.h"
#include "tests/support/proxy.h"
#include "tests/support/server_process.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using testing::StatusIs;

TEST(KeepaliveTest, AClientNoticesThatItsServerHasVanished) {
  const testing::TempDir data, logs;
  testing::ServerProcess server({"--model", STATETAP_SOURCE_DIR "/models/tiny-kimi", "--data",
                                 data.path().string(), "--listen", "127.0.0.1:0", "--http", ""},
                                logs.path());
  testing::Proxy proxy(server.WaitUntilReady());
  ClientOptions options;
  options.keepalive = std::chrono::seconds(1);
  options.keepalive_timeout = std::chrono::seconds(5);
  options.patience = std::chrono::seconds(0);
  ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(proxy.address(), options));
  const auto fill = [](const Client::SendSamples& send) {
    Client::Samples samples;
    for (int i = 0; i < 1000; ++i) {
      samples.Add()->set_id(std::to_string(i));
      samples.rbegin()->set_prompt("Tell me something.");
    }
    send(std::move(samples));
    return absl::OkStatus();
  };
  // Nothing happens to a job that is paused.
  ASSERT_OK_AND_ASSIGN(const v1::Job job, client->CreateJob({}, fill));
  ASSERT_OK(client->PauseJob(job.id()));
  std::atomic<bool> heard = false;
  auto watch = std::async(std::launch::async, [&] {
    const auto hear = [&](const v1::Job&) { return heard = true; };
    return client->WatchJob(job.id(), hear, nullptr).status();
  });
  for (int i = 0; i < 30000 && !heard; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // Several pings: more than the library sends by default while a client has nothing to say, and
  // more than it bears by default as a server.
  EXPECT_EQ(watch.wait_for(std::chrono::seconds(6)), std::future_status::timeout);
  proxy.Freeze();
  EXPECT_EQ(watch.wait_for(std::chrono::minutes(1)), std::future_status::ready);
  client->CancelAll();
  EXPECT_THAT(watch.get(), StatusIs(absl::StatusCode::kUnavailable, ""));
}

}  // namespace
}  // namespace statetap
