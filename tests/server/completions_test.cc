// The HTTP completions where something goes wrong: clients that vanish, too many of them, an engine
// that fails, a server that drains. What they answer is tested on a model (tests/python).
#include "server/web/completions.h"

#include <httplib.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/support/server_fixture.h"

namespace statetap {
namespace {

using ::testing::HasSubstr;

constexpr std::string_view kBody = R"({"prompt": "Tell me", "max_tokens": 300, "stream": true})";

class CompletionsTest : public testing::ServerFixture {
 protected:
  httplib::Client Http() { return httplib::Client("http://" + server_->http_address()); }
  // A connection that has asked and reads nothing.
  int Ask(std::string_view body = kBody) {
    const std::string& where = server_->http_address();
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(where.substr(where.rfind(':') + 1))));
    const int connection = socket(AF_INET, SOCK_STREAM, 0);
    const int small = 4096;
    setsockopt(connection, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    EXPECT_EQ(connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const std::string request = fmt::format(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        "Content-Length: {}\r\n\r\n{}",
        body.size(), body);
    EXPECT_EQ(send(connection, request.data(), request.size(), 0),
              static_cast<ssize_t>(request.size()));
    return connection;
  }
  // All that comes until the server ends the connection.
  static std::string ReadAll(int connection) {
    std::string all;
    char bytes[65536];
    for (ssize_t n; (n = recv(connection, bytes, sizeof(bytes), 0)) > 0;)
      all.append(bytes, static_cast<size_t>(n));
    close(connection);
    return all;
  }
  int Answers() {
    const JobRunner::Load load = server_->runner().load();
    return static_cast<int>(load.running_answers + load.waiting_answers);
  }
  // Waits a while for it.
  void ExpectAnswers(int count) {
    for (int i = 0; i < 10000 && Answers() != count; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(Answers(), count);
  }
};

// A step reads 16 tokens and takes half a second: no answer begins, and what is not given up would
// run for minutes.
TEST_F(CompletionsTest, ManyWhoVanishLeaveNothingBehindAndTooManyAreRefused) {
  engine_->faults.step = std::chrono::milliseconds(500);
  const auto body = [](bool stream) {
    return DumpJson({{"prompt", std::vector<int>(490, 7)}, {"max_tokens", 9}, {"stream", stream}});
  };
  std::vector<int> connections;
  for (int i = 0; i < Completions::kMostAtOnce; ++i) connections.push_back(Ask(body(i % 2 == 0)));
  ExpectAnswers(Completions::kMostAtOnce);
  httplib::Client client = Http();
  const auto refused = client.Post("/v1/completions", body(false), "application/json");
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status, 429);
  EXPECT_THAT(refused->body, HasSubstr("rate_limit_error"));
  const auto health = client.Get("/healthz");
  ASSERT_TRUE(health);
  EXPECT_EQ(health->status, 200);
  const int64_t before = engine_->steps;
  for (const int connection : connections) close(connection);
  ExpectAnswers(0);
  EXPECT_LT(engine_->steps - before, 20);
}

TEST_F(CompletionsTest, ASlowReaderKeepsNobodyWaitingAndGetsAll) {
  Json prompts = Json::array();
  for (int i = 0; i < 200; ++i) prompts.push_back(std::vector<int>(500, i));
  const int slow =
      Ask(DumpJson({{"prompt", prompts}, {"max_tokens", 0}, {"echo", true}, {"logprobs", 1}}));
  // Until all are there: megabytes that wait for the reader.
  for (int i = 0; i < 10000 && server_->runner().load().prompt_tokens < 200 * 500; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(server_->runner().load().prompt_tokens, 200 * 500);
  httplib::Client client = Http();
  for (int i = 0; i < 20; ++i) {
    const auto other = client.Post("/v1/completions", R"({"prompt": "x"})", "application/json");
    ASSERT_TRUE(other);
    EXPECT_EQ(other->status, 200);
  }
  const std::string reply = ReadAll(slow);
  EXPECT_GT(reply.size(), size_t{4} << 20);
  EXPECT_TRUE(reply.ends_with("}}\r\n0\r\n\r\n")) << reply.substr(reply.size() - 100);
}

TEST_F(CompletionsTest, AFailedEngineIsSaidInTheStreamAndBeforeIt) {
  engine_->faults.step = std::chrono::milliseconds(200);
  std::thread reader([&] {
    httplib::Client client = Http();
    client.Post("/v1/completions", httplib::Headers(), std::string(kBody), "application/json");
  });
  httplib::Client client = Http();
  const int connection = Ask();
  ExpectAnswers(2);
  engine_->faults.fail = true;
  const std::string stream = ReadAll(connection);
  reader.join();
  EXPECT_THAT(stream, HasSubstr("data: {\"error\":{\"message\":\"the engine has stopped"));
  EXPECT_THAT(stream, ::testing::Not(HasSubstr("[DONE]")));
  const auto later = client.Post("/v1/completions", R"({"prompt": "x"})", "application/json");
  ASSERT_TRUE(later);
  EXPECT_GE(later->status, 500);
  EXPECT_THAT(later->body, HasSubstr("server_error"));
}

TEST_F(CompletionsTest, AnswersEndWhenTheServerDrains) {
  engine_->faults.step = std::chrono::milliseconds(200);
  const int connection = Ask();
  ExpectAnswers(1);
  server_->Drain(std::chrono::seconds(0));
  EXPECT_THAT(ReadAll(connection), HasSubstr("data: {\"error\""));
}

}  // namespace
}  // namespace statetap
