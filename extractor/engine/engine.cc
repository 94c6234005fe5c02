#include "extractor/engine/engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "extractor/backend/backend.h"
#ifdef STATETAP_CUDA
#include "extractor/backend/cuda/cuda_backend.h"
#endif
#include "extractor/base/dtype.h"
#include "extractor/base/log.h"
#include "extractor/base/worker_pool.h"
#include "extractor/engine/rank_group.h"
#include "extractor/engine/scheduler.h"
#include "extractor/engine/shared_gpus.h"
#include "extractor/engine/warm_up.h"
#include "extractor/model/transformer.h"

namespace statetap {
namespace {

constexpr int kBatchTokensOnGpus = 16'384, kBatchTokensOnCpu = 512;
constexpr int kLogitRowsAtOnce = 64;
constexpr int kShardedFrom =
    257;  // tokens of a step from which the residual stream is sharded by tokens
// A GPU is through with as many tokens in seconds; callers hear of a failure within 30 s.
constexpr int kTokensOfGpuStep = 65'536;
constexpr std::chrono::milliseconds kGpuStep = std::chrono::seconds(20),
                                    kCpuStep = std::chrono::seconds(1800);
// The first one chooses the algorithms, in seconds on an H200.
constexpr std::chrono::milliseconds kWarmUpStep = std::chrono::minutes(5);
// States are looked through and handed out in pieces that stay in a core's cache between the two.
constexpr int64_t kPieceValues = 65'536;

// A thread looks through and copies 2 to 3 GB/s; eight H200s make 4.
int HandOutThreads(const EngineOptions& options) {
  if (options.hand_out_threads > 0) return options.hand_out_threads;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 4, 1, 8);
}

int GpusHere() {
#ifdef STATETAP_CUDA
  return NumGpus();
#else
  return 0;
#endif
}

// What "auto" and 0 mean on this machine.
void Resolve(EngineOptions& options) {
  const int gpus = options.backend == "cpu" ? 0 : GpusHere();
  if (options.backend == "auto") options.backend = gpus > 0 ? "cuda" : "cpu";
  if (options.ranks == 0) options.ranks = std::max(1, gpus);
  if (options.max_batch_tokens == 0)
    options.max_batch_tokens = options.backend == "cuda" ? kBatchTokensOnGpus : kBatchTokensOnCpu;
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

// Behind a device's message, most often that its memory is too small.
std::string Remedy(std::string_view what, const std::string& shared_gpus) {
  const bool memory = what.find("memory") != what.npos || what.find("alloc") != what.npos;
  if (!memory) return "";
  return fmt::format("; {} a smaller --kv-cache-gib or --max-batch-tokens take less",
                     shared_gpus.empty() ? "more ranks (--tp)," : shared_gpus + ";");
}

// What the ranks' threads work with: theirs too, as a stuck one may be left behind.
struct Ranks {
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<std::unique_ptr<Transformer>> models;
  std::array<StepOutput, 2> outputs;  // of a step, and of the one before, which is handed out
};

// What is handed out of a step while the next one runs.
struct Late {
  struct Rows {
    std::shared_ptr<Sequence> sequence;
    int first_token, first_row, count;
  };
  std::vector<int> boundaries;
  std::vector<std::span<uint16_t>> states;  // by boundary
  std::vector<Rows> rows;
  std::vector<std::shared_ptr<Sequence>> complete;  // with its rows
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
  const std::string& shared_gpus() const { return shared_gpus_; }

 private:
  absl::Status WarmUp(const Scheduler::Limits& limits, int num_boundaries);
  absl::Status CheckTask(const SampleTask& task) const;
  void Admit(SampleSource& source, HiddenStateSink& sink);
  void GiveUp(std::span<const uint64_t> tickets, HiddenStateSink& sink);
  absl::Status MakeRoomForStates(int num_boundaries);
  void StartStep(const std::shared_ptr<const ScheduledStep>& step, StepOutput& output);
  // Hands out the step's tokens, which the next step wants; the rest is late.
  Late TakeStep(const ScheduledStep& step, const StepOutput& output, HiddenStateSink& sink);
  // The failure, where the logits are not finite.
  std::optional<HiddenStateSink::Failure> HandOutTokens(const ScheduledRows& rows,
                                                        const StepOutput& output,
                                                        HiddenStateSink& sink);
  void HandOut(Late late, HiddenStateSink& sink);
  void Fail(Sequence& sequence, HiddenStateSink::Failure failure, HiddenStateSink& sink);
  bool Sharded(int num_tokens) const;

  EngineOptions options_;
  std::string shared_gpus_;  // what is warned of, or empty
  EngineInfo info_;
  ModelConfig config_;
  const std::shared_ptr<Ranks> ranks_ = std::make_shared<Ranks>();
  std::unique_ptr<RankGroup> group_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<WorkerPool> hand_out_;
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
  const auto layout_of = [&](int ranks) {
    return ParallelLayout::Make(config_, ranks, experts, checkpoint.quantized());
  };
  STATETAP_ASSIGN_OR_RETURN(const ParallelLayout layout, layout_of(options.ranks));
  if (const int gpus = GpusHere(); options.backend == "cuda" && gpus > 0) {
    shared_gpus_ =
        SharedGpus(options.ranks, gpus, [&](int ranks) { return layout_of(ranks).ok(); });
    if (!shared_gpus_.empty()) LogWarning("{}", shared_gpus_);
  }
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
  const auto pages_of = [&](int64_t bytes) {  // of a rank
    return static_cast<int>(std::min(bytes / page_bytes, useful));
  };
  const auto no_page = [&](std::string_view why, int64_t bytes) {
    return fmt::format("{}: {} bytes hold no page of {} tokens ({} bytes on each of {} ranks)", why,
                       bytes, kPageTokens, page_bytes, options.ranks);
  };
  int64_t room = options.kv_cache_bytes / options.ranks;
  if (options.kv_cache_bytes > 0 && pages_of(room) < 1)
    return absl::InvalidArgumentError(no_page("--kv-cache-gib", options.kv_cache_bytes));

  STATETAP_ASSIGN_OR_RETURN(std::vector<ModelWeights> weights,
                            Weights(checkpoint, layout, backends, options));
  for (size_t rank = 0; rank < backends.size(); ++rank) {
    ranks_->models.push_back(std::make_unique<Transformer>(config_, layout, *backends[rank],
                                                           std::move(weights[rank]), limits));
  }
  if (options.kv_cache_bytes == 0) {
    room = std::numeric_limits<int64_t>::max();
    for (const auto& backend : backends) room = std::min(room, backend->RoomForKvCache());
  }
  const int num_pages = pages_of(room);
  if (num_pages < 1) {
    return absl::ResourceExhaustedError(
        no_page("no memory is left for a KV cache (more ranks, a smaller --max-batch-tokens)",
                room * options.ranks));
  }
  for (const auto& model : ranks_->models) model->NewKvCache(num_pages);
  group_ = std::make_unique<RankGroup>(backends, StepTimeout(options));
  hand_out_ = std::make_unique<WorkerPool>(HandOutThreads(options));
  const Scheduler::Limits steps{limits.max_tokens, std::max(1, options.max_running), num_pages};
  scheduler_ = std::make_unique<Scheduler>(steps);
  for (StepOutput& output : ranks_->outputs)
    output.chosen.resize(static_cast<size_t>(limits.max_tokens));
  STATETAP_RETURN_IF_ERROR(MakeRoomForStates(limits.num_boundaries));
  info_.kv_tokens = int64_t{num_pages} * kPageTokens;
  info_.max_seq_len = limits.max_context;
  STATETAP_RETURN_IF_ERROR(WarmUp(steps, limits.num_boundaries));
  for (const auto& backend : backends) {
    const Backend::Memory memory = backend->memory();
    info_.ranks.push_back(
        {memory.weights, memory.kv_cache, memory.workspace, memory.capture, memory.host});
  }
  return absl::OkStatus();
}

// What a GPU meets for the first time it meets here, where no step's time is limited to seconds and
// no job waits. The results are overwritten, as are the pages' keys: a sequence writes a key before
// it reads it.
absl::Status EngineImpl::WarmUp(const Scheduler::Limits& limits, int num_boundaries) {
  if (options_.backend != "cuda") return absl::OkStatus();
  const auto begin = std::chrono::steady_clock::now();
  std::vector<int> boundaries(
      static_cast<size_t>(std::min(num_boundaries, config_.num_layers + 1)));
  std::iota(boundaries.begin(), boundaries.end(), 0);
  const auto longest = static_cast<int>(std::min<int64_t>(info_.max_seq_len, info_.kv_tokens));
  const auto plans = std::make_shared<const std::vector<StepPlan>>(
      WarmUpSteps(limits, longest, config_.vocab, boundaries));
  RankGroup group(ranks_->backends, kWarmUpStep);
  for (size_t i = 0; i < plans->size(); ++i) {
    const StepPlan& plan = (*plans)[i];
    const absl::Status ran = group.RunAll(
        [ranks = ranks_, plans, &plan, sharded = Sharded(plan.num_tokens())](int rank) {
          ranks->models[static_cast<size_t>(rank)]->Forward(plan, sharded, ranks->outputs[0]);
        });
    if (ran.ok()) continue;
    const std::string_view what = MessageOf(ran);
    status_ = absl::Status(
        ran.code(), fmt::format("warming up, step {} of {} ({} tokens): {}{}", i + 1, plans->size(),
                                plan.num_tokens(), what, Remedy(what, shared_gpus_)));
    return status_;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  LogInfo("warmed up: {} steps of at most {} tokens, every product's algorithm chosen, in {:.1f} s",
          plans->size(), plans->front().num_tokens(), took.count());
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
  std::optional<Late> late;
  const auto hand_out_late = [&] {
    if (late) HandOut(*std::exchange(late, std::nullopt), sink);
  };
  while (true) {
    STATETAP_RETURN_IF_ERROR(status_);
    if (source.Stopping()) {
      hand_out_late();
      GiveUp(scheduler_->Tickets(), sink);
      return absl::OkStatus();
    }
    GiveUp(source.TakeCancelled(), sink);
    Admit(source, sink);
    if (scheduler_->Idle()) {
      if (late) {
        hand_out_late();  // may make room for what could not start
      } else if (!source.Wait()) {
        return absl::OkStatus();
      }
      continue;
    }
    const auto step = std::make_shared<const ScheduledStep>(scheduler_->Next());
    status_ = MakeRoomForStates(static_cast<int>(step->plan.boundaries.size()));
    STATETAP_RETURN_IF_ERROR(status_);
    StepOutput& output = ranks_->outputs[static_cast<size_t>(steps_ % 2)];
    StartStep(step, output);
    hand_out_late();
    status_ = group_->Wait();
    STATETAP_RETURN_IF_ERROR(status_);
    late = TakeStep(*step, output, sink);
  }
}

// Host memory for the states of two steps at so many boundaries.
absl::Status EngineImpl::MakeRoomForStates(int num_boundaries) {
  const size_t count = static_cast<size_t>(std::max(1, options_.max_batch_tokens)) *
                       static_cast<size_t>(config_.hidden);
  try {
    for (StepOutput& output : ranks_->outputs) {
      while (output.states.size() < static_cast<size_t>(num_boundaries)) {
        auto* rows =
            static_cast<uint16_t*>(ranks_->backends[0]->AllocateHost(count * sizeof(uint16_t)));
        output.states.emplace_back(rows, count);
      }
    }
  } catch (const std::exception& error) {
    return absl::ResourceExhaustedError(
        fmt::format("no host memory for the states of two steps of {} tokens at {} boundaries; a "
                    "smaller --max-batch-tokens takes less: {}",
                    options_.max_batch_tokens, num_boundaries, error.what()));
  }
  return absl::OkStatus();
}

void EngineImpl::StartStep(const std::shared_ptr<const ScheduledStep>& step, StepOutput& output) {
  const bool sharded = Sharded(step->plan.num_tokens());
  group_->Start([ranks = ranks_, step, &output, sharded, number = steps_++,
                 before = options_.before_step](int rank) {
    if (before) before(rank, number);
    ranks->models[static_cast<size_t>(rank)]->Forward(step->plan, sharded, output);
  });
}

Late EngineImpl::TakeStep(const ScheduledStep& step, const StepOutput& output,
                          HiddenStateSink& sink) {
  Late late{step.plan.boundaries, output.states, {}, {}};
  for (const ScheduledRows& rows : step.rows) {
    Sequence& sequence = *rows.sequence;
    if (sequence.given_up) continue;  // a state of the step before was not finite
    const int first = std::max(rows.first_token, sequence.handed_out),
              end = rows.first_token + rows.count;
    if (first < end)
      late.rows.push_back(
          {rows.sequence, first, rows.first_row + first - rows.first_token, end - first});
    sequence.computed = end;
    sequence.handed_out = std::max(sequence.handed_out, end);
    const auto failure = HandOutTokens(rows, output, sink);
    if (!failure) continue;
    // Such logits come from such a state, most often: that one is named then.
    if (first < end) HandOut({late.boundaries, late.states, {late.rows.back()}, {}}, sink);
    if (!sequence.given_up) Fail(sequence, *failure, sink);
  }
  for (auto& sequence : scheduler_->TakeComplete()) {
    if (sequence->task.boundaries.empty()) {
      sink.OnFinished(sequence->task.ticket, *sequence->end);
    } else {
      late.complete.push_back(std::move(sequence));
    }
  }
  return late;
}

std::optional<HiddenStateSink::Failure> EngineImpl::HandOutTokens(const ScheduledRows& rows,
                                                                  const StepOutput& output,
                                                                  HiddenStateSink& sink) {
  Sequence& sequence = *rows.sequence;
  const SampleTask& task = sequence.task;
  const auto chosen =
      std::span(output.chosen)
          .subspan(static_cast<size_t>(rows.first_logit), static_cast<size_t>(rows.num_logits));
  std::vector<TokenScore> scores;
  for (const ChosenToken& one : chosen) {
    if (std::isnan(one.logprob)) {
      const int64_t token = rows.first_scored + static_cast<int64_t>(scores.size()) - 1;
      return HiddenStateSink::Failure{
          absl::DataLossError(fmt::format("the logits after token {} are not finite", token)),
          config_.num_layers, token};
    }
    scores.push_back({one.logprob, one.entropy, one.best, one.best_logprob});
  }
  const std::span given = std::span(scores).first(scores.size() - (rows.samples ? 1 : 0));
  if (!given.empty()) sink.OnScores(task.ticket, rows.first_scored, given);
  if (!rows.samples) return std::nullopt;
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
  return std::nullopt;
}

void EngineImpl::HandOut(Late late, HiddenStateSink& sink) {
  const auto hidden = static_cast<int64_t>(config_.hidden);
  struct Item {
    const Late::Rows* rows;
    int boundary;
    std::span<const uint16_t> states;
    int64_t bad_token = -1;
  };
  std::vector<Item> items;
  for (const Late::Rows& rows : late.rows) {
    if (rows.sequence->given_up) continue;
    for (const int boundary : rows.sequence->task.boundaries) {
      const auto index = std::find(late.boundaries.begin(), late.boundaries.end(), boundary) -
                         late.boundaries.begin();
      items.push_back({&rows, boundary,
                       late.states[static_cast<size_t>(index)].subspan(
                           static_cast<size_t>(rows.first_row * hidden),
                           static_cast<size_t>(rows.count * hidden))});
    }
  }
  const auto hand_out = [&](Item& item) {
    const int64_t piece = std::max<int64_t>(1, kPieceValues / hidden);
    for (int64_t row = 0; row < item.rows->count; row += piece) {
      const auto states = item.states.subspan(
          static_cast<size_t>(row * hidden),
          static_cast<size_t>(std::min(piece, item.rows->count - row) * hidden));
      const int64_t first = item.rows->first_token + row;
      const size_t bad = FirstNonFinite(states);
      if (bad < states.size()) {
        item.bad_token = first + static_cast<int64_t>(bad) / hidden;
        return;
      }
      sink.OnStates(item.rows->sequence->task.ticket, item.boundary, first, states);
    }
  };
  std::atomic<size_t> next = 0;
  hand_out_->ParallelFor(hand_out_->num_threads(), [&](int64_t, int64_t, int) {
    for (size_t i = next++; i < items.size(); i = next++) hand_out(items[i]);
  });
  for (const Item& item : items) {
    Sequence& sequence = *item.rows->sequence;
    if (item.bad_token < 0 || sequence.given_up) continue;
    Fail(sequence,
         {absl::DataLossError(fmt::format("the state at boundary {} of token {} is not finite",
                                          item.boundary, item.bad_token)),
          item.boundary, item.bad_token},
         sink);
  }
  for (const auto& sequence : late.complete) {
    if (!sequence->given_up) sink.OnFinished(sequence->task.ticket, *sequence->end);
  }
}

void EngineImpl::Fail(Sequence& sequence, HiddenStateSink::Failure failure, HiddenStateSink& sink) {
  scheduler_->Remove(sequence.task.ticket);
  sequence.given_up = true;  // if it was complete, the scheduler does not know it any more
  sink.OnFailed(sequence.task.ticket, failure);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Open(const CheckpointIndex& checkpoint,
                                                     const EngineOptions& options) {
  auto engine = std::make_unique<EngineImpl>();
  try {
    STATETAP_RETURN_IF_ERROR(engine->Load(checkpoint, options));
  } catch (const std::exception& error) {  // a device fault: most often its memory is too small
    return absl::ResourceExhaustedError(fmt::format(
        "cannot load {} ranks on backend {}: {}{}", engine->options().ranks,
        engine->options().backend, error.what(), Remedy(error.what(), engine->shared_gpus())));
  }
  return engine;
}

}  // namespace statetap
