#include "extractor/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "extractor/backend/backend.h"
#ifdef STATETAP_CUDA
#include "extractor/backend/cuda/cuda_backend.h"
#endif
#include "extractor/engine/rank_group.h"
#include "extractor/engine/scheduler.h"
#include "extractor/model/transformer.h"

namespace statetap {
namespace {

constexpr int kLogitRowsAtOnce = 64;
constexpr int kShardedFrom =
    257;  // tokens of a step from which the residual stream is sharded by tokens
// A GPU is through with as many tokens in seconds; callers hear of a failure within 30 s.
constexpr int kTokensOfGpuStep = 65'536;
constexpr std::chrono::milliseconds kGpuStep = std::chrono::seconds(20),
                                    kCpuStep = std::chrono::seconds(1800);

int GpusHere() {
#ifdef STATETAP_CUDA
  return NumGpus();
#else
  return 0;
#endif
}

// What "auto" and 0 ranks mean on this machine.
void Resolve(EngineOptions& options) {
  const int gpus = options.backend == "cpu" ? 0 : GpusHere();
  if (options.backend == "auto") options.backend = gpus > 0 ? "cuda" : "cpu";
  if (options.ranks == 0) options.ranks = std::max(1, gpus);
}

absl::StatusOr<std::vector<std::unique_ptr<Backend>>> MakeBackends(const EngineOptions& options) {
  if (options.backend == "cpu") return MakeCpuBackends(options.ranks, options.threads);
#ifdef STATETAP_CUDA
  if (options.backend == "cuda") {
    if (NumGpus() == 0) {
      return absl::FailedPreconditionError(
          "--backend cuda: no GPU can be used here (is a driver installed?); --backend cpu needs "
          "none");
    }
    CudaOptions cuda;
    if (options.kernels == "portable") {
      cuda.kernels = CudaOptions::Kernels::kPortable;
    } else if (options.kernels == "hopper") {
      cuda.kernels = CudaOptions::Kernels::kHopper;
    } else if (options.kernels != "auto") {
      return absl::InvalidArgumentError(
          fmt::format("--kernels {}: there are auto, portable and hopper", options.kernels));
    }
    if (options.comm == "peer") {
      cuda.comm = CudaOptions::Comm::kPeer;
    } else if (options.comm == "nccl") {
      if (!HasNccl()) {
        return absl::InvalidArgumentError(
            "--comm nccl: this build has no NCCL; build where CMake finds it, or take --comm peer");
      }
      if (options.ranks > NumGpus()) {
        return absl::InvalidArgumentError(fmt::format(
            "--comm nccl: NCCL refuses two ranks on one GPU, and {} ranks have {} here; take "
            "--comm peer, or --tp {}",
            options.ranks, NumGpus() == 1 ? "one GPU" : fmt::format("{} GPUs", NumGpus()),
            NumGpus()));
      }
      cuda.comm = CudaOptions::Comm::kNccl;
    } else if (options.comm != "auto") {
      return absl::InvalidArgumentError(
          fmt::format("--comm {}: there are auto, peer and nccl", options.comm));
    }
    return MakeCudaBackends(options.ranks, cuda);
  }
  constexpr std::string_view kAvailable = "cpu, cuda";
#else
  constexpr std::string_view kAvailable = "cpu";
#endif
  return absl::InvalidArgumentError(fmt::format(
      "backend \"{}\" is not part of this build; available: {}", options.backend, kAvailable));
}

// What the ranks' threads work with: theirs too, as a stuck one may be left behind.
struct Ranks {
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<std::unique_ptr<Transformer>> models;
  StepOutput output;
};

std::chrono::milliseconds StepTimeout(const EngineOptions& options) {
  if (options.step_timeout.count() > 0) return options.step_timeout;
  if (options.backend != "cuda") return kCpuStep;
  return kGpuStep * std::max(1, options.max_batch_tokens / kTokensOfGpuStep);
}

// From the checkpoint, or made.
absl::StatusOr<std::vector<ModelWeights>> Weights(
    const CheckpointIndex& checkpoint, const ParallelLayout& layout,
    std::span<const std::unique_ptr<Backend>> backends, const EngineOptions& options) {
  if (options.make_weights) {
    std::vector<ModelWeights> weights(backends.size());
    STATETAP_RETURN_IF_ERROR(RankGroup(backends).RunAll([&](int rank) {
      const auto number = static_cast<size_t>(rank);
      weights[number] = options.make_weights(*backends[number], checkpoint.config(), layout, rank);
    }));
    return weights;
  }
  LoadOptions load;
  // Each waits for the disk most of the time.
  load.num_threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 4, 32);
  if (options.load_progress) {
    load.progress = [&options](const LoadProgress& p) {
      const auto done = static_cast<double>(p.bytes_done),
                 total = static_cast<double>(p.bytes_total);
      const double rate = p.seconds > 0 ? done / p.seconds : 0;
      options.load_progress(
          {rate / 1e9, total > 0 ? done / total : 1, rate > 0 ? (total - done) / rate : 0});
    };
  }
  return LoadWeights(checkpoint, layout, backends, load);
}

class EngineImpl final : public Engine {
 public:
  ~EngineImpl() override {
    group_ = nullptr;
    // A GPU may still be at work on the memory of a group that failed: it stays until the process
    // ends.
    if (!status_.ok() && options_.backend == "cuda")
      new std::shared_ptr<Ranks>(ranks_);  // NOLINT: on purpose
  }
  absl::Status Load(const CheckpointIndex& checkpoint, const EngineOptions& options);
  absl::Status Run(SampleSource& source, HiddenStateSink& sink) override;
  const EngineInfo& info() const override { return info_; }
  const EngineOptions& options() const override { return options_; }

 private:
  absl::Status CheckTask(const SampleTask& task) const;
  void Admit(SampleSource& source, HiddenStateSink& sink);
  void GiveUp(std::span<const uint64_t> tickets, HiddenStateSink& sink);
  absl::Status MakeRoomForStates(int num_boundaries);
  absl::Status RunStep(const std::shared_ptr<const ScheduledStep>& step);
  void HandOut(const ScheduledRows& rows, const StepPlan& plan, HiddenStateSink& sink);
  bool HandOutStates(const ScheduledRows& rows, int first, const StepPlan& plan,
                     HiddenStateSink& sink);
  bool HandOutTokens(const ScheduledRows& rows, HiddenStateSink& sink);
  void Fail(const Sequence& sequence, HiddenStateSink::Failure failure, HiddenStateSink& sink);
  bool Sharded(int num_tokens) const;

  EngineOptions options_;
  EngineInfo info_;
  ModelConfig config_;
  const std::shared_ptr<Ranks> ranks_ = std::make_shared<Ranks>();
  std::unique_ptr<RankGroup> group_;
  std::unique_ptr<Scheduler> scheduler_;
  int64_t steps_ = 0;
  absl::Status status_;
};

absl::Status EngineImpl::Load(const CheckpointIndex& checkpoint, const EngineOptions& wanted) {
  options_ = wanted;
  Resolve(options_);
  const EngineOptions& options = options_;
  config_ = checkpoint.config();
  const auto experts = options.experts == EngineOptions::Experts::kTensor ? ExpertLayout::kTensor
                                                                          : ExpertLayout::kExpert;
  STATETAP_ASSIGN_OR_RETURN(
      const ParallelLayout layout,
      ParallelLayout::Make(config_, options.ranks, experts, checkpoint.quantized()));
  STATETAP_ASSIGN_OR_RETURN(ranks_->backends, MakeBackends(options));
  const auto& backends = ranks_->backends;

  ModelLimits limits;
  limits.max_tokens = std::max(1, options.max_batch_tokens);
  limits.max_context = options.max_seq_len > 0 ? options.max_seq_len : config_.max_positions;
  limits.max_logit_rows = std::min(limits.max_tokens, kLogitRowsAtOnce);
  limits.inner_eps = options.inner_eps > 0 ? options.inner_eps : config_.rms_norm_eps;
  const int64_t page_bytes = Transformer::PageBytes(config_, backends[0]->activation_bytes());
  // No more pages than max_running sequences of full length can use.
  const int64_t useful =
      int64_t{options.max_running} * ((limits.max_context + kPageTokens - 1) / kPageTokens);
  limits.num_pages =
      static_cast<int>(std::min(options.kv_cache_bytes / options.ranks / page_bytes, useful));
  if (limits.num_pages < 1) {
    return absl::InvalidArgumentError(fmt::format(
        "--kv-cache-gib: {} bytes hold no page of {} tokens ({} bytes on each of {} ranks)",
        options.kv_cache_bytes, kPageTokens, page_bytes, options.ranks));
  }

  STATETAP_ASSIGN_OR_RETURN(std::vector<ModelWeights> weights,
                            Weights(checkpoint, layout, backends, options));
  for (size_t rank = 0; rank < backends.size(); ++rank) {
    ranks_->models.push_back(std::make_unique<Transformer>(config_, layout, *backends[rank],
                                                           std::move(weights[rank]), limits));
  }
  group_ = std::make_unique<RankGroup>(backends, StepTimeout(options));
  scheduler_ = std::make_unique<Scheduler>(
      Scheduler::Limits{limits.max_tokens, std::max(1, options.max_running), limits.num_pages});
  StepOutput& output = ranks_->output;
  output.chosen.resize(static_cast<size_t>(limits.max_tokens));
  STATETAP_RETURN_IF_ERROR(MakeRoomForStates(limits.num_boundaries));
  for (const auto& backend : backends) {
    const Backend::Memory memory = backend->memory();
    info_.ranks.push_back(
        {memory.weights, memory.kv_cache, memory.workspace, memory.capture, memory.host});
  }
  info_.kv_tokens = int64_t{limits.num_pages} * kPageTokens;
  info_.max_seq_len = limits.max_context;
  return absl::OkStatus();
}

bool EngineImpl::Sharded(int num_tokens) const {
  if (options_.ranks == 1 || options_.residual == EngineOptions::Residual::kReplicated)
    return false;
  return options_.residual == EngineOptions::Residual::kSharded || num_tokens >= kShardedFrom;
}

// What can never run is the sample's fault, and only that sample's.
absl::Status EngineImpl::CheckTask(const SampleTask& task) const {
  const auto length = static_cast<int64_t>(task.input_ids.size());
  if (length == 0) return absl::InvalidArgumentError("the sample has no tokens");
  for (size_t i = 0; i < task.input_ids.size(); ++i) {
    if (task.input_ids[i] < 0 || task.input_ids[i] >= config_.vocab) {
      return absl::InvalidArgumentError(fmt::format("token {} is {}: ids of this model are 0 to {}",
                                                    i, task.input_ids[i], config_.vocab - 1));
    }
  }
  for (const int boundary : task.boundaries) {
    if (boundary < 0 || boundary > config_.num_layers) {
      return absl::InvalidArgumentError(fmt::format("boundary {} requested; this model has 0 to {}",
                                                    boundary, config_.num_layers));
    }
  }
  int64_t longest = length;
  if (task.generate) {
    if (task.max_new_tokens < 1)
      return absl::InvalidArgumentError(
          fmt::format("max_new_tokens is {}; at least 1 is needed", task.max_new_tokens));
    if (length >= task.max_length) {
      return absl::InvalidArgumentError(
          fmt::format("the prompt's {} tokens leave no room for an answer within max_length {}",
                      length, task.max_length));
    }
    longest = std::min<int64_t>(length + task.max_new_tokens, task.max_length);
  }
  const int64_t most = std::min<int64_t>(info_.max_seq_len, info_.kv_tokens);
  if (longest > most) {
    return absl::ResourceExhaustedError(fmt::format(
        "the sample may reach {} tokens; this server holds {} (--max-seq-len, --kv-cache-gib)",
        longest, most));
  }
  return absl::OkStatus();
}

void EngineImpl::Admit(SampleSource& source, HiddenStateSink& sink) {
  while (scheduler_->HasRoom()) {
    std::optional<SampleTask> task = source.Next();
    if (!task) return;
    if (absl::Status fit = CheckTask(*task); !fit.ok()) {
      sink.OnFailed(task->ticket, {std::move(fit)});
    } else {
      scheduler_->Admit(*std::move(task));
    }
  }
}

void EngineImpl::GiveUp(std::span<const uint64_t> tickets, HiddenStateSink& sink) {
  for (const uint64_t ticket : tickets) {
    if (scheduler_->Remove(ticket)) sink.OnFailed(ticket, {absl::CancelledError("given up")});
  }
}

absl::Status EngineImpl::Run(SampleSource& source, HiddenStateSink& sink) {
  while (true) {
    STATETAP_RETURN_IF_ERROR(status_);
    if (source.Stopping()) {
      GiveUp(scheduler_->Tickets(), sink);
      return absl::OkStatus();
    }
    GiveUp(source.TakeCancelled(), sink);
    Admit(source, sink);
    if (scheduler_->Idle()) {
      if (!source.Wait()) return absl::OkStatus();
      continue;
    }
    const auto step = std::make_shared<const ScheduledStep>(scheduler_->Next());
    status_ = RunStep(step);
    STATETAP_RETURN_IF_ERROR(status_);
    for (const ScheduledRows& rows : step->rows) HandOut(rows, step->plan, sink);
    for (const auto& sequence : scheduler_->TakeComplete())
      sink.OnFinished(sequence->task.ticket, *sequence->end);
  }
}

// Host memory for the states of a step at so many boundaries.
absl::Status EngineImpl::MakeRoomForStates(int num_boundaries) {
  auto& states = ranks_->output.states;
  const size_t count = static_cast<size_t>(std::max(1, options_.max_batch_tokens)) *
                       static_cast<size_t>(config_.hidden);
  try {
    while (states.size() < static_cast<size_t>(num_boundaries)) {
      auto* rows =
          static_cast<uint16_t*>(ranks_->backends[0]->AllocateHost(count * sizeof(uint16_t)));
      states.emplace_back(rows, count);
    }
  } catch (const std::exception& error) {
    return absl::ResourceExhaustedError(
        fmt::format("no host memory for the states of {} tokens at {} boundaries: {}",
                    options_.max_batch_tokens, num_boundaries, error.what()));
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::RunStep(const std::shared_ptr<const ScheduledStep>& step) {
  STATETAP_RETURN_IF_ERROR(MakeRoomForStates(static_cast<int>(step->plan.boundaries.size())));
  const bool sharded = Sharded(step->plan.num_tokens());
  return group_->RunAll(
      [ranks = ranks_, step, sharded, number = steps_++, before = options_.before_step](int rank) {
        if (before) before(rank, number);
        ranks->models[static_cast<size_t>(rank)]->Forward(step->plan, sharded, ranks->output);
      });
}

void EngineImpl::HandOut(const ScheduledRows& rows, const StepPlan& plan, HiddenStateSink& sink) {
  Sequence& sequence = *rows.sequence;
  const int first = std::max(rows.first_token, sequence.handed_out),
            end = rows.first_token + rows.count;
  sequence.computed = end;
  if (first < end && !HandOutStates(rows, first, plan, sink)) return;
  sequence.handed_out = std::max(sequence.handed_out, end);
  HandOutTokens(rows, sink);
}

bool EngineImpl::HandOutStates(const ScheduledRows& rows, int first, const StepPlan& plan,
                               HiddenStateSink& sink) {
  const Sequence& sequence = *rows.sequence;
  const auto hidden = static_cast<size_t>(config_.hidden);
  const auto num_rows = static_cast<size_t>(rows.first_token + rows.count - first);
  const auto states_of = [&](int boundary) {
    const auto index =
        static_cast<size_t>(std::find(plan.boundaries.begin(), plan.boundaries.end(), boundary) -
                            plan.boundaries.begin());
    const auto offset = static_cast<size_t>(rows.first_row + first - rows.first_token) * hidden;
    return std::span<const uint16_t>(ranks_->output.states[index])
        .subspan(offset, num_rows * hidden);
  };
  for (const int boundary : sequence.task.boundaries) {
    const auto states = states_of(boundary);
    const auto bad = std::find_if(states.begin(), states.end(),
                                  [](uint16_t bits) { return !Bf16IsFinite(bits); });
    if (bad == states.end()) continue;
    const auto token = first + (bad - states.begin()) / static_cast<int64_t>(hidden);
    Fail(sequence,
         {absl::DataLossError(
              fmt::format("the state at boundary {} of token {} is not finite", boundary, token)),
          boundary, token},
         sink);
    return false;
  }
  for (const int boundary : sequence.task.boundaries)
    sink.OnStates(sequence.task.ticket, boundary, first, states_of(boundary));
  return true;
}

bool EngineImpl::HandOutTokens(const ScheduledRows& rows, HiddenStateSink& sink) {
  Sequence& sequence = *rows.sequence;
  const SampleTask& task = sequence.task;
  const auto chosen =
      std::span(ranks_->output.chosen)
          .subspan(static_cast<size_t>(rows.first_logit), static_cast<size_t>(rows.num_logits));
  std::vector<TokenScore> scores;
  for (const ChosenToken& one : chosen) {
    if (std::isnan(one.logprob)) {
      const int64_t token = rows.first_scored + static_cast<int64_t>(scores.size()) - 1;
      Fail(sequence,
           {absl::DataLossError(fmt::format("the logits after token {} are not finite", token)),
            config_.num_layers, token},
           sink);
      return false;
    }
    scores.push_back({one.logprob, one.entropy, one.best, one.best_logprob});
  }
  const std::span given = std::span(scores).first(scores.size() - (rows.samples ? 1 : 0));
  if (!given.empty()) sink.OnScores(task.ticket, rows.first_scored, given);
  if (rows.samples) {
    const int32_t id = chosen.back().id;
    sequence.tokens.push_back(id);
    const auto length = static_cast<int>(sequence.tokens.size()),
               prompt = static_cast<int>(task.input_ids.size());
    if (std::find(task.stop_ids.begin(), task.stop_ids.end(), id) != task.stop_ids.end()) {
      sequence.end = FinishReason::kStop;
    } else if (length >= task.max_length || length - prompt >= task.max_new_tokens) {
      sequence.end = FinishReason::kLength;
    }
    sink.OnToken(task.ticket, id, task.token_scores ? scores.back() : TokenScore{NAN, NAN});
  }
  return true;
}

void EngineImpl::Fail(const Sequence& sequence, HiddenStateSink::Failure failure,
                      HiddenStateSink& sink) {
  const uint64_t ticket = sequence.task.ticket;
  scheduler_->Remove(ticket);
  sink.OnFailed(ticket, failure);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Open(const CheckpointIndex& checkpoint,
                                                     const EngineOptions& options) {
  auto engine = std::make_unique<EngineImpl>();
  try {
    STATETAP_RETURN_IF_ERROR(engine->Load(checkpoint, options));
  } catch (const std::exception& error) {  // a device fault: most often its memory is too small
    const std::string_view what = error.what();
    const bool memory = what.find("memory") != what.npos || what.find("alloc") != what.npos;
    return absl::ResourceExhaustedError(fmt::format(
        "cannot load {} ranks on backend {}: {}{}", engine->options().ranks,
        engine->options().backend, what,
        memory ? "; more ranks (--tp), a smaller --kv-cache-gib or --max-batch-tokens take less"
               : ""));
  }
  return engine;
}

}  // namespace statetap
