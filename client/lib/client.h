// A server's statetap.v1, as calls that return StatusOr. Every call has a deadline or follows a
// stream; calls that change nothing are tried again while the server cannot be reached.
//
// Thread safe. CancelAll() from any thread ends every call that runs, and every later one, with
// CANCELLED. Errors carry the server's status code and message; where nobody answers, the message
// names the address and how to start a server.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "extractor/base/status.h"
#include "statetap/v1/features.grpc.pb.h"
#include "statetap/v1/jobs.grpc.pb.h"
#include "statetap/v1/model.grpc.pb.h"

namespace statetap {

struct ClientOptions {
  std::chrono::milliseconds deadline{30'000};    // of one call without a stream
  int attempts = 4;                              // of a call that changes nothing
  std::chrono::milliseconds first_backoff{200};  // doubles up to 5 s
  std::chrono::milliseconds patience{120'000};   // for the server of a watch or a stream
  // While a call waits: how often the server is pinged, and how long it may take to answer before
  // every call ends with UNAVAILABLE. A server whose machine vanished is noticed within a minute.
  std::chrono::milliseconds keepalive{30'000}, keepalive_timeout{20'000};
};

class Client {
 public:
  // `server`: HOST:PORT (or unix:PATH). INVALID_ARGUMENT where it has no port. Does not connect.
  static absl::StatusOr<std::unique_ptr<Client>> Create(std::string_view server,
                                                        const ClientOptions& options);
  ~Client();

  // Answers false once the server no longer listens: stop sending, its status follows.
  using Samples = google::protobuf::RepeatedPtrField<v1::SampleInput>;
  using SendSamples = std::function<bool(Samples)>;
  // `fill` sends batches (SampleBatcher makes good ones); if it fails nothing is left on the server
  // and its status is returned. Not tried again: the caller can, as an equal job is the same job.
  absl::StatusOr<v1::Job> CreateJob(const v1::JobOptions& options,
                                    const std::function<absl::Status(const SendSamples&)>& fill);
  absl::StatusOr<v1::Job> GetJob(const std::string& job);
  absl::StatusOr<std::vector<v1::Job>> ListJobs();
  absl::StatusOr<v1::Job> CancelJob(const std::string& job);
  absl::StatusOr<v1::Job> PauseJob(const std::string& job);
  absl::StatusOr<v1::Job> ResumeJob(const std::string& job);
  absl::StatusOr<v1::RetryJobResponse> RetryJob(const std::string& job);
  absl::StatusOr<v1::DeleteJobResponse> DeleteJob(const std::string& job);
  absl::StatusOr<v1::EvictJobResponse> EvictJob(const std::string& job);  // no deadline
  absl::StatusOr<v1::ExcludeSamplesResponse> ExcludeSamples(
      const v1::ExcludeSamplesRequest& request);
  // The job now and after every change, until it ended or `on_change` answers false; returns the
  // last state. Goes on through restarts of the server within `patience`; `on_lost` (may be null)
  // hears of each break.
  absl::StatusOr<v1::Job> WatchJob(const std::string& job,
                                   const std::function<bool(const v1::Job&)>& on_change,
                                   const std::function<void(const absl::Status&)>& on_lost);

  // Page by page, all of them that `where` holds for.
  absl::Status ForEachSample(const std::string& job, const std::string& where,
                             const std::function<absl::Status(const v1::Sample&)>& visit);
  absl::Status ForEachRejected(const std::string& job,
                               const std::function<absl::Status(const v1::Rejected&)>& visit);
  absl::StatusOr<v1::ListShardsResponse> ListShards(const std::string& job);
  absl::StatusOr<v1::CheckShardsResponse> CheckShards(const std::string& job);  // no deadline
  absl::StatusOr<v1::Statistics> GetStatistics(const std::string& job, const std::string& where,
                                               bool channels);

  absl::StatusOr<v1::ModelDescription> DescribeModel();
  // As CreateJob, and nothing is made. `pilot` may be empty.
  absl::StatusOr<v1::EstimateResponse> Estimate(
      const v1::JobOptions& options, const std::string& pilot,
      const std::function<absl::Status(const SendSamples&)>& fill);
  // Answers false once the server no longer listens.
  using SendRender = std::function<bool(const v1::RenderRequest&)>;
  // `fill` sends requests, on a thread of its own; `on_rendered` gets the answers in order. The
  // first failure of either ends the call and is returned.
  absl::Status Render(const std::function<absl::Status(const SendRender&)>& fill,
                      const std::function<absl::Status(const v1::Rendered&)>& on_rendered);
  absl::Status Generate(const v1::GenerateRequest& request,
                        const std::function<void(const v1::GenerateResponse&)>& on_message);

  void CancelAll();
  bool cancelled() const { return cancelled_; }
  const std::string& server() const { return server_; }
  const ClientOptions& options() const { return options_; }

  // For streams that are classes of their own (FeatureReceiver): a context that CancelAll reaches.
  class Call {
   public:
    explicit Call(Client& client);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    grpc::ClientContext* context() { return &context_; }

   private:
    Client& client_;
    grpc::ClientContext context_;
  };
  v1::Features::Stub& features() { return *features_; }
  absl::Status StatusFrom(const grpc::Status& status) const;
  // Sleeps before try number `attempt` (from 1); CANCELLED if CancelAll came.
  absl::Status Backoff(int attempt);

 private:
  Client(std::string server, const ClientOptions& options);
  template <typename Writer, typename Request>
  absl::Status Upload(Writer& writer, grpc::ClientContext& context, const Request& first,
                      const std::function<absl::Status(const SendSamples&)>& fill);
  template <typename Response, typename Method, typename Request>
  absl::StatusOr<Response> Ask(Method method, const Request& request,
                               std::chrono::milliseconds deadline, int attempts);

  std::string server_;
  ClientOptions options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Jobs::Stub> jobs_;
  std::unique_ptr<v1::Features::Stub> features_;
  std::unique_ptr<v1::Model::Stub> model_;
  std::atomic<bool> cancelled_ = false;
  std::mutex mutex_;
  std::unordered_set<grpc::ClientContext*> running_;
};

bool IsTerminal(v1::JobState state);

// Cuts a row of samples into messages of at most 4 MiB and 10,000 samples. A sample above that goes
// alone: the server decides about lengths.
class SampleBatcher {
 public:
  static constexpr size_t kMaxBytes = (size_t{4} << 20) - 4096;  // a margin for framing
  static constexpr int kMaxSamples = 10'000;

  explicit SampleBatcher(const Client::SendSamples& send) : send_(send) {}
  // ABORTED once the server no longer listens.
  absl::Status Add(v1::SampleInput sample);
  absl::Status Flush();

 private:
  const Client::SendSamples& send_;
  Client::Samples batch_;
  size_t bytes_ = 0;
};

}  // namespace statetap
