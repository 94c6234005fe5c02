// Tokens in, hidden states out: continuous batching over the model's ranks.
//
// Engine::Open loads a checkpoint onto the ranks and, on GPUs, runs steps of its own until nothing
// is left that a first step would have to choose or load; Run works until the source ends. One Run
// at a time; its thread calls source and sink, and others of the engine's hand out states. This is
// the fault boundary: whatever a device throws below becomes the Status that Run returns, after
// every rank has stopped.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "extractor/checkpoint/checkpoint_index.h"
#include "extractor/engine/hidden_state_sink.h"

namespace statetap {

class Backend;
class ParallelLayout;
struct ModelWeights;

struct EngineOptions {
  std::string backend = "cpu";   // cpu or cuda; auto: cuda where there is a GPU
  std::string kernels = "auto";  // of the cuda backend: auto, portable or hopper
  // How its ranks pass rows to each other: peer (reading each other's memory), nccl, or auto: peer
  // where the GPUs can, NCCL otherwise.
  std::string comm = "auto";
  // Must divide the heads, widths and experts: Open says which does not. 0: a rank a GPU, 1 on the
  // CPU.
  int ranks = 1;
  enum class Experts { kExpert, kTensor } experts = Experts::kExpert;
  int max_seq_len = 0;  // 0: the model's positions
  // Tokens of a step, prefill and decode together. 0: 16,384 on GPUs, where steps of a large model
  // want as many; 512 on the CPU.
  int max_batch_tokens = 512;
  int max_running = 256;  // samples in flight
  // Of all ranks together. 0: nine tenths of what is left on GPUs, a GiB on the CPU; never more
  // than max_running samples of max_seq_len tokens use.
  int64_t kv_cache_bytes = int64_t{1} << 30;
  double inner_eps = 0;  // of the two inner norms; 0: the config's rms_norm_eps
  int threads = 0;       // CPU threads of all ranks together; 0: one a core
  // From 256 tokens on the residual stream is sharded by tokens; kAlways and kNever are for tests.
  enum class Residual { kAuto, kSharded, kReplicated } residual = Residual::kAuto;
  // A step that takes longer has a dead or stuck rank. 0: 20 s on GPUs (more only where
  // max_batch_tokens is above 64K); on the CPU, whose steps of a large model can take that long by
  // themselves, half an hour. Steps that Open runs have five minutes each.
  std::chrono::milliseconds step_timeout{0};
  struct LoadState {
    double gigabytes_per_second = 0, fraction = 0, seconds_left = 0;
  };
  std::function<void(const LoadState&)> load_progress;
  int hand_out_threads = 0;  // that look through and hand out states; 0: a quarter of the cores, at
                             // most 8
  // For tests of faults: called on each rank's thread before each step, counted from 0. May throw
  // or not come back.
  std::function<void(int rank, int64_t step)> before_step;
  // For benches: makes a rank's weights, each on a thread of its own, and none are read.
  std::function<ModelWeights(Backend& backend, const ModelConfig& config,
                             const ParallelLayout& layout, int rank)>
      make_weights;
};

struct EngineInfo {
  // In bytes. Capture: states on their way out of the device; host: where they come.
  struct Memory {
    int64_t weights = 0, kv_cache = 0, workspace = 0, capture = 0, host = 0;
  };
  std::vector<Memory> ranks;
  Memory AllRanks() const {
    Memory all;
    for (const Memory& rank : ranks) {
      all.weights += rank.weights;
      all.kv_cache += rank.kv_cache;
      all.workspace += rank.workspace;
      all.capture += rank.capture;
      all.host += rank.host;
    }
    return all;
  }
  int64_t kv_tokens = 0;  // that fit
  int max_seq_len = 0;
};

class Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Open(const CheckpointIndex& checkpoint,
                                                      const EngineOptions& options);
  virtual ~Engine() = default;

  // Runs samples until source.Wait() returns false or source.Stopping(). UNAVAILABLE: a rank
  // failed, or a step did not end within step_timeout; what ran is neither finished nor failed for
  // the sink, and every later Run returns the same status.
  virtual absl::Status Run(SampleSource& source, HiddenStateSink& sink) = 0;
  virtual const EngineInfo& info() const = 0;
  virtual const EngineOptions& options() const = 0;
};

}  // namespace statetap
