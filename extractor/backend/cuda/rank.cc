#include "extractor/backend/cuda/rank.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <thread>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/decode.h"
#include "extractor/backend/cuda/router.h"
#include "extractor/backend/cuda/rows.h"
#include "extractor/backend/cuda/sampling.h"

namespace statetap::cuda {
namespace {

constexpr size_t kAlign = 256;
constexpr int64_t kReplicated = 256;  // tokens of a step whose residual stream every rank keeps
constexpr int kMostGraphRows = 512;
constexpr int kFewTokens = 512;  // of a step: so few that the experts' weights are read for them

size_t Padded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

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
    : device_(device), communicator_(rank, std::move(group)), uploader_(device) {
  communicator_.group().Join(rank);
  int major;
  Check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (options.kernels == CudaOptions::Kernels::kHopper && major != 9)
    Fail("--kernels hopper: GPU " + std::to_string(device) + " is not of that family");
  hopper_ = major == 9 && options.kernels != CudaOptions::Kernels::kPortable;
}

CudaBackend::~CudaBackend() {
  // Kernels may still use what the members free.
  if (cudaSetDevice(device_) == cudaSuccess) cudaDeviceSynchronize();
}

void CudaBackend::Use() const { Check(cudaSetDevice(device_)); }

Backend::Memory CudaBackend::memory() const {
  Memory memory = used_;
  memory.capture += static_cast<int64_t>(captured_.size());
  memory.host += static_cast<int64_t>(captured_host_.size() + plan_host_.size());
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
  graphs_.Clear();
  limits_ = limits;
  const auto plan = [&](DeviceBuffer& buffer, int64_t rows, int64_t width, size_t element) {
    buffer = DeviceBuffer(static_cast<size_t>(rows * width) * element);
    used_.workspace += static_cast<int64_t>(buffer.size());
  };
  const int64_t tokens = limits.max_tokens;
  plan(queries_, tokens, limits.query_dim, sizeof(bf16));
  plan(absorbed_, tokens, int64_t{limits.num_heads} * limits.latent_dim, sizeof(bf16));
  plan(attended_, tokens, int64_t{limits.num_heads} * limits.latent_dim, sizeof(bf16));
  plan(heads_, tokens, limits.heads_dim, sizeof(bf16));
  plan(gate_, tokens, limits.max_width, sizeof(bf16));
  plan(up_, tokens, limits.max_width, sizeof(bf16));
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
    plan(key_latents_, prompt_keys_, limits.latent_dim, sizeof(bf16));
    plan(expanded_, prompt_keys_, int64_t{limits.num_heads} * (nope + v), sizeof(bf16));
  }
  if (limits.num_experts > 0) {
    // Every pair (token, expert) may meet on one rank.
    const int64_t pairs = tokens * limits.top_k;
    plan(router_logits_, tokens, limits.num_experts, sizeof(float));
    plan(counts_, 2 * limits.num_experts, 1, sizeof(int32_t));
    plan(first_row_, limits.num_experts, 1, sizeof(int32_t));
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
  plan(results_, 3, tokens, sizeof(float));
  // The states of a step on their way out: each rank's own rows, or all of a small step's.
  const int64_t world = communicator_.world();
  const int64_t own =
      std::max((tokens + world - 1) / world, std::min<int64_t>(tokens, kReplicated));
  captured_.Reserve(static_cast<size_t>(own * limits.num_boundaries * limits.hidden) *
                    sizeof(bf16));
  results_host_ = PinnedBuffer(static_cast<size_t>(3 * tokens) * sizeof(float));
}

void CudaBackend::PlanAttention(const StepPlan& plan) {
  std::vector<AttentionTile> large;
  tiles_.clear();
  decode_runs_.clear();
  key_runs_.clear();
  prompt_tiles_.clear();
  prompt_rounds_.clear();
  int absorbed_begin = plan.num_tokens(), absorbed_end = 0;
  num_decode_rows_ = 0;
  for (int first = 0, end; first < plan.num_tokens(); first = end) {
    const auto follows = [&](int t) {
      const auto i = static_cast<size_t>(t);
      return plan.sequence[i] == plan.sequence[i - 1] &&
             plan.positions[i] == plan.positions[i - 1] + 1;
    };
    for (end = first + 1; end < plan.num_tokens() && follows(end);) ++end;
    const auto sequence = static_cast<size_t>(plan.sequence[static_cast<size_t>(first)]);
    const bool decodes = sequence < plan.decodes.size() && plan.decodes[sequence] != 0;
    if (decodes) {
      const bool in_front = num_decode_rows_ == first;  // the scheduler puts them there
      if (in_front) num_decode_rows_ = end;
      if (!decode_runs_.empty() && decode_runs_.back().begin + decode_runs_.back().count == first) {
        decode_runs_.back().count += end - first;
      } else {
        decode_runs_.push_back({first, end - first});
      }
      if (in_front && absorbable_) continue;
    }
    if (!decodes && expandable_) {
      PlanPrompt(plan, first, end);
      continue;
    }
    absorbed_begin = std::min(absorbed_begin, first);
    absorbed_end = end;
    if (decodes) continue;
    // Short runs go to the small form, which wastes less of a block on them.
    const bool is_large = forms_.large_tokens > 0 && end - first > forms_.small_tokens;
    const int tokens = is_large ? forms_.large_tokens : forms_.small_tokens;
    for (int t = first; t < end; t += tokens)
      (is_large ? large : tiles_).push_back({t, std::min(tokens, end - t)});
  }
  absorbed_rows_ = {absorbed_begin, std::max(0, absorbed_end - absorbed_begin)};
  num_small_tiles_ = static_cast<int>(tiles_.size());
  tiles_.insert(tiles_.end(), large.begin(), large.end());
  // Those with most keys first: they would be last to end.
  for (const PromptRound& round : prompt_rounds_) {
    const auto begin = prompt_tiles_.begin() + static_cast<int64_t>(round.first_tile);
    std::stable_sort(begin, begin + static_cast<int64_t>(round.num_tiles),
                     [](const PromptTile& a, const PromptTile& b) {
                       return a.first_position + a.count > b.first_position + b.count;
                     });
  }
}

// Tokens [first, end) of the step, of one sequence: all its keys so far, and its query tiles.
void CudaBackend::PlanPrompt(const StepPlan& plan, int first, int end) {
  const int position = plan.positions[static_cast<size_t>(first)], keys = position + end - first;
  if (prompt_rounds_.empty() || prompt_rounds_.back().keys + keys > prompt_keys_)
    prompt_rounds_.push_back({key_runs_.size(), 0, prompt_tiles_.size(), 0, 0});
  PromptRound& round = prompt_rounds_.back();
  for (int key = 0; key < keys; key += kKeysARun) {
    key_runs_.push_back({plan.sequence[static_cast<size_t>(first)], key,
                         std::min(kKeysARun, keys - key), round.keys + key});
    ++round.num_runs;
  }
  for (int t = first; t < end; t += kPromptTileTokens) {
    prompt_tiles_.push_back(
        {t, std::min(kPromptTileTokens, end - t), position + t - first, round.keys});
    ++round.num_tiles;
  }
  round.keys += keys;
}

Step CudaBackend::Begin(const StepPlan& asked, bool sharded) {
  Use();
  communicator_.ThrowIfAborted();
  num_rows_ = asked.num_tokens();
  num_logit_rows_ = static_cast<int>(asked.logit_rows.size());
  // Ranks meet on the host between kernels, which no graph can record: one rank only.
  as_graph_ = use_graphs_ && communicator_.world() == 1 && num_rows_ <= kMostGraphRows &&
              OnlyDecodes(asked);
  if (as_graph_) RoundUp(asked, limits_.max_tokens, rounded_);
  const StepPlan& plan = as_graph_ ? rounded_ : asked;
  PlanAttention(plan);
  Packing packing;
  const size_t ids = packing.Add(plan.ids), positions = packing.Add(plan.positions),
               sequence = packing.Add(plan.sequence), pages = packing.Add(plan.page_table),
               logit_rows = packing.Add(plan.logit_rows), draws = packing.Add(plan.draws),
               tiles = packing.Add(tiles_), runs = packing.Add(key_runs_),
               prompt_tiles = packing.Add(prompt_tiles_);
  // Grows with the longest page table so far; the last step has ended.
  plan_host_.Reserve(packing.size());
  if (plan_host_.size() > plan_device_.size()) graphs_.Clear();
  plan_device_.Reserve(plan_host_.size());
  auto* host = plan_host_.as<std::byte>();
  auto* device = plan_device_.as<std::byte>();
  const auto put = [&](const auto& values, size_t at) {
    using Value = typename std::decay_t<decltype(values)>::value_type;
    if (!values.empty()) std::memcpy(host + at, values.data(), values.size() * sizeof(Value));
    return reinterpret_cast<const Value*>(device + at);
  };
  Step step;
  step.num_tokens = plan.num_tokens();
  step.num_seqs = plan.num_seqs;
  step.pages_per_seq = plan.pages_per_seq;
  step.num_logit_rows = static_cast<int>(plan.logit_rows.size());
  step.sharded = sharded;
  step.own = sharded ? ShardOfRows(step.num_tokens, communicator_.rank(), communicator_.world())
                     : RowRange{0, step.num_tokens};
  step.ids = put(plan.ids, ids);
  step.positions = put(plan.positions, positions);
  step.sequence = put(plan.sequence, sequence);
  step.page_table = put(plan.page_table, pages);
  step.logit_rows = put(plan.logit_rows, logit_rows);
  step.draws = put(plan.draws, draws);
  device_tiles_ = put(tiles_, tiles);
  device_key_runs_ = put(key_runs_, runs);
  device_prompt_tiles_ = put(prompt_tiles_, prompt_tiles);
  Check(cudaMemcpyAsync(device, host, packing.size(), cudaMemcpyHostToDevice, stream()));
  const auto make_room = [&](int rows, bool shards) {
    communicator_.group().Reserve(communicator_.rank(), rows,
                                  static_cast<size_t>(limits_.hidden) * sizeof(bf16), shards);
  };
  make_room(step.num_tokens, sharded);
  make_room(std::min(step.num_logit_rows, limits_.max_logit_rows), /*shards=*/false);
  const size_t captured = plan.boundaries.size() * static_cast<size_t>(step.own.count) *
                          static_cast<size_t>(limits_.hidden) * sizeof(bf16);
  if (captured > captured_.size()) graphs_.Clear();
  captured_.Reserve(captured);
  captured_host_.Reserve(captured);
  num_captured_ = 0;
  communicator_.group().BeginStep(communicator_.rank());
  replays_ = records_ = shared_begun_ = false;
  if (as_graph_) {
    const StepGraphs::Mode mode =
        graphs_.Begin({step.num_tokens, step.pages_per_seq, plan.boundaries}, stream());
    replays_ = mode == StepGraphs::Mode::kReplay;
    records_ = mode == StepGraphs::Mode::kRecord;
  }
  return step;
}

void CudaBackend::MultiplyByPhase(GemmParams p, int first_row) {
  const int decode = std::clamp(num_decode_rows_ - first_row, 0, p.m), prompt = p.m - decode;
  p.m = decode;
  p.phase = Phase::kDecode;
  MultiplyFew(p);
  p.m = prompt;
  p.phase = Phase::kPrompt;
  p.x += decode * p.x_stride;
  p.y = static_cast<std::byte*>(p.y) +
        decode * p.y_stride * static_cast<int64_t>(p.fp32_out ? sizeof(float) : sizeof(bf16));
  gemm_.Run(p, stream());
}

void CudaBackend::MultiplyFew(const GemmParams& p) {
  StreamProductParams few{};
  few.x = p.x;
  few.x_stride = p.x_stride;
  few.w = p.w;
  few.w_stride = p.w_stride;
  few.y = p.y;
  few.y_stride = p.y_stride;
  few.m = p.m;
  few.n = p.n;
  few.k = p.k;
  few.epilogue = p.fp32_out ? Epilogue::kFloat : p.accumulate ? Epilogue::kAdd : Epilogue::kBf16;
  few.batch = p.batch;
  few.x_batch = p.x_batch;
  few.w_batch = p.w_batch;
  few.y_batch = p.y_batch;
  if (p.w_by_k || (p.fp32_out && p.accumulate) || !Streamable(few)) return gemm_.Run(p, stream());
  StreamProduct(few, stream_workspace_, stream());
}

void CudaBackend::Multiply(const bf16* x, int64_t x_stride, RowRange rows, const Weight& weight,
                           void* y, int64_t y_stride, bool fp32_out, bool accumulate) {
  const DeviceMatrix& w = AsMatrix(weight);
  GemmParams p{x,
               x_stride,
               w.data(),
               w.cols(),
               y,
               y_stride,
               rows.count,
               static_cast<int>(w.rows()),
               static_cast<int>(w.cols())};
  p.fp32_out = fp32_out;
  p.accumulate = accumulate;
  MultiplyByPhase(p, rows.begin);
}

void CudaBackend::Embed(const Step& step, const EmbedParams& p) {
  if (replays_) return;
  EmbedRows({step.ids, AsMatrix(p.table).data(), p.vocab_begin, p.vocab_count,
             static_cast<bf16*>(p.partial), step.num_tokens, p.hidden},
            stream());
}

SumAddNormParams CudaBackend::SharedPartials(const void* own, int num_rows, int hidden,
                                             bool sharded) {
  const DeviceGroup::Parts parts = communicator_.Share(
      {own, num_rows, static_cast<size_t>(hidden) * sizeof(bf16), sharded}, stream());
  SumAddNormParams sum{};
  sum.world = communicator_.world();
  sum.hidden = hidden;
  for (size_t rank = 0; rank < static_cast<size_t>(sum.world); ++rank)
    sum.partial[rank] = reinterpret_cast<const bf16*>(parts[rank]);
  return sum;
}

void CudaBackend::ExchangeAddNorm(const Step& step, const ExchangeAddNormParams& p) {
  if (replays_) return;
  SumAddNormParams sum = SharedPartials(p.partial, step.num_tokens, p.hidden, step.sharded);
  sum.first_row = step.own.begin;
  sum.num_rows = step.own.count;
  sum.residual = static_cast<bf16*>(p.residual);
  sum.replace = p.first;
  sum.weight = p.weight == nullptr ? nullptr : AsMatrix(*p.weight).vector();
  sum.eps = p.eps;
  sum.normed = static_cast<bf16*>(p.normed);
  SumAddNorm(sum, stream());
  communicator_.Release(stream());
}

void CudaBackend::LatentProject(const Step& step, const LatentProjectParams& p) {
  if (replays_) return;
  const auto* x = static_cast<const bf16*>(p.x);
  auto* latents = static_cast<bf16*>(p.latents);
  const int64_t row = p.query_dim + p.kv_lora + p.rope_dim;
  const int rows = step.own.count;
  if (rows == 0) return;
  const auto norm_of = [&](const Weight& weight, bf16* at, int width) {
    RmsNormParams params{};
    params.x = params.y = at;
    params.x_stride = params.y_stride = row;
    params.num_x_rows = params.num_rows = rows;
    params.weight = AsMatrix(weight).vector();
    params.hidden = width;
    params.eps = p.eps;
    return params;
  };
  const RmsNormParams kv_norm = norm_of(p.kv_a_norm, latents + p.query_dim, p.kv_lora);
  if (p.q_a != nullptr) {
    const RmsNormParams q_norm = norm_of(*p.q_a_norm, latents, p.query_dim);
    const DeviceMatrix &q_a = AsMatrix(*p.q_a), &kv_a = AsMatrix(p.kv_a);
    StreamProductParams both{};
    both.x = x;
    both.x_stride = p.hidden;
    both.w = q_a.data();
    both.w2 = kv_a.data();
    both.w_stride = both.k = p.hidden;
    both.y = latents;
    both.y_stride = row;
    both.m = DecodeRowsOf(step.own);
    both.n = p.query_dim;
    both.n2 = static_cast<int>(kv_a.rows());
    RowRange rest = step.own;
    if (Streamable(both)) {
      StreamProduct(both, stream_workspace_, stream());
      rest = {step.own.begin + both.m, step.own.count - both.m};
    }
    if (rest.count > 0) {
      const int64_t done = rest.begin - step.own.begin;
      Multiply(x + done * p.hidden, p.hidden, rest, *p.q_a, latents + done * row, row);
      Multiply(x + done * p.hidden, p.hidden, rest, p.kv_a, latents + done * row + p.query_dim,
               row);
    }
    RmsNormBoth(q_norm, kv_norm, stream());
  } else {
    Check(cudaMemcpy2DAsync(latents, static_cast<size_t>(row) * sizeof(bf16), x,
                            static_cast<size_t>(p.hidden) * sizeof(bf16),
                            static_cast<size_t>(p.hidden) * sizeof(bf16), static_cast<size_t>(rows),
                            cudaMemcpyDeviceToDevice, stream()));
    Multiply(x, p.hidden, step.own, p.kv_a, latents + p.query_dim, row);
    RmsNorm(kv_norm, stream());
  }
}

void CudaBackend::Gather(const Step& step, const GatherParams& p) {
  if (!step.sharded) return;
  communicator_.GatherRows(p.own, step.num_tokens, p.row_bytes, p.all, stream());
}

void CudaBackend::Attention(const Step& step, const AttentionParams& p) {
  if (replays_) return;
  const int head_dim = p.nope_dim + p.rope_dim, latent_dim = p.kv_lora + p.rope_dim;
  const int64_t row = p.query_dim + latent_dim, heads = p.num_heads;
  const auto* latents = static_cast<const bf16*>(p.latents);
  auto* cache = cache_.as<bf16>() + int64_t{p.layer} * num_pages_ * kPageTokens * cache_width_;
  Multiply(latents, row, {0, step.num_tokens}, p.q_b, queries_.as<bf16>(), heads * head_dim);
  RotateAndStoreParams rotate{latents,
                              row,
                              p.query_dim,
                              queries_.as<bf16>(),
                              static_cast<const float2*>(p.rotary),
                              step.positions,
                              step.sequence,
                              step.page_table,
                              step.pages_per_seq,
                              cache,
                              absorbed_.as<bf16>(),
                              step.num_tokens,
                              p.num_heads,
                              p.nope_dim,
                              p.rope_dim,
                              p.kv_lora};
  if (absorbable_ && num_decode_rows_ > 0) {
    rotate.num_tokens = num_decode_rows_;
    RotateAndAbsorb({rotate, AsMatrix(p.kv_b).data(), p.v_dim}, stream());
    const int64_t done = num_decode_rows_;
    rotate.latents += done * row;
    rotate.queries += done * heads * head_dim;
    rotate.absorbed += done * heads * latent_dim;
    rotate.positions += done;
    rotate.sequence += done;
    rotate.num_tokens = step.num_tokens - num_decode_rows_;
  }
  RotateAndStore(rotate, stream());
  AttendAbsorbed(step, p, cache);
  // After the absorbed rows, whose range may hold prompts too.
  if (!prompt_rounds_.empty()) AttendExpanded(step, p, cache);
  Multiply(heads_.as<bf16>(), heads * p.v_dim, {0, step.num_tokens}, p.o, p.partial, p.hidden);
}

void CudaBackend::AttendAbsorbed(const Step& step, const AttentionParams& p, const bf16* cache) {
  const int latent_dim = p.kv_lora + p.rope_dim, head_dim = p.nope_dim + p.rope_dim;
  const int64_t heads = p.num_heads;
  const int64_t up_rows = int64_t{p.nope_dim + p.v_dim} * p.kv_lora;  // of kv_b, a head
  const bf16* kv_b = AsMatrix(p.kv_b).data();
  {
    const int64_t first = absorbed_rows_.begin;
    GemmParams absorb{queries_.as<bf16>() + first * heads * head_dim,
                      heads * head_dim,
                      kv_b,
                      p.kv_lora,
                      absorbed_.as<bf16>() + first * heads * latent_dim,
                      heads * latent_dim,
                      absorbed_rows_.count,
                      p.kv_lora,
                      p.nope_dim};
    absorb.w_by_k = true;
    absorb.batch = p.num_heads;
    absorb.x_batch = head_dim;
    absorb.w_batch = up_rows;
    absorb.y_batch = latent_dim;
    MultiplyByPhase(absorb, absorbed_rows_.begin);
  }
  for (const RowRange& run : decode_runs_) {
    AttendDecode(
        {absorbed_.as<bf16>() + run.begin * heads * latent_dim, cache, step.positions + run.begin,
         step.sequence + run.begin, step.page_table, step.pages_per_seq, run.count, p.num_heads,
         latent_dim, p.kv_lora, p.scale, attended_.as<bf16>() + run.begin * heads * p.kv_lora,
         split_parts_.as<float>(), split_stats_.as<float2>()},
        stream());
  }
  Attend({absorbed_.as<bf16>(), cache, step.positions, step.sequence, step.page_table,
          step.pages_per_seq, device_tiles_, num_small_tiles_,
          static_cast<int>(tiles_.size()) - num_small_tiles_, p.num_heads, latent_dim, p.kv_lora,
          p.scale, attended_.as<bf16>()},
         stream());
  // Decoding rows in front, then whatever else is absorbed.
  const auto values = [&](RowRange rows) {
    const int64_t first = rows.begin;
    GemmParams product{attended_.as<bf16>() + first * heads * p.kv_lora,
                       heads * p.kv_lora,
                       kv_b + int64_t{p.nope_dim} * p.kv_lora,
                       p.kv_lora,
                       heads_.as<bf16>() + first * heads * p.v_dim,
                       heads * p.v_dim,
                       rows.count,
                       p.v_dim,
                       p.kv_lora};
    product.batch = p.num_heads;
    product.x_batch = p.kv_lora;
    product.w_batch = up_rows;
    product.y_batch = p.v_dim;
    MultiplyByPhase(product, rows.begin);
  };
  if (absorbable_) values({0, num_decode_rows_});
  values(absorbed_rows_);
}

void CudaBackend::AttendExpanded(const Step& step, const AttentionParams& p, const bf16* cache) {
  const int latent_dim = p.kv_lora + p.rope_dim;
  const int64_t expanded_dim = int64_t{p.num_heads} * (p.nope_dim + p.v_dim);
  for (const PromptRound& round : prompt_rounds_) {
    CollectKeys(
        {cache, step.page_table, step.pages_per_seq, latent_dim, device_key_runs_ + round.first_run,
         static_cast<int>(round.num_runs), key_latents_.as<bf16>()},
        stream());
    const DeviceMatrix& kv_b = AsMatrix(p.kv_b);
    gemm_.Run({key_latents_.as<bf16>(), latent_dim, kv_b.data(), kv_b.cols(), expanded_.as<bf16>(),
               expanded_dim, round.keys, static_cast<int>(kv_b.rows()), p.kv_lora},
              stream());
    AttendPrompts(
        {queries_.as<bf16>(), expanded_.as<bf16>(), key_latents_.as<bf16>(),
         device_prompt_tiles_ + round.first_tile, static_cast<int>(round.num_tiles), p.num_heads,
         p.nope_dim, p.rope_dim, p.v_dim, p.kv_lora, p.scale, heads_.as<bf16>()},
        stream());
  }
}

// gate_ = silu(gate x) · (up x) of the first `rows` rows.
StreamProductParams CudaBackend::GateAndUp(const bf16* x, int hidden, const Weight& gate,
                                           const Weight& up, int rows) const {
  StreamProductParams product{};
  product.x = x;
  product.x_stride = product.w_stride = product.k = hidden;
  product.w = AsMatrix(gate).data();
  product.w2 = AsMatrix(up).data();
  product.y = gate_.as<bf16>();
  product.n = static_cast<int>(AsMatrix(gate).rows());
  product.y_stride = product.n;
  product.m = rows;
  product.epilogue = Epilogue::kSwiGlu;
  return product;
}

void CudaBackend::Route(const Step& step, const RouteParams& p) {
  if (replays_) return;
  const auto* x = static_cast<const bf16*>(p.x);
  auto* logits = router_logits_.as<float>();
  RowRange rest = step.own;
  if (!step.sharded && p.shared_gate != nullptr && num_decode_rows_ > 0) {
    StreamProductParams router{};
    router.x = x;
    router.x_stride = router.w_stride = router.k = p.hidden;
    router.w = AsMatrix(p.gate).data();
    router.y = logits;
    router.y_stride = router.n = p.num_experts;
    router.m = num_decode_rows_;
    router.epilogue = Epilogue::kFloat;
    const StreamProductParams shared =
        GateAndUp(x, p.hidden, *p.shared_gate, *p.shared_up, num_decode_rows_);
    if (Streamable(router) && Streamable(shared)) {
      StreamProductBoth(router, shared, stream_workspace_, stream());
      shared_begun_ = true;
      rest = {num_decode_rows_, step.num_tokens - num_decode_rows_};
    }
  }
  const int64_t done = rest.begin - step.own.begin;
  Multiply(x + done * p.hidden, p.hidden, rest, p.gate, logits + done * p.num_experts,
           p.num_experts, /*fp32_out=*/true);
  ChooseExperts(
      {router_logits_.as<float>(), AsMatrix(p.bias).vector(), step.own.count, p.num_experts,
       p.top_k, p.num_groups, p.top_groups, p.normalise, p.scaling, p.experts, p.weights},
      stream());
}

const RowMaps& CudaBackend::MapsOf(const bf16* x, int columns) {
  for (const MapsOfRows& made : row_maps_) {
    if (made.x == x && made.columns == columns) return made.maps;
  }
  const int64_t rows = int64_t{limits_.max_tokens} * limits_.top_k;
  row_maps_.push_back({x, columns, MakeRowMaps(x, rows, columns)});
  return row_maps_.back().maps;
}

void CudaBackend::RoutedFfn(const Step& step, const RoutedFfnParams& p) {
  if (replays_) return;
  const DeviceExperts& experts = AsExperts(p.slots);
  const ExpertBlocks& blocks = experts.blocks();
  const auto num_experts = static_cast<int>(experts.shape().slot_of_expert.size());
  const bool by_hopper = hopper_ && experts.format() == Format::kInt4;
  // About the rows that an expert gets; Hopper's tiles are as wide as they need anyway.
  const int expected = CeilDiv(step.num_tokens * p.top_k, num_experts);
  const bool few = by_hopper && step.num_tokens <= kFewTokens;
  int tile_rows = by_hopper ? kHopperTileRows : experts.format() == Format::kInt4 ? 128 : 64;
  if (few) tile_rows = step.num_tokens <= 8 ? 8 : step.num_tokens <= 16 ? 16 : kFewRows;
  while (!by_hopper && tile_rows > 16 && tile_rows / 2 >= expected) tile_rows /= 2;
  SortRowsParams sorted{p.experts, experts.slot_of_expert(),  step.num_tokens,
                        p.top_k,   experts.shape().num_slots, tile_rows};
  sorted.counts = counts_.as<int32_t>();
  sorted.first_row = first_row_.as<int32_t>();
  sorted.token_of_row = token_of_row_.as<int32_t>();
  sorted.row_of = row_of_.as<int32_t>();
  sorted.tiles = row_tiles_.as<TokenTile>();
  sorted.num_tiles = num_row_tiles_.as<int32_t>();
  const bool few_pairs =
      int64_t{step.num_tokens} * p.top_k <= kFewPairs && experts.shape().num_slots <= kFewSlots;
  // The narrowest tile has room for every token of the step, and costs no more for it.
  sorted.whole_step = few && few_pairs && step.num_tokens <= 8 &&
                      int64_t{std::min(step.num_tokens * p.top_k, sorted.num_slots)} * tile_rows <=
                          int64_t{limits_.max_tokens} * limits_.top_k;
  // Hopper's other kernel wants tiles by width.
  if (few_pairs && (few || !by_hopper)) {
    SortFewRows(sorted, stream());
  } else {
    SortRows(sorted, stream());
  }
  // TMA takes rows that lie together; y's memory is free until the second product.
  const bool gathers = by_hopper && !sorted.whole_step;
  if (gathers)
    GatherTokens(static_cast<const bf16*>(p.x), sorted, blocks.hidden, y_.as<bf16>(), stream());
  const auto multiply = [&](const GroupedProductParams& product, Product which) {
    if (few) {
      FewRowsProduct(product, MapsOf(product.x, product.k), which, tile_rows, stream());
    } else if (by_hopper) {
      HopperProduct(product, MapsOf(product.x, product.k), which, stream());
    } else {
      GroupedProduct(product, which, experts.format(), tile_rows, stream());
    }
  };
  GroupedProductParams product{};
  product.weights = experts.gate_up();
  product.slot_bytes = experts.slot_bytes();
  product.k_blocks = blocks.gate_up_k_blocks();
  product.weight_tiles = blocks.gate_up_tiles();
  product.tiles = row_tiles_.as<TokenTile>();
  product.num_tiles = num_row_tiles_.as<int32_t>();
  product.x = gathers ? y_.as<bf16>() : static_cast<const bf16*>(p.x);
  product.from_first_row = sorted.whole_step;
  product.x_stride = product.k = blocks.hidden;
  product.row_of_x = by_hopper ? nullptr : token_of_row_.as<int32_t>();
  product.out = h_.as<bf16>();
  product.out_stride = product.out_columns = blocks.h_columns();
  multiply(product, Product::kGateUp);
  product.weights = experts.down();
  product.k_blocks = blocks.down_k_blocks();
  product.weight_tiles = blocks.down_tiles();
  product.x = h_.as<bf16>();
  product.x_stride = product.k = blocks.h_columns();
  product.row_of_x = nullptr;
  product.from_first_row = false;
  product.out = y_.as<bf16>();
  product.out_stride = product.out_columns = blocks.hidden;
  multiply(product, Product::kDown);
  SumExpertRows({y_.as<bf16>(), row_of_.as<int32_t>(), p.experts, p.weights, step.num_tokens,
                 p.top_k, blocks.hidden, static_cast<bf16*>(p.partial)},
                stream());
}

void CudaBackend::DenseFfn(const Step& step, const DenseFfnParams& p) {
  if (replays_) return;
  const auto* x = static_cast<const bf16*>(p.x);
  const StreamProductParams few =
      GateAndUp(x, p.hidden, p.gate, p.up, DecodeRowsOf({0, step.num_tokens}));
  RowRange rest{0, step.num_tokens};
  if (Streamable(few)) {
    if (!shared_begun_) StreamProduct(few, stream_workspace_, stream());
    rest = {few.m, step.num_tokens - few.m};
  }
  shared_begun_ = false;
  if (rest.count > 0) {
    const int64_t done = int64_t{rest.begin} * p.width;
    x += int64_t{rest.begin} * p.hidden;
    Multiply(x, p.hidden, rest, p.gate, gate_.as<bf16>() + done, p.width);
    Multiply(x, p.hidden, rest, p.up, up_.as<bf16>() + done, p.width);
    SwiGlu(gate_.as<bf16>() + done, up_.as<bf16>() + done, int64_t{rest.count} * p.width, stream());
  }
  Multiply(gate_.as<bf16>(), p.width, {0, step.num_tokens}, p.down, p.partial, p.hidden,
           /*fp32_out=*/false, p.accumulate);
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
  const size_t real =
      static_cast<size_t>(std::min(step.own.count, num_rows_)) * static_cast<size_t>(p.hidden);
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

void CudaBackend::Sample(const Step& step, const SampleParams& p) {
  if (p.count == 0) return;
  // Rows that a plan was rounded up by have no place on the host.
  const int count = std::clamp(num_logit_rows_ - p.first, 0, p.count);
  if (p.ids != nullptr && count > 0)
    pending_tokens_.push_back({p.ids, p.logprobs, p.entropies, p.first, count});
  if (replays_) return;
  // Each logit row is normed by the rank that keeps it; the others add zeros.
  RmsNormParams norm{};
  norm.x = static_cast<const bf16*>(p.residual);
  norm.x_stride = norm.y_stride = norm.hidden = p.hidden;
  norm.rows = step.logit_rows + p.first;
  norm.first_row = step.own.begin;
  norm.num_x_rows = step.sharded || communicator_.rank() == 0 ? step.own.count : 0;
  norm.weight = AsMatrix(p.norm).vector();
  norm.y = picked_.as<bf16>();
  norm.num_rows = p.count;
  norm.eps = p.eps;
  RmsNorm(norm, stream());
  SumAddNormParams sum = SharedPartials(picked_.as<bf16>(), p.count, p.hidden, /*sharded=*/false);
  sum.num_rows = p.count;
  sum.residual = normed_.as<bf16>();
  sum.replace = true;
  SumAddNorm(sum, stream());
  communicator_.Release(stream());

  const DeviceMatrix& head = AsMatrix(p.lm_head);
  GemmParams product{
      normed_.as<bf16>(),           p.hidden,         head.data(), head.cols(),
      logits_.as<float>(),          p.vocab_per_rank, p.count,     static_cast<int>(head.rows()),
      static_cast<int>(head.cols())};
  product.fp32_out = true;
  product.phase = Phase::kDecode;  // a few rows, of prompts too
  MultiplyFew(product);
  const float* logits = AllLogits(logits_.as<float>(), p.count, p.vocab_per_rank);
  if (p.ids == nullptr) return;
  const auto tokens = static_cast<size_t>(limits_.max_tokens);
  auto* scores = results_.as<float>() + p.first;
  ChooseTokens({logits, p.count, p.vocab, p.vocab_per_rank, step.draws + p.first,
                results_.as<int32_t>() + p.first, scores + tokens, scores + 2 * tokens,
                choose_workspace_.as<void>()},
               stream());
}

const float* CudaBackend::AllLogits(const float* own, int count, int vocab_per_rank) {
  if (communicator_.world() == 1) return own;
  // Every rank's block is one row of as many.
  communicator_.GatherRows(
      own, communicator_.world(),
      static_cast<size_t>(count) * static_cast<size_t>(vocab_per_rank) * sizeof(float),
      all_logits_.as<void>(), stream());
  return all_logits_.as<float>();
}

void CudaBackend::Finish() {
  if (replays_ || records_) graphs_.Launch(stream());
  CopyStatesOut();
  const auto row_bytes = static_cast<size_t>(limits_.max_tokens) * sizeof(float);
  if (!pending_tokens_.empty()) {
    Check(cudaMemcpy2DAsync(results_host_.as<void>(), row_bytes, results_.as<void>(), row_bytes,
                            static_cast<size_t>(num_logit_rows_) * sizeof(float), 3,
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
  const auto tokens = static_cast<size_t>(limits_.max_tokens);
  for (const PendingTokens& pending : pending_tokens_) {
    const auto* scores = results_host_.as<float>() + pending.first;
    std::copy_n(results_host_.as<int32_t>() + pending.first, pending.count, pending.ids);
    std::copy_n(scores + tokens, pending.count, pending.logprobs);
    std::copy_n(scores + 2 * tokens, pending.count, pending.entropies);
  }
  pending_tokens_.clear();
}

namespace {

// Empty: every GPU reads every other's memory. Else which two do not.
std::string NoPeers(const std::vector<int>& devices) {
  const int used = *std::max_element(devices.begin(), devices.end()) + 1;
  for (int device = 0; device < used; ++device) {
    for (int peer = 0; peer < used; ++peer) {
      int can = 1;
      if (peer != device) Check(cudaDeviceCanAccessPeer(&can, device, peer));
      if (can == 0) {
        return "GPUs " + std::to_string(device) + " and " + std::to_string(peer) +
               " cannot read each other's memory";
      }
    }
  }
  return "";
}

void EnablePeers(const std::vector<int>& devices) {
  const int used = *std::max_element(devices.begin(), devices.end()) + 1;
  for (int device = 0; device < used; ++device) {
    Check(cudaSetDevice(device));
    for (int peer = 0; peer < used; ++peer) {
      if (peer == device) continue;
      const cudaError_t code = cudaDeviceEnablePeerAccess(peer, 0);
      if (code == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
      } else {
        Check(code);
      }
    }
  }
}

}  // namespace

std::shared_ptr<DeviceGroup> MakeGroup(const std::vector<int>& devices, CudaOptions::Comm comm) {
  const std::string no_peers = comm == CudaOptions::Comm::kNccl ? "" : NoPeers(devices);
  if (comm == CudaOptions::Comm::kAuto)
    comm = no_peers.empty() ? CudaOptions::Comm::kPeer : CudaOptions::Comm::kNccl;
  if (comm == CudaOptions::Comm::kPeer) {
    if (!no_peers.empty()) Fail("--comm peer: " + no_peers + "; --comm nccl needs no such access");
    EnablePeers(devices);
    const bool apart = std::set<int>(devices.begin(), devices.end()).size() == devices.size();
    return std::make_shared<PeerGroup>(static_cast<int>(devices.size()), apart);
  }
#ifdef STATETAP_NCCL
  return MakeNcclGroup(devices);
#else
  Fail("--comm nccl: this build has no NCCL" +
       (no_peers.empty() ? "; --comm peer needs none" : ", and " + no_peers));
#endif
}

}  // namespace statetap::cuda

namespace statetap {

int NumGpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

bool HasNccl() {
#ifdef STATETAP_NCCL
  return true;
#else
  return false;
#endif
}

std::vector<std::unique_ptr<Backend>> MakeCudaBackends(int world, const CudaOptions& options) {
  using cuda::Check;
  const int gpus = NumGpus();
  if (gpus == 0) cuda::Fail("no GPU can be used");
  std::vector<int> devices;
  for (int rank = 0; rank < world; ++rank) devices.push_back(rank % gpus);
  const std::shared_ptr<cuda::DeviceGroup> group = cuda::MakeGroup(devices, options.comm);
  std::vector<std::unique_ptr<Backend>> ranks;
  for (int rank = 0; rank < world; ++rank) {
    const int device = devices[static_cast<size_t>(rank)];
    Check(cudaSetDevice(device));
    ranks.push_back(std::make_unique<cuda::CudaBackend>(rank, device, group, options));
  }
  return ranks;
}

}  // namespace statetap
