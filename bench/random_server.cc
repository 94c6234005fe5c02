// statetapd with Kimi-K2.5's random weights, made on the GPUs: whole jobs at full size where no
// checkpoint of 595 GB is. It takes statetapd's flags; --model names a folder that is made where it
// is missing, config, tokenizer and tensors' headers without weights. Its samples are worth
// nothing. SIGTERM drains.
//
//   random_server --layers 61 --model DIR --data DIR --tp 8 …
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <vector>

#include "bench/random_model.h"
#include "extractor/backend/cuda/cuda_backend.h"
#include "extractor/base/log.h"
#include "extractor/checkpoint/maker.h"
#include "server/config.h"
#include "server/server.h"

namespace statetap::bench {
namespace {

absl::Status Serve(ServerConfig& config, int layers) {
  const std::filesystem::path folder = config.model;
  if (!std::filesystem::exists(folder)) {
    MakeOptions options;
    options.preset = "kimi-k2.5";
    options.layers = layers;
    options.holes = true;
    STATETAP_RETURN_IF_ERROR(MakeCheckpoint(folder, options).status());
  }
  if (NumGpus() == 0) return absl::FailedPreconditionError("no GPU can be used here");
  STATETAP_ASSIGN_OR_RETURN(const DataFolderLock lock, DataFolderLock::Acquire(config.data));
  STATETAP_ASSIGN_OR_RETURN(const CheckpointIndex checkpoint, CheckpointIndex::Open(folder));
  config.engine.backend = "cuda";
  config.engine.make_weights = RandomWeights;
  STATETAP_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                            Engine::Open(checkpoint, config.engine));
  STATETAP_ASSIGN_OR_RETURN(ServedModel model,
                            ServedModel::Of(checkpoint, engine->options(), engine->info()));
  model.scorer = nullptr;  // the head on the GPUs is another than the checkpoint's
  Server::Options options;
  options.data = config.data;
  options.shards = config.shards;
  options.listen = config.listen;
  options.runner.host_buffer_bytes = static_cast<int64_t>(config.host_buffer_gib * 0x1p30);
  STATETAP_ASSIGN_OR_RETURN(const std::unique_ptr<Server> server,
                            Server::Start(options, std::move(model), *engine));
  std::printf("random_server ready grpc=%s: RANDOM WEIGHTS, %d layers, %d ranks\n",
              server->grpc_address().c_str(), checkpoint.config().num_layers,
              engine->options().ranks);
  std::fflush(stdout);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  int number = 0;
  sigwait(&signals, &number);
  server->Drain(std::chrono::seconds(config.drain_seconds));
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  // All threads inherit it; before it serves a signal waits for that.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  int layers = 61;
  std::vector<const char*> rest;
  for (int i = 0; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--layers" && i + 1 < argc) {
      layers = std::atoi(argv[++i]);
    } else {
      rest.push_back(argv[i]);
    }
  }
  ParsedArguments arguments = ParseArguments(static_cast<int>(rest.size()), rest.data());
  if (!arguments.config) {
    std::fputs(arguments.text.c_str(), stderr);
    return arguments.exit_code;
  }
  const absl::Status status = Serve(*arguments.config, layers);
  if (status.ok()) return 0;
  fmt::print(stderr, "random_server: {}\n", MessageOf(status));
  return 1;
}

}  // namespace
}  // namespace statetap::bench

int main(int argc, char** argv) { return statetap::bench::Main(argc, argv); }
