// statetapd: loads a checkpoint and serves it. The ready line is all that goes to stdout; logs go
// to stderr. SIGTERM or SIGINT drains, a second one ends the process at once.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "extractor/base/log.h"
#include "extractor/checkpoint/checkpoint_index.h"
#include "extractor/checkpoint/hf_cache.h"
#include "server/config.h"
#include "server/server.h"

namespace statetap {
namespace {

// Waits for signals on a thread of its own: the first is returned to Wait, the second ends the
// process, even in the middle of loading.
class SignalWaiter {
 public:
  // REQUIRES: no other thread runs yet; all that start later inherit the mask.
  SignalWaiter() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);  // a file size limit is a failed write, not the end of the server
    std::thread([this] { Watch(); }).detach();
  }
  void Wait() { serving_.wait(true); }
  // Before: a signal ends the process at once, there is nothing to drain.
  void StartServing() { started_ = true; }
  // Ends Wait without a signal. From any thread.
  void Stop() {
    serving_ = false;
    serving_.notify_all();
  }

 private:
  void Watch() {
    int number = 0;
    sigwait(&signals_, &number);
    if (!started_) _exit(128 + number);
    Stop();
    sigwait(&signals_, &number);
    LogWarning("ended by a second signal");
    _exit(128 + number);
  }
  sigset_t signals_;
  std::atomic<bool> serving_{true}, started_{false};
};

void LogMemory(const Engine& engine) {
  const EngineInfo& info = engine.info();
  LogInfo("memory of {} ranks on backend {}:", engine.options().ranks, engine.options().backend);
  const auto row = [](std::string_view what, int64_t bytes, std::string_view note = "") {
    LogInfo("  {:<24} {:>10.3f} GB  {}", what, static_cast<double>(bytes) / 1e9, note);
  };
  const EngineInfo::Memory memory = info.AllRanks();
  row("weights", memory.weights);
  row("KV cache", memory.kv_cache,
      fmt::format("{} tokens at once, {} of one sample", info.kv_tokens,
                  std::min<int64_t>(info.kv_tokens, info.max_seq_len)));
  row("workspace", memory.workspace);
  row("capture buffers", memory.capture);
  row("host buffers of states", memory.host);
  if (info.kv_tokens < engine.options().max_batch_tokens) {
    LogWarning(
        "--kv-cache-gib holds {} tokens at once, fewer than a step takes (--max-batch-tokens {}): "
        "steps will not be filled",
        info.kv_tokens, engine.options().max_batch_tokens);
  }
}

absl::Status Serve(ServerConfig& config, SignalWaiter& signals) {
  STATETAP_ASSIGN_OR_RETURN(const DataFolderLock lock, DataFolderLock::Acquire(config.data));
  STATETAP_ASSIGN_OR_RETURN(const std::filesystem::path folder, ResolveModel(config.model));
  STATETAP_ASSIGN_OR_RETURN(const CheckpointIndex checkpoint, CheckpointIndex::Open(folder));
  LogInfo("loading {} ({:.2f} GB) from {}", checkpoint.name(),
          static_cast<double>(checkpoint.total_bytes()) / 1e9, checkpoint.folder().string());
  if (config.engine.max_seq_len > checkpoint.config().max_positions) {
    LogWarning("--max-seq-len {} is above the model's {} positions", config.engine.max_seq_len,
               checkpoint.config().max_positions);
  }
  double shown = -1;
  auto last = std::chrono::steady_clock::now();
  config.engine.load_progress = [&](const EngineOptions::LoadState& load) {
    const auto now = std::chrono::steady_clock::now();
    const bool due = load.fraction >= shown + 0.1 || now - last >= std::chrono::seconds(10);
    if (!due && load.fraction < 1) return;
    shown = load.fraction;
    last = now;
    LogInfo("loading {}: {:.0f} % at {:.2f} GB/s, {:.0f} s left", checkpoint.name(),
            100 * load.fraction, load.gigabytes_per_second, load.seconds_left);
  };
  STATETAP_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                            Engine::Open(checkpoint, config.engine));
  LogMemory(*engine);
  STATETAP_ASSIGN_OR_RETURN(ServedModel model,
                            ServedModel::Of(checkpoint, engine->options(), engine->info()));
  Server::Options options;
  options.data = config.data;
  options.shards = config.shards;
  options.listen = config.listen;
  options.http = config.http;
  options.http_token = config.http_token;
  options.runner.host_buffer_bytes = static_cast<int64_t>(config.host_buffer_gib * 0x1p30);
  options.runner.max_shard_bytes = static_cast<int64_t>(config.max_shard_bytes);
  if (config.retain_until_acknowledged)
    options.runner.retain = JobRunner::Options::Retain::kUntilAcknowledged;
  const bool exits = config.engine_failure == "exit";
  if (exits) options.engine_failed = [&] { signals.Stop(); };
  STATETAP_ASSIGN_OR_RETURN(const std::unique_ptr<Server> server,
                            Server::Start(options, std::move(model), *engine));
  signals.StartServing();
  fmt::print("statetapd ready grpc={} http={} model={} ranks={} backend={}\n",
             server->grpc_address(),
             server->http_address().empty() ? "off" : server->http_address(), checkpoint.name(),
             engine->options().ranks, engine->options().backend);
  std::fflush(stdout);
  signals.Wait();
  if (exits && !server->runner().engine_status().ok()) {
    server->Drain(std::chrono::seconds(0));
    LogError("ends as the engine has failed (--engine-failure exit)");
    _exit(1);  // a rank that is stuck would be waited for
  }
  LogInfo("draining for at most {} s; a second signal ends at once", config.drain_seconds);
  if (!server->Drain(std::chrono::seconds(config.drain_seconds))) {
    LogWarning(
        "drained, and left a step that was still running: its samples run again at the next start");
    _exit(0);  // the step would be waited for
  }
  LogInfo("drained");
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  ParsedArguments arguments = ParseArguments(argc, argv);
  if (!arguments.config) {
    std::fputs(arguments.text.c_str(), arguments.exit_code == 0 ? stdout : stderr);
    return arguments.exit_code;
  }
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);  // what goes wrong is said by us, once
  SignalWaiter signals;
  const absl::Status status = Serve(*arguments.config, signals);
  if (status.ok()) return 0;
  fmt::print(stderr, "statetapd: {}\n", MessageOf(status));
  return 1;
}

}  // namespace
}  // namespace statetap

int main(int argc, char** argv) { return statetap::Main(argc, argv); }
