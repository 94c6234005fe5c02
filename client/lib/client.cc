#include "client/lib/client.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace statetap {
namespace {

constexpr std::chrono::milliseconds kMaxBackoff{5'000};
constexpr std::chrono::milliseconds kStatisticsDeadline{300'000};
// A watch is renewed this often: a server that hangs still answers pings, but not this.
constexpr std::chrono::seconds kWatchPeriod{120};
constexpr std::chrono::milliseconds kNoDeadline{0};
// Of calls that close a shard first: 4 GiB on a slow disk.
constexpr std::chrono::milliseconds kControlDeadline{300'000};

v1::GetJobRequest Named(const std::string& job) {
  v1::GetJobRequest request;
  request.set_job(job);
  return request;
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& server,
                                           const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // A proxy for the web is not on the way to a server named by host and port.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(options.keepalive.count()));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(options.keepalive_timeout.count()));
  // Else two pings are all that a client sends which only listens.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  return grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments);
}

bool HasPort(std::string_view server) {
  const size_t colon = server.rfind(':');
  if (colon == std::string_view::npos || colon == 0 || colon + 1 == server.size()) return false;
  return server.find_first_not_of("0123456789", colon + 1) == std::string_view::npos;
}

}  // namespace

bool IsTerminal(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

absl::StatusOr<std::unique_ptr<Client>> Client::Create(std::string_view server,
                                                       const ClientOptions& options) {
  if (server.find("://") != std::string_view::npos ||
      (!server.starts_with("unix:") && !HasPort(server)))
    return absl::InvalidArgumentError(
        fmt::format("server \"{}\": give HOST:PORT, as in 127.0.0.1:7070", server));
  return std::unique_ptr<Client>(new Client(std::string(server), options));
}

Client::Client(std::string server, const ClientOptions& options)
    : server_(std::move(server)),
      options_(options),
      channel_(MakeChannel(server_, options_)),
      jobs_(v1::Jobs::NewStub(channel_)),
      features_(v1::Features::NewStub(channel_)),
      model_(v1::Model::NewStub(channel_)) {}

Client::~Client() = default;

Client::Call::Call(Client& client) : client_(client) {
  const std::lock_guard lock(client_.mutex_);
  client_.running_.insert(&context_);
  if (client_.cancelled_) context_.TryCancel();
}

Client::Call::~Call() {
  const std::lock_guard lock(client_.mutex_);
  client_.running_.erase(&context_);
}

void Client::CancelAll() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  for (grpc::ClientContext* context : running_) context->TryCancel();
}

absl::Status Client::StatusFrom(const grpc::Status& status) const {
  if (status.ok()) return absl::OkStatus();
  if (cancelled_) return absl::CancelledError("interrupted");
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
      // A server that says it is unavailable has a connection; else nobody answered.
      if (channel_->GetState(false) != GRPC_CHANNEL_READY)
        return absl::UnavailableError(fmt::format(
            "cannot reach a server at {} ({}); start one with `statetapd --model DIR --data DIR`, "
            "or name another with --server HOST:PORT or STATETAP_SERVER",
            server_, status.error_message()));
      break;
    case grpc::StatusCode::CANCELLED:  // not by us
      return absl::UnavailableError(
          fmt::format("the server at {} ended the call ({}); is it shutting down?", server_,
                      status.error_message()));
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::DeadlineExceededError(fmt::format(
          "no answer from {} in time; is it overloaded, or is something else on that port?",
          server_));
    case grpc::StatusCode::UNIMPLEMENTED:
      return absl::UnimplementedError(
          fmt::format("the server at {} does not know this call ({}); is it an older statetapd?",
                      server_, status.error_message()));
    default: break;
  }
  return absl::Status(code, status.error_message());
}

absl::Status Client::Backoff(int attempt) {
  const auto wait =
      std::min(kMaxBackoff, options_.first_backoff * (1 << std::clamp(attempt - 1, 0, 10)));
  const auto until = std::chrono::steady_clock::now() + wait;
  while (std::chrono::steady_clock::now() < until) {
    if (cancelled_) return absl::CancelledError("interrupted");
    std::this_thread::sleep_for(std::min(wait, std::chrono::milliseconds(50)));
  }
  return absl::OkStatus();
}

template <typename Response, typename Method, typename Request>
absl::StatusOr<Response> Client::Ask(Method method, const Request& request,
                                     std::chrono::milliseconds deadline, int attempts) {
  for (int attempt = 1;; ++attempt) {
    Call call(*this);
    if (deadline != kNoDeadline)
      call.context()->set_deadline(std::chrono::system_clock::now() + deadline);
    Response response;
    const grpc::Status status = method(call.context(), request, &response);
    if (status.ok()) return response;
    if (status.error_code() != grpc::StatusCode::UNAVAILABLE || attempt >= attempts)
      return StatusFrom(status);
    STATETAP_RETURN_IF_ERROR(Backoff(attempt));
  }
}

// A stub's method as a function of context, request and response.
#define STATETAP_UNARY(stub, name)                                            \
  [this](grpc::ClientContext* context, const auto& request, auto* response) { \
    return stub->name(context, request, response);                            \
  }

absl::StatusOr<v1::Job> Client::GetJob(const std::string& job) {
  return Ask<v1::Job>(STATETAP_UNARY(jobs_, GetJob), Named(job), options_.deadline,
                      options_.attempts);
}

absl::StatusOr<std::vector<v1::Job>> Client::ListJobs() {
  STATETAP_ASSIGN_OR_RETURN(
      v1::ListJobsResponse response,
      Ask<v1::ListJobsResponse>(STATETAP_UNARY(jobs_, ListJobs), v1::ListJobsRequest(),
                                options_.deadline, options_.attempts));
  return std::vector<v1::Job>(std::make_move_iterator(response.mutable_jobs()->begin()),
                              std::make_move_iterator(response.mutable_jobs()->end()));
}

absl::StatusOr<v1::Job> Client::CancelJob(const std::string& job) {
  return Ask<v1::Job>(STATETAP_UNARY(jobs_, CancelJob), Named(job), kControlDeadline,
                      /*attempts=*/1);
}

absl::StatusOr<v1::Job> Client::PauseJob(const std::string& job) {
  return Ask<v1::Job>(STATETAP_UNARY(jobs_, PauseJob), Named(job), kControlDeadline,
                      /*attempts=*/1);
}

absl::StatusOr<v1::Job> Client::ResumeJob(const std::string& job) {
  return Ask<v1::Job>(STATETAP_UNARY(jobs_, ResumeJob), Named(job), kControlDeadline,
                      /*attempts=*/1);
}

absl::StatusOr<v1::RetryJobResponse> Client::RetryJob(const std::string& job) {
  return Ask<v1::RetryJobResponse>(STATETAP_UNARY(jobs_, RetryJob), Named(job), kControlDeadline,
                                   /*attempts=*/1);
}

absl::StatusOr<v1::DeleteJobResponse> Client::DeleteJob(const std::string& job) {
  return Ask<v1::DeleteJobResponse>(STATETAP_UNARY(jobs_, DeleteJob), Named(job), kControlDeadline,
                                    /*attempts=*/1);
}

absl::StatusOr<v1::EvictJobResponse> Client::EvictJob(const std::string& job) {
  return Ask<v1::EvictJobResponse>(STATETAP_UNARY(jobs_, EvictJob), Named(job), kNoDeadline,
                                   /*attempts=*/1);
}

absl::StatusOr<v1::ExcludeSamplesResponse> Client::ExcludeSamples(
    const v1::ExcludeSamplesRequest& request) {
  return Ask<v1::ExcludeSamplesResponse>(STATETAP_UNARY(jobs_, ExcludeSamples), request,
                                         kControlDeadline, options_.attempts);
}

absl::StatusOr<v1::ListShardsResponse> Client::ListShards(const std::string& job) {
  v1::ListShardsRequest request;
  request.set_job(job);
  return Ask<v1::ListShardsResponse>(STATETAP_UNARY(features_, ListShards), request,
                                     options_.deadline, options_.attempts);
}

absl::StatusOr<v1::CheckShardsResponse> Client::CheckShards(const std::string& job) {
  v1::ListShardsRequest request;
  request.set_job(job);
  return Ask<v1::CheckShardsResponse>(STATETAP_UNARY(features_, CheckShards), request, kNoDeadline,
                                      options_.attempts);
}

absl::StatusOr<v1::Statistics> Client::GetStatistics(const std::string& job,
                                                     const std::string& where, bool channels) {
  v1::GetStatisticsRequest request;
  request.set_job(job);
  request.set_where(where);
  request.set_channels(channels);
  return Ask<v1::Statistics>(STATETAP_UNARY(features_, GetStatistics), request, kStatisticsDeadline,
                             options_.attempts);
}

absl::StatusOr<v1::ModelDescription> Client::DescribeModel() {
  return Ask<v1::ModelDescription>(STATETAP_UNARY(model_, DescribeModel),
                                   v1::DescribeModelRequest(), options_.deadline,
                                   options_.attempts);
}

absl::Status Client::ForEachSample(const std::string& job, const std::string& where,
                                   const std::function<absl::Status(const v1::Sample&)>& visit) {
  v1::ListSamplesRequest request;
  request.set_job(job);
  request.set_where(where);
  do {
    STATETAP_ASSIGN_OR_RETURN(
        const v1::ListSamplesResponse page,
        Ask<v1::ListSamplesResponse>(STATETAP_UNARY(jobs_, ListSamples), request, options_.deadline,
                                     options_.attempts));
    for (const v1::Sample& sample : page.samples()) STATETAP_RETURN_IF_ERROR(visit(sample));
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  return absl::OkStatus();
}

absl::Status Client::ForEachRejected(
    const std::string& job, const std::function<absl::Status(const v1::Rejected&)>& visit) {
  v1::ListSamplesRequest request;
  request.set_job(job);
  do {
    STATETAP_ASSIGN_OR_RETURN(
        const v1::ListRejectedResponse page,
        Ask<v1::ListRejectedResponse>(STATETAP_UNARY(jobs_, ListRejected), request,
                                      options_.deadline, options_.attempts));
    for (const v1::Rejected& rejected : page.rejected()) STATETAP_RETURN_IF_ERROR(visit(rejected));
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  return absl::OkStatus();
}

// Sends `first`, then what `fill` gives as further messages; the status of the call, or of `fill`
// where that broke off.
template <typename Writer, typename Request>
absl::Status Client::Upload(Writer& writer, grpc::ClientContext& context, const Request& first,
                            const std::function<absl::Status(const SendSamples&)>& fill) {
  bool open = writer.Write(first);
  if (open) {
    const absl::Status filled = fill([&](Samples samples) {
      Request batch;
      *batch.mutable_samples() = std::move(samples);
      open = open && writer.Write(batch);
      return open;
    });
    if (!filled.ok() && open) {  // else the server's status says more
      context.TryCancel();
      (void)writer.Finish();
      return filled;
    }
  }
  if (open) writer.WritesDone();
  return StatusFrom(writer.Finish());
}

absl::StatusOr<v1::Job> Client::CreateJob(
    const v1::JobOptions& options, const std::function<absl::Status(const SendSamples&)>& fill) {
  Call call(*this);
  v1::Job job;
  const auto writer = jobs_->CreateJob(call.context(), &job);
  v1::CreateJobRequest first;
  *first.mutable_options() = options;
  STATETAP_RETURN_IF_ERROR(Upload(*writer, *call.context(), first, fill));
  return job;
}

absl::StatusOr<v1::EstimateResponse> Client::Estimate(
    const v1::JobOptions& options, const std::string& pilot,
    const std::function<absl::Status(const SendSamples&)>& fill) {
  Call call(*this);
  v1::EstimateResponse response;
  const auto writer = model_->Estimate(call.context(), &response);
  v1::EstimateRequest first;
  *first.mutable_options() = options;
  first.set_pilot(pilot);
  STATETAP_RETURN_IF_ERROR(Upload(*writer, *call.context(), first, fill));
  return response;
}

absl::Status SampleBatcher::Add(v1::SampleInput sample) {
  const size_t bytes = sample.ByteSizeLong() + 8;  // its tag and length
  if (batch_.size() >= kMaxSamples || (bytes_ > 0 && bytes_ + bytes > kMaxBytes))
    STATETAP_RETURN_IF_ERROR(Flush());
  *batch_.Add() = std::move(sample);
  bytes_ += bytes;
  return absl::OkStatus();
}

absl::Status SampleBatcher::Flush() {
  if (batch_.empty()) return absl::OkStatus();
  const bool open = send_(std::exchange(batch_, {}));
  bytes_ = 0;
  return open ? absl::OkStatus() : absl::AbortedError("the server ended the upload");
}

absl::StatusOr<v1::Job> Client::WatchJob(const std::string& job,
                                         const std::function<bool(const v1::Job&)>& on_change,
                                         const std::function<void(const absl::Status&)>& on_lost) {
  v1::GetJobRequest request;
  request.set_job(job);
  auto last_heard = std::chrono::steady_clock::now();
  bool ever_heard = false;
  for (int attempt = 1;;) {
    Call call(*this);
    const auto began = std::chrono::steady_clock::now();
    call.context()->set_deadline(std::chrono::system_clock::now() + kWatchPeriod);
    const auto reader = jobs_->WatchJob(call.context(), request);
    v1::Job state;
    bool heard = false;
    while (reader->Read(&state)) {
      heard = true;
      const bool go_on = on_change(state);
      if (!go_on) call.context()->TryCancel();
      if (!go_on || IsTerminal(state.state())) return state;
    }
    const grpc::Status status = reader->Finish();
    if (heard) {
      last_heard = std::chrono::steady_clock::now();
      ever_heard = true;
      // A server that shuts down tells a job's state each time that it is asked, and ends the
      // watch.
      if (last_heard - began > kMaxBackoff) attempt = 1;
    }
    if (heard && status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) continue;
    const absl::Status lost =
        status.ok() ? absl::UnavailableError("the server ended the watch") : StatusFrom(status);
    const bool enough = ever_heard
                            ? std::chrono::steady_clock::now() - last_heard > options_.patience
                            : attempt >= options_.attempts;
    if (!absl::IsUnavailable(lost) || enough) return lost;
    if (ever_heard && attempt == 1 && on_lost != nullptr) on_lost(lost);
    STATETAP_RETURN_IF_ERROR(Backoff(attempt++));
  }
}

absl::Status Client::Render(const std::function<absl::Status(const SendRender&)>& fill,
                            const std::function<absl::Status(const v1::Rendered&)>& on_rendered) {
  Call call(*this);
  const auto stream = model_->Render(call.context());
  absl::Status sending, receiving;
  std::atomic<bool> open = true;
  std::thread sender([&] {
    sending = fill([&](const v1::RenderRequest& request) {
      open = open && stream->Write(request);
      return open.load();
    });
    if (sending.ok()) {
      stream->WritesDone();
    } else if (open) {
      call.context()->TryCancel();
    }
  });
  v1::Rendered rendered;
  while (receiving.ok() && stream->Read(&rendered)) {
    receiving = on_rendered(rendered);
    if (!receiving.ok()) call.context()->TryCancel();
  }
  sender.join();
  const grpc::Status status = stream->Finish();
  STATETAP_RETURN_IF_ERROR(receiving);
  // Where the server ended the call, its status says more than the failed write.
  if (!sending.ok() && (open || status.ok())) return sending;
  return StatusFrom(status);
}

absl::Status Client::Generate(const v1::GenerateRequest& request,
                              const std::function<void(const v1::GenerateResponse&)>& on_message) {
  Call call(*this);
  const auto reader = model_->Generate(call.context(), request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) on_message(response);
  return StatusFrom(reader->Finish());
}

}  // namespace statetap
