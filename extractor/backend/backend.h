// The operations of the model at the grain of the fast kernels, one params struct each. A Backend
// is one rank: its memory, its slice of the weights, its part in the group. Called from the rank's
// own thread only; device faults throw.
//
// Activations have the backend's own element type (fp32 on the CPU, bf16 on GPUs) behind `void*`; a
// shape stands behind each pointer. `T` is the step's tokens, `own` the rows of the residual stream
// that this rank keeps (all T when it is replicated). A row's arithmetic depends on its own prefix
// alone, never on the other rows of the step.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "extractor/backend/communicator.h"
#include "extractor/backend/step_plan.h"
#include "extractor/base/dtype.h"

namespace statetap {

// A weight of this rank, filled piece by piece in the checkpoint's own form; the backend decides
// how it lies in memory.
class Weight {
 public:
  virtual ~Weight() = default;
  // Rows [first_row, first_row + rows) of a part; the next row lies `stride_bytes` behind. Safe
  // from several threads on different rows. A matrix has one part. Experts have ExpertPart(slot,
  // projection, scales) of them.
  virtual void Fill(int part, int64_t first_row, int64_t rows, const std::byte* from,
                    int64_t stride_bytes) = 0;
};

enum class Projection { kGate, kUp, kDown };
constexpr int ExpertPart(int slot, Projection projection, bool scales) {
  return (slot * 3 + static_cast<int>(projection)) * 2 + (scales ? 1 : 0);
}

struct ExpertsShape {
  int num_slots = 0;  // experts of this rank
  int hidden = 0;
  int width = 0;  // of this rank's slice of an expert
  bool int4 =
      true;  // packed int32 [out, in/8] and scales [out, in/32]; else plain `dtype` [out, in]
  DType dtype = DType::kBf16;        // of plain weights
  DType scale_dtype = DType::kBf16;  // bf16, f16 or f32
  // [num_experts of the model]: this rank's slot, −1: another rank's.
  std::vector<int32_t> slot_of_expert;
};

// A plan where the ops can read it: the host arrays on the CPU, copies at fixed addresses on a GPU.
struct Step {
  int num_tokens = 0, num_seqs = 0, pages_per_seq = 0, num_logit_rows = 0;
  RowRange own;
  bool sharded = false;
  int half = -1;  // of a large step: 0 or 1; the two take turns
  const int32_t *ids = nullptr, *positions = nullptr, *sequence = nullptr, *page_table = nullptr,
                *logit_rows = nullptr;
  const StepPlan::Draw* draws = nullptr;
};

// The sizes of plans and the rows of one rank; the arrays are the backend's to set.
inline std::vector<Step> ShapesOf(std::span<const StepPlan> plans, bool sharded, int rank,
                                  int world) {
  std::vector<Step> steps(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    Step& step = steps[i];
    step.num_tokens = plans[i].num_tokens();
    step.num_seqs = plans[i].num_seqs;
    step.pages_per_seq = plans[i].pages_per_seq;
    step.num_logit_rows = static_cast<int>(plans[i].logit_rows.size());
    step.sharded = sharded;
    step.half = plans.size() > 1 ? static_cast<int>(i) : -1;
    step.own = sharded ? ShardOfRows(step.num_tokens, rank, world) : RowRange{0, step.num_tokens};
  }
  return steps;
}

// partial[t] = table[ids[t] − vocab_begin] where that row is this rank's, else 0.
struct EmbedParams {
  const Weight& table;  // [local vocab, hidden]
  int vocab_begin, vocab_count;
  int hidden;
  void* partial;  // [T, hidden]
};

// The seam between attention and FFN, and between layers. residual += sum over ranks of partial;
// normed = residual · rsqrt(mean(residual²) + eps) · weight.
struct ExchangeAddNormParams {
  const void* partial;   // [T, hidden] of this rank
  void* residual;        // [own, hidden]
  bool first;            // residual = sum instead (after Embed)
  const Weight* weight;  // [hidden]; null: no norm (after the last layer)
  float eps;
  int hidden;
  void* normed;  // [own, hidden]
};

// latents[t] = query | norm(c) | k_pe, with query = norm(q_a x) or, without a query LoRA, x itself;
// c, k_pe = kv_a x.
struct LatentProjectParams {
  const void* x;            // [own, hidden]
  const Weight* q_a;        // [query_dim, hidden]; null: no query LoRA, query_dim == hidden
  const Weight* q_a_norm;   // [query_dim]
  const Weight& kv_a;       // [kv_lora + rope_dim, hidden]
  const Weight& kv_a_norm;  // [kv_lora]
  float eps;                // of the two inner norms
  int hidden, query_dim, kv_lora, rope_dim;
  void* latents;  // [own, query_dim + kv_lora + rope_dim]
};

// all = rows of every rank, of several arrays at once. `own` may lie at its place in `all`. Nothing
// where the step is replicated.
struct GatherParams {
  const void* own;  // [own, row]
  void* all;        // [T, row]
  size_t row_bytes;
};

// MLA in the absorbed form over the paged latent cache: writes norm(c) | rotated k_pe of the step's
// tokens into the cache of `layer`, then for each head h: q = q_b query, rotated; score(t, j) =
// scale · (U_hᵀ q_nope · c_j + q_pe · k_pe_j), j ≤ position; o = V_h Σ softmax · c_j; partial =
// o_proj concat(o). U_h and V_h are rows of kv_b. Softmax in fp32, j in ascending order. Rotation
// is interleaved (pairs 2i, 2i+1).
struct AttentionParams {
  const void* latents;  // [T, query_dim + kv_lora + rope_dim]
  const Weight& q_b;    // [local heads · (nope + rope), query_dim]
  const Weight& kv_b;   // [local heads · (nope + v), kv_lora]
  const Weight& o;      // [hidden, local heads · v]
  const void* rotary;   // from Backend::NewRotary
  int layer;
  int num_heads;  // of this rank
  int query_dim, kv_lora, nope_dim, rope_dim, v_dim, hidden;
  float scale;
  void* partial;  // [T, hidden]
};

// s = sigmoid(x·gate), products in fp32; the top_k largest of s + bias among the top_groups best
// groups (a group is worth its two best), ties to the lower index; weights s, normalised if asked,
// times scaling.
struct RouteParams {
  const void* x;       // [own, hidden]
  const Weight& gate;  // [num_experts, hidden]
  const Weight& bias;  // [num_experts] fp32
  int hidden, num_experts, top_k, num_groups, top_groups;
  bool normalise;
  float scaling;
  int32_t* experts;  // [own, top_k], best first
  float* weights;    // [own, top_k]
  // The shared experts, whose DenseFfn of the same rows comes next but one: a backend may begin it
  // here. Null: none.
  const Weight* shared_gate = nullptr;
  const Weight* shared_up = nullptr;
};

// partial[t] = Σ over this rank's experts e of t, ascending, of weight · down_e(silu(gate_e x) ·
// up_e x). In stages with the same params, between which ops of the step's other half may come:
// gate and up by parts (40, 15 and 45 % where a backend has parts), down, and the sum, which a
// DenseFfn right behind kDown may take instead.
enum class RoutedStage { kGateUpFirst, kGateUpSecond, kGateUpThird, kDown, kSum };
struct RoutedFfnParams {
  const void* x;           // [T, hidden]
  const int32_t* experts;  // [T, top_k]
  const float* weights;    // [T, top_k]
  const Weight& slots;
  int top_k;
  void* partial;  // [T, hidden]
};

// partial[t] = down(silu(gate x) · up x), this rank's slice of the width, plus what the routed
// experts sum up to.
struct DenseFfnParams {
  const void* x;       // [T, hidden]
  const Weight& gate;  // [width, hidden]
  const Weight& up;    // [width, hidden]
  const Weight& down;  // [hidden, width]
  int hidden, width;
  const RoutedFfnParams* routed;  // of the same partial, after its kDown; null: none
  void* partial;                  // [T, hidden]
};

// to[i] = bf16(residual[i]) for this rank's rows, on the host at [own.begin + i]. Complete after
// Backend::Finish.
struct CaptureParams {
  const void* residual;  // [own, hidden]
  int hidden;
  uint16_t* to;  // host, [T, hidden]
};

// logits = lm_head · norm(residual[row]) for logit rows [first, first + count), then a token a row:
// greedy (ties to the lower id), or a draw from the softmax at `temperature` cut to the smallest
// set of most likely tokens with mass ≥ top_p.
struct SampleParams {
  const void* residual;  // [own, hidden]
  const Weight& norm;    // [hidden]
  float eps;
  const Weight& lm_head;  // [local vocab, hidden]
  int hidden, vocab, vocab_per_rank;
  int first, count;
  // Host [count], complete after Backend::Finish. Null on a rank that does not keep them.
  ChosenToken* chosen;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Communicator& communicator() = 0;
  virtual size_t activation_bytes() const = 0;  // of an element
  // What this rank holds by now, in bytes. Capture and host: for states on their way out.
  struct Memory {
    int64_t weights = 0, kv_cache = 0, workspace = 0, capture = 0, host = 0;
  };
  virtual Memory memory() const = 0;

  // Memory of this rank, zeroed, owned by the backend until it ends. For planning at load; the
  // layer loop never allocates.
  virtual void* Allocate(size_t bytes) = 0;
  // The same of host memory, which Capture fills without a copy in between, whatever the rank.
  virtual void* AllocateHost(size_t bytes) = 0;
  virtual std::unique_ptr<Weight> NewMatrix(int64_t rows, int64_t cols, DType stored) = 0;
  virtual std::unique_ptr<Weight> NewExperts(const ExpertsShape& shape) = 0;
  // After every weight was filled.
  virtual void FinishWeights() = 0;
  // inverse_frequencies: [rope_dim / 2]; angles position · frequency in fp32, as every reference
  // computes them.
  virtual const void* NewRotary(std::span<const float> inverse_frequencies, int num_positions) = 0;
  // Bytes that this rank's cache may take unless another size is asked for. On a GPU of what is
  // left now, all else being planned.
  virtual int64_t RoomForKvCache() const = 0;
  // Latent cache [layers][pages][kPageTokens][width]. Once.
  virtual void NewKvCache(int num_layers, int num_pages, int width) = 0;
  // Room for the largest step of the ops' own scratch.
  struct Limits {
    int max_tokens = 0, max_context = 0, max_logit_rows = 0;
    int hidden = 0;
    int num_heads = 0;   // of this rank
    int query_dim = 0;   // of all local heads: heads · (nope + rope)
    int heads_dim = 0;   // heads · v
    int latent_dim = 0;  // kv_lora + rope
    int rope_dim = 0;
    int max_width = 0;     // of the widest FFN slice
    int padded_vocab = 0;  // vocab_per_rank · world
    int num_experts = 0, top_k = 0;
    int num_boundaries = 0;  // captured in a step without growing anything
  };
  virtual void PlanScratch(const Limits& limits) = 0;

  // Makes a step, or the two halves of one, readable for the ops that follow. `plans` live until
  // Finish.
  virtual std::vector<Step> BeginSteps(std::span<const StepPlan> plans, bool sharded) = 0;
  Step Begin(const StepPlan& plan, bool sharded) { return BeginSteps({&plan, 1}, sharded)[0]; }
  // Whether what one half of a step exchanges travels beside the other half's ops: else halves gain
  // nothing.
  virtual bool Overlaps() const { return false; }
  // The step's partial sums are made. They change no more before ExchangeAddNorm, and may travel.
  virtual void Send(const Step& /*step*/, const void* /*partial*/, int /*hidden*/) {}
  virtual void Embed(const Step& step, const EmbedParams& params) = 0;
  virtual void ExchangeAddNorm(const Step& step, const ExchangeAddNormParams& params) = 0;
  virtual void LatentProject(const Step& step, const LatentProjectParams& params) = 0;
  virtual void Gather(const Step& step, std::initializer_list<GatherParams> arrays) = 0;
  virtual void Attention(const Step& step, const AttentionParams& params) = 0;
  virtual void Route(const Step& step, const RouteParams& params) = 0;
  virtual void RoutedFfnStage(const Step& step, const RoutedFfnParams& params,
                              RoutedStage stage) = 0;
  void RoutedFfn(const Step& step, const RoutedFfnParams& params) {
    using enum RoutedStage;
    for (const auto stage : {kGateUpFirst, kGateUpSecond, kGateUpThird, kDown, kSum})
      RoutedFfnStage(step, params, stage);
  }
  virtual void DenseFfn(const Step& step, const DenseFfnParams& params) = 0;
  virtual void Capture(const Step& step, const CaptureParams& params) = 0;
  // The results are the same on every rank.
  virtual void Sample(const Step& step, const SampleParams& params) = 0;
  // Waits for everything enqueued.
  virtual void Finish() = 0;
};

// `world` ranks as threads of this process that share memory; `threads` worker threads among them,
// 0: one a core.
std::vector<std::unique_ptr<Backend>> MakeCpuBackends(int world, int threads);

}  // namespace statetap
