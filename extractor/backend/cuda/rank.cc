#include "extractor/backend/cuda/rank.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/decode.h"
#include "extractor/backend/cuda/sampling.h"

namespace statetap::cuda {
namespace {

constexpr size_t kAlign = 256;
constexpr int64_t kReplicated = 256;  // tokens of a step whose residual stream every rank keeps
constexpr int kMostGraphRows = 512;

size_t Padded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Whether the kernels of sm_90a run.
bool ByHopper(int device, const CudaOptions& options) {
  int major;
  Check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (options.kernels == CudaOptions::Kernels::kHopper && major != 9)
    Fail("--kernels hopper: GPU " + std::to_string(device) + " is not of that family");
  return major == 9 && options.kernels != CudaOptions::Kernels::kPortable;
}

// Where each array of a plan lies behind the others.
class Packing {
 public:
  template <typename T>
  size_t Add(const std::vector<T>& values) {
    const size_t at = size_;
    size_ += Padded(values.size() * sizeof(T));
    return at;
  }
  size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

}  // namespace

CudaBackend::CudaBackend(int rank, int device, std::shared_ptr<DeviceGroup> group,
                         const CudaOptions& options)
    : device_(device),
      communicator_(rank, std::move(group)),
      uploader_(device),
      hopper_(ByHopper(device, options)),
      stream_workspace_(hopper_ ? Family::kHopper : Family::kPortable) {
  communicator_.group().Join(rank);
}

CudaBackend::~CudaBackend() {
  // Kernels may still use what the members free.
  if (cudaSetDevice(device_) == cudaSuccess) cudaDeviceSynchronize();
}

void CudaBackend::Use() const { Check(cudaSetDevice(device_)); }

Backend::Memory CudaBackend::memory() const {
  Memory memory = used_;
  memory.capture += static_cast<int64_t>(captured_.size());
  memory.host += static_cast<int64_t>(captured_host_.size());
  for (const Planned& planned : planned_) memory.host += static_cast<int64_t>(planned.host.size());
  return memory;
}

void* CudaBackend::Allocate(size_t bytes) {
  Use();
  used_.workspace += static_cast<int64_t>(bytes);
  return memory_.emplace_back(bytes, /*zeroed=*/true).as<void>();
}

void* CudaBackend::AllocateHost(size_t bytes) {
  Use();
  used_.host += static_cast<int64_t>(bytes);
  return host_memory_.emplace_back(bytes).as<void>();
}

std::unique_ptr<Weight> CudaBackend::NewMatrix(int64_t rows, int64_t cols, DType stored) {
  Use();
  auto matrix = std::make_unique<DeviceMatrix>(rows, cols, stored, uploader_);
  used_.weights += matrix->size_bytes();
  return matrix;
}

std::unique_ptr<Weight> CudaBackend::NewExperts(const ExpertsShape& shape) {
  Use();
  auto experts = std::make_unique<DeviceExperts>(shape, uploader_);
  used_.weights += shape.num_slots * experts->slot_bytes();
  return experts;
}

void CudaBackend::FinishWeights() { uploader_.Finish(); }

const void* CudaBackend::NewRotary(std::span<const float> inverse_frequencies, int num_positions) {
  std::vector<float> table;
  table.reserve(2 * inverse_frequencies.size() * static_cast<size_t>(num_positions));
  for (int position = 0; position < num_positions; ++position) {
    for (const float frequency : inverse_frequencies) {
      const double angle = static_cast<float>(position) * frequency;
      table.push_back(static_cast<float>(std::cos(angle)));
      table.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  void* memory = Allocate(table.size() * sizeof(float));
  CopyIn(memory, table.data(), table.size() * sizeof(float));
  return memory;
}

// A tenth stays for what grows with the steps that come: pages of plans, graphs, exchanges,
// kernels.
int64_t CudaBackend::RoomForKvCache() const {
  Use();
  size_t free, total;
  Check(cudaMemGetInfo(&free, &total));
  const int sharing = CeilDiv(communicator_.world(), NumGpus());  // ranks of this GPU
  return static_cast<int64_t>(free / 10 * 9) / sharing;
}

void CudaBackend::NewKvCache(int num_layers, int num_pages, int width) {
  Use();
  num_pages_ = num_pages;
  cache_width_ = width;
  const size_t rows =
      static_cast<size_t>(num_layers) * static_cast<size_t>(num_pages) * kPageTokens;
  cache_ = DeviceBuffer(rows * static_cast<size_t>(width) * sizeof(bf16), /*zeroed=*/true);
  used_.kv_cache = static_cast<int64_t>(cache_.size());
}

void CudaBackend::PlanScratch(const Limits& limits) {
  Use();
  row_maps_.clear();
  prompt_maps_.reset();
  graphs_.Clear();
  limits_ = limits;
  const auto plan = [&](DeviceBuffer& buffer, int64_t rows, int64_t width, size_t element,
                        bool zeroed = false) {
    buffer = DeviceBuffer(static_cast<size_t>(rows * width) * element, zeroed);
    used_.workspace += static_cast<int64_t>(buffer.size());
  };
  const int64_t tokens = limits.max_tokens;
  plan(queries_, tokens, limits.query_dim, sizeof(bf16));
  plan(absorbed_, tokens, int64_t{limits.num_heads} * limits.latent_dim, sizeof(bf16));
  plan(attended_, tokens, int64_t{limits.num_heads} * limits.latent_dim, sizeof(bf16));
  plan(heads_, tokens, limits.heads_dim, sizeof(bf16));
  plan(gate_up_, 2 * tokens, limits.max_width, sizeof(bf16));
  if (limits.num_heads > 0) {
    forms_ = AttentionFormsOf(limits.num_heads, limits.latent_dim);
    const int nope = limits.query_dim / limits.num_heads - limits.rope_dim,
              v = limits.heads_dim / limits.num_heads,
              kv_lora = limits.latent_dim - limits.rope_dim;
    const int64_t parts = int64_t{kSplitTokens} * kMaxSplits * limits.num_heads;
    absorbable_ = Absorbable(nope, limits.rope_dim, kv_lora);
    plan(split_parts_, parts, kv_lora, sizeof(float));
    plan(split_stats_, parts, 1, sizeof(float2));
    expandable_ = Expandable(nope, limits.rope_dim, v, kv_lora);
    // The longest sequence fits, and so do most steps in one round.
    prompt_keys_ = expandable_ ? limits.max_context + limits.max_tokens : 0;
    // Read behind the last key too, where no weight but 0 comes.
    plan(key_latents_, prompt_keys_, limits.latent_dim, sizeof(bf16), /*zeroed=*/true);
    plan(prompts_taken_, 2, 1, sizeof(int32_t), /*zeroed=*/true);
    plan(expanded_, prompt_keys_, int64_t{limits.num_heads} * (nope + v), sizeof(bf16),
         /*zeroed=*/true);
  }
  if (limits.num_experts > 0) {
    // Every pair (token, expert) may meet on one rank.
    const int64_t pairs = tokens * limits.top_k;
    plan(router_logits_, tokens, limits.num_experts, sizeof(float));
    plan(counts_, limits.num_experts + 1, 1, sizeof(int32_t), /*zeroed=*/true);
    plan(next_row_, limits.num_experts, 1, sizeof(int32_t));
    plan(token_of_row_, pairs, 1, sizeof(int32_t));
    plan(row_of_, pairs, 1, sizeof(int32_t));
    plan(row_tiles_, pairs / 16 + limits.num_experts, 1, sizeof(TokenTile));
    plan(num_row_tiles_, 1, 1, sizeof(int32_t));
    plan(h_, pairs, CeilDiv(limits.max_width, kBlockK) * kBlockK, sizeof(bf16));
    plan(y_, pairs, limits.hidden, sizeof(bf16));
  }
  plan(picked_, limits.max_logit_rows, limits.hidden, sizeof(bf16));
  plan(normed_, limits.max_logit_rows, limits.hidden, sizeof(bf16));
  plan(logits_, limits.max_logit_rows, limits.padded_vocab / communicator_.world(), sizeof(float));
  plan(all_logits_, limits.max_logit_rows, limits.padded_vocab, sizeof(float));
  choose_workspace_ =
      DeviceBuffer(ChooseWorkspaceBytes(limits.max_logit_rows, limits.padded_vocab));
  used_.workspace += static_cast<int64_t>(choose_workspace_.size());
  plan(results_, tokens, 1, sizeof(ChosenToken));
  // The states of a step on their way out: each rank's own rows, or all of a small step's.
  const int64_t world = communicator_.world();
  const int64_t own =
      std::max((tokens + world - 1) / world, std::min<int64_t>(tokens, kReplicated));
  captured_.Reserve(static_cast<size_t>(own * limits.num_boundaries * limits.hidden) *
                    sizeof(bf16));
  results_host_ = PinnedBuffer(static_cast<size_t>(tokens) * sizeof(ChosenToken));
}

// It only decodes, and no exchange needs the host.
bool CudaBackend::CanBeGraph(const StepPlan& plan, bool sharded) const {
  if (plan.num_tokens() > kMostGraphRows || !OnlyDecodes(plan)) return false;
  const int world = communicator_.world();
  if (world == 1) return true;
  const auto rows = static_cast<size_t>(RoundedRows(plan.num_tokens())),
             logit_rows = std::min(rows, static_cast<size_t>(limits_.max_logit_rows));
  const size_t row = static_cast<size_t>(limits_.hidden) * sizeof(bf16),
               logits = static_cast<size_t>(limits_.padded_vocab / world) * sizeof(float);
  const DeviceGroup& group = communicator_.group();
  return !sharded && group.Recordable(rows * row, row) &&
         group.Recordable(logit_rows * logits, logits);
}

std::vector<Step> CudaBackend::BeginSteps(std::span<const StepPlan> plans, bool sharded) {
  Use();
  communicator_.ThrowIfAborted();
  as_graph_ = use_graphs_ && plans.size() == 1 && CanBeGraph(plans[0], sharded);
  if (as_graph_) RoundUp(plans[0], limits_.max_tokens, rounded_);
  const std::span run = as_graph_ ? std::span<const StepPlan>(&rounded_, 1) : plans;
  std::vector<Step> steps = ShapesOf(run, sharded, communicator_.rank(), communicator_.world());
  num_logit_rows_ = 0;
  size_t captured = 0;
  for (size_t i = 0; i < run.size(); ++i) {
    Planned& planned = planned_[i];
    planned.num_rows = plans[i].num_tokens();
    planned.num_logit_rows = static_cast<int>(plans[i].logit_rows.size());
    planned.first_logit_row =
        std::exchange(num_logit_rows_, num_logit_rows_ + planned.num_logit_rows);
    Plan(run[i], steps[i], planned);
    captured += run[i].boundaries.size() * static_cast<size_t>(steps[i].own.count) *
                static_cast<size_t>(limits_.hidden) * sizeof(bf16);
  }
  if (captured > captured_.size()) graphs_.Clear();
  captured_.Reserve(captured);
  captured_host_.Reserve(captured);
  num_captured_ = 0;
  communicator_.group().BeginStep(communicator_.rank());
  replays_ = records_ = shared_begun_ = false;
  if (as_graph_) {
    const StepGraphs::Mode mode =
        graphs_.Begin({steps[0].num_tokens, steps[0].pages_per_seq, run[0].boundaries}, stream());
    replays_ = mode == StepGraphs::Mode::kReplay;
    records_ = mode == StepGraphs::Mode::kRecord;
  }
  return steps;
}

void CudaBackend::Plan(const StepPlan& plan, Step& step, Planned& planned) {
  PlanAttention(plan, planned);
  Packing packing;
  const size_t ids = packing.Add(plan.ids), positions = packing.Add(plan.positions),
               sequence = packing.Add(plan.sequence), pages = packing.Add(plan.page_table),
               logit_rows = packing.Add(plan.logit_rows), draws = packing.Add(plan.draws),
               tiles = packing.Add(planned.tiles), runs = packing.Add(planned.key_runs),
               prompt_tiles = packing.Add(planned.prompt_tiles);
  // Grows with the longest page table so far; the last step has ended.
  planned.host.Reserve(packing.size());
  if (planned.host.size() > planned.device.size()) graphs_.Clear();
  planned.device.Reserve(planned.host.size());
  auto* host = planned.host.as<std::byte>();
  auto* device = planned.device.as<std::byte>();
  const auto put = [&](const auto& values, size_t at) {
    using Value = typename std::decay_t<decltype(values)>::value_type;
    if (!values.empty()) std::memcpy(host + at, values.data(), values.size() * sizeof(Value));
    return reinterpret_cast<const Value*>(device + at);
  };
  step.ids = put(plan.ids, ids);
  step.positions = put(plan.positions, positions);
  step.sequence = put(plan.sequence, sequence);
  step.page_table = put(plan.page_table, pages);
  step.logit_rows = put(plan.logit_rows, logit_rows);
  step.draws = put(plan.draws, draws);
  planned.device_tiles = put(planned.tiles, tiles);
  planned.device_key_runs = put(planned.key_runs, runs);
  planned.device_prompt_tiles = put(planned.prompt_tiles, prompt_tiles);
  Check(cudaMemcpyAsync(device, host, packing.size(), cudaMemcpyHostToDevice, stream()));
  const size_t row_bytes = static_cast<size_t>(limits_.hidden) * sizeof(bf16);
  DeviceGroup& group = communicator_.group();
  group.Reserve(communicator_.rank(),
                {nullptr, step.num_tokens, row_bytes, step.sharded, step.half});
  group.Reserve(communicator_.rank(),
                {nullptr, std::min(step.num_logit_rows, limits_.max_logit_rows), row_bytes,
                 /*sharded=*/false});
}

void CudaBackend::Capture(const Step& step, const CaptureParams& p) {
  // Replicated: every rank holds every row, and one of them hands them out.
  if (!step.sharded && communicator_.rank() != 0) return;
  const size_t count = static_cast<size_t>(step.own.count) * static_cast<size_t>(p.hidden);
  if (count == 0) return;
  // Copied aside first: the residual changes while the copy to the host runs.
  auto* aside = captured_.as<uint16_t>() + num_captured_;
  if (!replays_) {
    Check(cudaMemcpyAsync(aside, p.residual, count * sizeof(uint16_t), cudaMemcpyDeviceToDevice,
                          stream()));
  }
  const size_t real = static_cast<size_t>(std::min(step.own.count, Of(step).num_rows)) *
                      static_cast<size_t>(p.hidden);
  uint16_t* to = p.to + static_cast<size_t>(step.own.begin) * static_cast<size_t>(p.hidden);
  cudaPointerAttributes attributes;
  Check(cudaPointerGetAttributes(&attributes, to));
  uint16_t* host = to;
  if (attributes.type != cudaMemoryTypeHost) {  // not from AllocateHost: by way of our own
    host = captured_host_.as<uint16_t>() + num_captured_;
    pending_states_.push_back({to, real, host});
  }
  num_captured_ += count;
  pending_copies_.push_back({host, real, aside});
  if (!replays_ && !records_) CopyStatesOut();
}

// What was copied aside so far goes to the host under the next ops; a graph is not looked into.
void CudaBackend::CopyStatesOut() {
  if (pending_copies_.empty()) return;
  captured_event_.Record(stream());
  captured_event_.Hold(copies_.get());
  for (const PendingStates& copy : pending_copies_) {
    Check(cudaMemcpyAsync(copy.to, copy.from, copy.count * sizeof(uint16_t), cudaMemcpyDeviceToHost,
                          copies_.get()));
  }
  pending_copies_.clear();
}

void CudaBackend::Finish() {
  if (replays_ || records_) graphs_.Launch(stream());
  CopyStatesOut();
  if (!pending_tokens_.empty()) {
    Check(cudaMemcpyAsync(results_host_.as<void>(), results_.as<void>(),
                          static_cast<size_t>(num_logit_rows_) * sizeof(ChosenToken),
                          cudaMemcpyDeviceToHost, stream()));
  }
  finished_.Record(stream());
  copied_.Record(copies_.get());
  while (!finished_.Done() || !copied_.Done()) {
    communicator_.ThrowIfAborted();  // whoever runs the ranks has lost patience
    std::this_thread::yield();
  }
  for (const PendingStates& states : pending_states_)
    std::memcpy(states.to, states.from, states.count * sizeof(uint16_t));
  pending_states_.clear();
  for (const PendingTokens& pending : pending_tokens_)
    std::copy_n(results_host_.as<ChosenToken>() + pending.first, pending.count, pending.to);
  pending_tokens_.clear();
}

}  // namespace statetap::cuda
