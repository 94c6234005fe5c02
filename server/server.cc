#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <limits>
#include <mutex>
#include <utility>

#include "extractor/base/log.h"
#include "server/rpc/features_service.h"
#include "server/rpc/jobs_service.h"
#include "server/rpc/model_service.h"
#include "server/web/completions.h"
#include "server/web/http_server.h"
#include "server/web/metrics.h"
#include "server/web/pages.h"

namespace statetap {
namespace {

// The library's own: a sample is one message, and only admission decides that one is too long.
constexpr int kMaxReceiveBytes = std::numeric_limits<int>::max();
// Calls that have not ended by then are cut.
constexpr std::chrono::seconds kCallsEnd{2};

void Configure(grpc::ServerBuilder& builder, const Server::Options& options) {
  builder.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  builder.SetMaxSendMessageSize(-1);
  // A second server on the port must fail, not share it.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients may ping as often as every second, calls or none, and are never cut for it.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS,
                             static_cast<int>(options.keepalive.count()));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             static_cast<int>(options.keepalive_timeout.count()));
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
}

}  // namespace

struct Server::Impl {
  Impl(const Options& options, ServedModel served, Engine& served_by,
       std::unique_ptr<JobStore> jobs)
      : model(std::move(served)),
        engine(served_by),
        folders(options.data, options.shards),
        store(std::move(jobs)),
        shards(*store, folders, ShardCache::kMaxOpen, model.scorer) {}

  absl::Status Listen(const Options& options);
  absl::Status ServeHttp(const Options& options);
  // Tells the health service how it is now. From any thread.
  void UpdateHealth();

  const ServedModel model;
  Engine& engine;
  ShardFolders folders;
  const std::unique_ptr<JobStore> store;
  ShardCache shards;
  ConsumerGroups groups;
  std::atomic<bool> draining{false};
  std::unique_ptr<JobRunner> runner;
  std::unique_ptr<JobsService> jobs_service;
  std::unique_ptr<FeaturesService> features_service;
  std::unique_ptr<ModelService> model_service;
  std::mutex health_mutex;  // guards that grpc_server comes and goes
  std::unique_ptr<grpc::Server> grpc_server;
  std::unique_ptr<HttpServer> http_server;
  std::string grpc_address, http_address;
};

absl::Status Server::Impl::Listen(const Options& options) {
  const ServiceContext context{*store, model, engine, *runner, folders, shards, groups, draining};
  jobs_service = std::make_unique<JobsService>(context);
  features_service = std::make_unique<FeaturesService>(context);
  model_service = std::make_unique<ModelService>(context);
  STATETAP_ASSIGN_OR_RETURN(const HostPort where, ParseHostPort(options.listen));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  Configure(builder, options);
  int port = 0;
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(jobs_service.get());
  builder.RegisterService(features_service.get());
  builder.RegisterService(model_service.get());
  auto built = builder.BuildAndStart();
  if (built == nullptr || port == 0) {
    return absl::AlreadyExistsError(
        fmt::format("cannot listen on {}: the port is taken or the address is not of this machine; "
                    "give another "
                    "--listen",
                    options.listen));
  }
  grpc_address = options.listen.substr(0, options.listen.rfind(':') + 1) + std::to_string(port);
  {
    const std::lock_guard lock(health_mutex);
    grpc_server = std::move(built);
  }
  UpdateHealth();
  return absl::OkStatus();
}

void Server::Impl::UpdateHealth() {
  const std::lock_guard lock(health_mutex);
  if (grpc_server == nullptr) return;  // before it listens; Listen calls again
  auto* health = grpc_server->GetHealthCheckService();
  if (health == nullptr) return;
  const bool serving = !draining && runner->engine_status().ok();
  for (const char* service : {"", "statetap.v1.Jobs", "statetap.v1.Features", "statetap.v1.Model"})
    health->SetServingStatus(service, serving);
}

absl::Status Server::Impl::ServeHttp(const Options& options) {
  if (options.http.empty()) return absl::OkStatus();
  HttpServer::Handlers handlers;
  handlers.health = [this]() -> HttpServer::Health {
    if (draining) return {false, "the server is shutting down"};
    if (const absl::Status engine = runner->engine_status(); !engine.ok())
      return {false, std::string(MessageOf(engine))};
    std::string text = "ok";
    for (const ShardFolders::Root& root : folders.roots()) {
      if (root.failure.empty()) continue;
      text += fmt::format("; shard folder {} {}: {}", root.path.string(),
                          root.out_of_use ? "is out of use until a restart"
                          : root.lost     ? "is lost"
                                          : "cannot be written",
                          root.failure);
    }
    return {true, text};
  };
  handlers.metrics = [metrics = std::make_shared<Metrics>(*store, *runner, model, folders,
                                                          engine)] { return metrics->Text(); };
  const int64_t most_tokens = std::min<int64_t>(model.max_seq_len, engine.info().kv_tokens);
  handlers.others =
      [pages = std::make_shared<Pages>(*store, *runner, model, folders, shards, options.http_token),
       completions = std::make_shared<Completions>(*runner, model, static_cast<int>(most_tokens))](
          const HttpRequest& request) {
        if (auto reply = completions->Handle(request)) return *std::move(reply);
        return pages->Handle(request);
      };
  STATETAP_ASSIGN_OR_RETURN(http_server, HttpServer::Start(options.http, std::move(handlers)));
  http_address = http_server->address();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& options, ServedModel model,
                                                      Engine& engine) {
  STATETAP_ASSIGN_OR_RETURN(
      std::unique_ptr<JobStore> store,
      JobStore::Open(options.data / "statetap.db", {.verify_counts = options.verify_counts}));
  auto impl = std::make_unique<Impl>(options, std::move(model), engine, std::move(store));
  JobRunner::Options runner_options = options.runner;
  runner_options.engine_failed = [raw = impl.get(), then = options.engine_failed] {
    raw->UpdateHealth();
    if (then) then();
  };
  STATETAP_ASSIGN_OR_RETURN(impl->runner, JobRunner::Start(*impl->store, impl->model, engine,
                                                           impl->folders, runner_options));
  std::unique_ptr<Server> server(new Server(std::move(impl)));
  STATETAP_RETURN_IF_ERROR(server->impl_->Listen(options));
  STATETAP_RETURN_IF_ERROR(server->impl_->ServeHttp(options));
  return server;
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() { Drain(std::chrono::milliseconds(0)); }

const std::string& Server::grpc_address() const { return impl_->grpc_address; }
const std::string& Server::http_address() const { return impl_->http_address; }
JobRunner& Server::runner() { return *impl_->runner; }

bool Server::Drain(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  impl_->draining = true;
  impl_->UpdateHealth();
  const bool ended = impl_->runner->Drain(deadline);
  if (impl_->features_service != nullptr) impl_->features_service->StopStreams();
  if (impl_->grpc_server != nullptr) {
    impl_->grpc_server->Shutdown(std::chrono::system_clock::now() + kCallsEnd);
    impl_->grpc_server->Wait();
    const std::lock_guard lock(impl_->health_mutex);
    impl_->grpc_server.reset();
  }
  if (ended) impl_->http_server.reset();
  return ended;
}

}  // namespace statetap
