// What a stream gives on one machine, over loopback, from shards in the page cache: `statetapd` and
// a client of the generated code (what a user of any language has), samples of 512 tokens at
// Kimi-K2.5's four boundaries (29 MB each), 32 of them (0.94 GB), the two sides alternating, the
// median of five.
//   stream      against pyarrow Flight sending the same file in batches of the same size. Its venv
//               is made on the first run (STATETAP_BENCH_VENV, default in --work)
//   stream-tcp  against a bare socket: send from the mapped file, receive into one buffer
//   first       every sample for the first time since the server started: it is held to its
//               checksum before it is sent
//   receiver    the client library of `statetap stream`: samples put together and their checksums
//               compared
//   open        a stream on 25,000 samples, shuffled: seconds until the first one is here
//
//   stream_bench [--work FOLDER] [--samples N] [--tokens N] [--rounds N] [--cases stream,…]
//   stream_bench --prepare FOLDER; --receive HOST:PORT --group G     parts of it, for
//   python_bench.py
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/case_options.h"
#include "bench/compare.h"
#include "client/lib/feature_receiver.h"
#include "extractor/base/file.h"
#include "extractor/base/mapped_file.h"
#include "tests/support/server_process.h"
#include "tests/support/stored_job.h"

namespace statetap::bench {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kHidden = 7168;
constexpr int kOpenSamples = 25'000;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A program that prints a line once it serves: its port and process id.
class Peer {
 public:
  static absl::StatusOr<std::unique_ptr<Peer>> Start(const std::string& command) {
    FILE* const output = popen(("exec " + command).c_str(), "r");
    std::unique_ptr<Peer> peer(new Peer(output));
    if (output == nullptr || std::fscanf(output, "%d %d", &peer->port_, &peer->process_) != 2)
      return absl::UnavailableError(fmt::format("`{}` did not start", command));
    return peer;
  }
  ~Peer() {
    if (process_ > 0) kill(process_, SIGTERM);
    if (output_ != nullptr) pclose(output_);
  }
  int port() const { return port_; }

 private:
  explicit Peer(FILE* output) : output_(output) {}
  FILE* output_;
  int port_ = 0, process_ = 0;
};

// The other side of `stream-tcp`: sends the file to everybody who connects.
int ServeTcp(const fs::path& path, size_t bytes) {
  const absl::StatusOr<File> file = File::OpenForRead(path);
  if (!file.ok()) return 1;
  const auto mapped = MappedFile::Map(*file);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (!mapped.ok() || bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, 1) != 0)
    return 1;
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  fmt::print("{} {}\n", ntohs(address.sin_port), getpid());
  std::fflush(stdout);
  while (true) {
    const int client = accept(listener, nullptr, nullptr);
    if (client < 0) return 1;
    std::span<const std::byte> left = (*mapped)->bytes().first(bytes);
    while (!left.empty()) {
      const ssize_t sent =
          send(client, left.data(), std::min(left.size(), size_t{2} << 20), MSG_NOSIGNAL);
      if (sent <= 0) break;
      left = left.subspan(static_cast<size_t>(sent));
    }
    close(client);
  }
}

// The bytes of the states that came.
absl::StatusOr<int64_t> ReceiveAll(Client& client, const v1::StreamStart& start) {
  STATETAP_ASSIGN_OR_RETURN(const auto receiver, FeatureReceiver::Open(client, start, {}));
  int64_t bytes = 0;
  while (true) {
    STATETAP_ASSIGN_OR_RETURN(const auto sample, receiver->Next());
    if (!sample) break;
    for (const auto& states : sample->states)
      bytes += static_cast<int64_t>(states.size() * sizeof(uint16_t));
    receiver->Ack(sample->sequence);
  }
  STATETAP_RETURN_IF_ERROR(receiver->Close());
  return bytes;
}

class StreamBench {
 public:
  StreamBench(const CaseOptions& options, fs::path folder)
      : options_(options), folder_(std::move(folder)) {}

  absl::Status Run() {
    const fs::path data = folder_ / "data";
    fs::create_directories(data);
    STATETAP_ASSIGN_OR_RETURN(
        shard_, testing::StoreJob(
                    data, {"bench", options_.samples, options_.tokens, kHidden, {2, 30, 58, 61}}));
    if (HasCase(options_.cases, "open"))
      STATETAP_RETURN_IF_ERROR(
          testing::StoreJob(data, {"many", kOpenSamples, 16, 64, {2}}).status());
    STATETAP_RETURN_IF_ERROR(StartServer());
    const auto ours = [this] { return ReadStream(); };
    if (HasCase(options_.cases, "stream")) {
      STATETAP_ASSIGN_OR_RETURN(const std::string python, FlightPython());
      const std::string script =
          fmt::format("{} {}/bench/flight_peer.py", python, STATETAP_SOURCE_DIR);
      STATETAP_ASSIGN_OR_RETURN(
          const auto flight,
          Peer::Start(fmt::format("{} serve {} {}", script, shard_.string(), Bytes())));
      STATETAP_RETURN_IF_ERROR(
          Case("stream", ours, "flight", [&] { return ReadFlight(script, flight->port()); }));
    }
    if (HasCase(options_.cases, "stream-tcp")) {
      STATETAP_ASSIGN_OR_RETURN(const auto tcp,
                                Peer::Start(fmt::format("/proc/{}/exe --serve-tcp {} {}", getpid(),
                                                        shard_.string(), Bytes())));
      STATETAP_RETURN_IF_ERROR(
          Case("stream-tcp", ours, "raw-tcp", [&] { return ReadTcp(tcp->port()); }));
    }
    STATETAP_RETURN_IF_ERROR(Case(
        "first",
        [this]() -> absl::StatusOr<double> {
          STATETAP_RETURN_IF_ERROR(StartServer());
          return ReadStream();
        },
        "", nullptr));
    STATETAP_RETURN_IF_ERROR(Case(
        "receiver", [this] { return Receive(); }, "", nullptr));
    return Case(
        "open", [this] { return OpenMany(); }, "", nullptr, "s");
  }

 private:
  size_t Bytes() const {
    return size_t{2} * kHidden * 4 * static_cast<size_t>(options_.samples * options_.tokens);
  }
  double Rate(double seconds) const { return static_cast<double>(Bytes()) / seconds / 1e9; }

  absl::Status StartServer() {
    server_.reset();
    server_.emplace(std::vector<std::string>{"--model", STATETAP_SOURCE_DIR "/models/tiny-kimi",
                                             "--data", (folder_ / "data").string(), "--backend",
                                             "cpu", "--listen", "127.0.0.1:0", "--http", ""},
                    folder_);
    const std::string address = server_->WaitUntilReady();
    if (address.empty())
      return absl::UnavailableError("statetapd did not start: " + server_->Errors());
    STATETAP_ASSIGN_OR_RETURN(client_, Client::Create(address, {}));
    return client_->GetJob("bench").status();  // connected
  }

  v1::StreamStart Start(const std::string& job) {
    v1::StreamStart start;
    start.set_job(job);
    start.set_group(fmt::format("round-{}", ++group_));
    start.set_credit_bytes(uint64_t{256} << 20);
    return start;
  }

  absl::StatusOr<double> ReadStream() {
    const auto begin = Clock::now();
    Client::Call call(*client_);
    const auto stream = client_->features().StreamFeatures(call.context());
    v1::StreamFeaturesRequest request;
    *request.mutable_start() = Start("bench");
    stream->Write(request);
    v1::StreamFeaturesResponse message;
    size_t bytes = 0, of_sample = 0;
    while (stream->Read(&message) && !message.has_end()) {
      of_sample += message.data().states().size();
      if (of_sample < Bytes() / static_cast<size_t>(options_.samples)) continue;
      request.set_credit_bytes(of_sample);
      stream->Write(request);
      request.mutable_ack()->set_delivery(message.data().delivery());
      stream->Write(request);
      bytes += of_sample;
      of_sample = 0;
    }
    stream->WritesDone();
    while (stream->Read(&message)) {
    }
    const double seconds = SecondsSince(begin);
    STATETAP_RETURN_IF_ERROR(client_->StatusFrom(stream->Finish()));
    if (bytes != Bytes())
      return absl::DataLossError(fmt::format("{} of {} bytes came", bytes, Bytes()));
    return Rate(seconds);
  }

  absl::StatusOr<double> Receive() {
    const auto begin = Clock::now();
    STATETAP_RETURN_IF_ERROR(ReceiveAll(*client_, Start("bench")).status());
    return Rate(SecondsSince(begin));
  }

  absl::StatusOr<double> OpenMany() {
    const auto begin = Clock::now();
    v1::StreamStart start = Start("many");
    start.set_order(v1::STREAM_ORDER_SHUFFLED);
    STATETAP_ASSIGN_OR_RETURN(const auto receiver, FeatureReceiver::Open(*client_, start, {}));
    STATETAP_ASSIGN_OR_RETURN(const auto sample, receiver->Next());
    if (!sample) return absl::DataLossError("no sample came");
    return SecondsSince(begin);
  }

  absl::StatusOr<std::string> FlightPython() const {
    const char* const given = std::getenv("STATETAP_BENCH_VENV");
    const fs::path venv = given != nullptr ? given : options_.work / "statetap-bench-venv";
    const std::string python = (venv / "bin/python").string();
    const std::string check = fmt::format("{} -c 'import pyarrow.flight' 2>/dev/null", python);
    if (std::system(check.c_str()) == 0) return python;
    const std::string make = fmt::format(
        "python3 -m venv {0} && {0}/bin/pip install --quiet pyarrow 1>&2", venv.string());
    if (std::system(make.c_str()) == 0) return python;
    return absl::UnavailableError(
        fmt::format("pyarrow cannot be installed (`{}`); leave its case out with --cases", make));
  }

  absl::StatusOr<double> ReadFlight(const std::string& script, int port) const {
    FILE* const output = popen(fmt::format("{} get {}", script, port).c_str(), "r");
    double seconds = 0;
    size_t bytes = 0;
    const int read = output == nullptr ? 0 : std::fscanf(output, "%lf %zu", &seconds, &bytes);
    if (output != nullptr) pclose(output);
    if (read != 2 || bytes != Bytes())
      return absl::DataLossError(fmt::format("Flight gave {} of {} bytes", bytes, Bytes()));
    return Rate(seconds);
  }

  absl::StatusOr<double> ReadTcp(int port) const {
    const auto begin = Clock::now();
    const int connection = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    std::vector<char> buffer(size_t{1} << 20);
    size_t bytes = 0;
    if (connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
      for (ssize_t got; (got = recv(connection, buffer.data(), buffer.size(), 0)) > 0;)
        bytes += static_cast<size_t>(got);
    }
    close(connection);
    if (bytes != Bytes())
      return absl::DataLossError(fmt::format("the socket gave {} of {} bytes", bytes, Bytes()));
    return Rate(SecondsSince(begin));
  }

  absl::Status Case(const std::string& name, const Measure& ours, const std::string& baseline_name,
                    const Measure& baseline, const std::string& unit = "GB/s") {
    if (!HasCase(options_.cases, name)) return absl::OkStatus();
    return Compare({.bench = "stream_bench",
                    .name = name,
                    .baseline = baseline_name,
                    .unit = unit,
                    .rounds = options_.rounds},
                   ours, baseline);
  }

  const CaseOptions options_;
  const fs::path folder_;
  fs::path shard_;
  std::optional<testing::ServerProcess> server_;
  std::unique_ptr<Client> client_;
  int group_ = 0;
};

// For python_bench: what the cases read, for a server to be started on folder/data.
absl::Status Prepare(const fs::path& folder, const CaseOptions& options) {
  fs::create_directories(folder / "data");
  STATETAP_RETURN_IF_ERROR(
      testing::StoreJob(folder / "data",
                        {"bench", options.samples, options.tokens, kHidden, {2, 30, 58, 61}})
          .status());
  return testing::StoreJob(folder / "data", {"many", kOpenSamples, 16, 64, {2}}).status();
}

// For python_bench: the case `receiver` on a server that runs; prints seconds and bytes.
absl::Status ReceiveFrom(const std::string& server, const std::string& group) {
  STATETAP_ASSIGN_OR_RETURN(const auto client, Client::Create(server, {}));
  v1::StreamStart start;
  start.set_job("bench");
  start.set_group(group);
  start.set_credit_bytes(uint64_t{256} << 20);
  STATETAP_RETURN_IF_ERROR(client->GetJob("bench").status());  // connected
  const auto begin = Clock::now();
  STATETAP_ASSIGN_OR_RETURN(const int64_t bytes, ReceiveAll(*client, start));
  fmt::print("{} {}\n", SecondsSince(begin), bytes);
  return absl::OkStatus();
}

}  // namespace
}  // namespace statetap::bench

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == "--serve-tcp")
    return statetap::bench::ServeTcp(argv[2], std::strtoull(argv[3], nullptr, 10));
  statetap::bench::CaseOptions options{
      .cases = "stream,stream-tcp,first,receiver,open", .samples = 32, .tokens = 512};
  std::string prepare, receive, group = "python_bench";
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    options.Take(name, value);
    if (name == "--prepare") prepare = value;
    if (name == "--receive") receive = value;
    if (name == "--group") group = value;
  }
  const absl::Status status =
      !prepare.empty() ? statetap::bench::Prepare(prepare, options)
      : !receive.empty()
          ? statetap::bench::ReceiveFrom(receive, group)
          : statetap::bench::RunInFolder<statetap::bench::StreamBench>("stream-bench", options);
  if (status.ok()) return 0;
  fmt::print(stderr, "stream_bench: {}\n", statetap::MessageOf(status));
  return 1;
}
