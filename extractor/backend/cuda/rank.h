// One rank: its stream, its memory, its scratch, and the ops as launches on that stream.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "extractor/backend/cuda/attention.h"
#include "extractor/backend/cuda/cuda_backend.h"
#include "extractor/backend/cuda/gemm.h"
#include "extractor/backend/cuda/owners.h"
#include "extractor/backend/cuda/peer_group.h"
#include "extractor/backend/cuda/prefill.h"
#include "extractor/backend/cuda/rows.h"
#include "extractor/backend/cuda/step_graphs.h"
#include "extractor/backend/cuda/stream_product.h"
#include "extractor/backend/cuda/weights.h"

namespace statetap::cuda {

class CudaBackend : public Backend {
 public:
  CudaBackend(int rank, int device, std::shared_ptr<DeviceGroup> group, const CudaOptions& options);
  ~CudaBackend() override;

  Communicator& communicator() override { return communicator_; }
  size_t activation_bytes() const override { return sizeof(bf16); }
  Memory memory() const override;
  void* Allocate(size_t bytes) override;
  void* AllocateHost(size_t bytes) override;
  std::unique_ptr<Weight> NewMatrix(int64_t rows, int64_t cols, DType stored) override;
  std::unique_ptr<Weight> NewExperts(const ExpertsShape& shape) override;
  void FinishWeights() override;
  const void* NewRotary(std::span<const float> inverse_frequencies, int num_positions) override;
  int64_t RoomForKvCache() const override;
  void NewKvCache(int num_layers, int num_pages, int width) override;
  void PlanScratch(const Limits& limits) override;

  std::vector<Step> BeginSteps(std::span<const StepPlan> plans, bool sharded) override;
  bool Overlaps() const override { return communicator_.group().Overlaps(); }
  void Send(const Step& step, const void* partial, int hidden) override;
  void Embed(const Step& step, const EmbedParams& params) override;
  void ExchangeAddNorm(const Step& step, const ExchangeAddNormParams& params) override;
  void LatentProject(const Step& step, const LatentProjectParams& params) override;
  void Gather(const Step& step, std::initializer_list<GatherParams> arrays) override;
  void Attention(const Step& step, const AttentionParams& params) override;
  void Route(const Step& step, const RouteParams& params) override;
  void RoutedFfnStage(const Step& step, const RoutedFfnParams& params, RoutedStage stage) override;
  void DenseFfn(const Step& step, const DenseFfnParams& params) override;
  void Capture(const Step& step, const CaptureParams& params) override;
  void Sample(const Step& step, const SampleParams& params) override;
  void Finish() override;

  cudaStream_t stream() const { return stream_.get(); }
  // Off: every step runs kernel by kernel. For comparing the two, and for timing.
  void UseGraphs(bool use) { use_graphs_ = use; }
  // Recorded steps are recorded anew.
  void ForgetGraphs() { graphs_.Clear(); }
  bool records() const { return records_; }
  bool replays() const { return replays_; }

 protected:
  // [ranks, count, vocab_per_rank] from this rank's [count, vocab_per_rank].
  virtual const float* AllLogits(const float* own, int count, int vocab_per_rank);
  const DeviceBuffer& cache() const { return cache_; }

 private:
  // Prompts, in rounds whose keys fit the scratch.
  struct PromptRound {
    size_t first_run, num_runs, first_tile, num_tiles;
    int keys;
  };
  // A step's plan, or that of one of its halves.
  struct Planned {
    // Its arrays, at one place each: staged in pinned memory, one copy a step.
    PinnedBuffer host;
    DeviceBuffer device;
    // What was asked for may be fewer rows than run.
    int num_rows = 0, num_logit_rows = 0;
    int first_logit_row = 0;           // of both halves'
    std::vector<AttentionTile> tiles;  // small ones, then large ones
    int num_small_tiles = 0;
    std::vector<RowRange> decode_runs;  // rows that decode
    int num_decode_rows = 0;            // in front
    // All that tiles name lie within, and rows that decode unless RotateAndAbsorb takes them.
    RowRange absorbed_rows;
    std::vector<KeyRun> key_runs;
    std::vector<PromptTile> prompt_tiles;
    std::vector<PromptRound> prompt_rounds;
    const AttentionTile* device_tiles = nullptr;
    const KeyRun* device_key_runs = nullptr;
    const PromptTile* device_prompt_tiles = nullptr;

    // How many of these rows decode: the first ones.
    int DecodeRowsOf(RowRange rows) const {
      return std::clamp(num_decode_rows - rows.begin, 0, rows.count);
    }
  };
  const Planned& Of(const Step& step) const {
    return planned_[static_cast<size_t>(std::max(0, step.half))];
  }
  void Plan(const StepPlan& plan, Step& step, Planned& planned);
  // Where rows of a half are gathered beside the other's ops: they are there from here on.
  void Arrive(const Step& step) const { communicator_.Arrive(step.half, stream()); }

  void Use() const;  // the rank's device on this thread
  // x · wᵀ for rows [begin, begin + count) of the step: those that decode by the one algorithm,
  // those of prompts by the other.
  void Multiply(const Step& step, const bf16* x, int64_t x_stride, RowRange rows, const Weight& w,
                void* y, int64_t y_stride, Phase prompts = Phase::kPrompt, bool fp32_out = false,
                bool accumulate = false);
  // params.phase: of rows of prompts.
  void MultiplyByPhase(const Step& step, GemmParams params, int first_row);
  void MultiplyFew(const GemmParams& params);  // rows that decode
  StreamProductParams GateAndUp(const bf16* x, int hidden, const Weight& gate, const Weight& up,
                                int rows) const;
  SumRowsParams SumOf(const RoutedFfnParams& params, RowRange rows) const;
  void CopyStatesOut();
  bool CanBeGraph(const StepPlan& plan, bool sharded) const;
  // The forms of attention: rows that decode are attended absorbed, their keys in parts; prompts in
  // the expanded form, or absorbed where the model's sizes do not suit that.
  void PlanAttention(const StepPlan& plan, Planned& planned) const;
  void PlanPrompt(const StepPlan& plan, int first, int end, Planned& planned) const;
  void AttendAbsorbed(const Step& step, const AttentionParams& params, const bf16* cache);
  void AttendExpanded(const Step& step, const AttentionParams& params, const bf16* cache);

  const int device_;
  Memory used_;
  DeviceCommunicator communicator_;
  Uploader uploader_;
  Stream stream_, copies_;  // copies_: captured states to the host, under the next ops
  Gemm gemm_;
  const bool hopper_;  // the kernels of sm_90a run
  StreamWorkspace stream_workspace_;
  StepGraphs graphs_;  // of steps that only decode
  StepPlan rounded_;
  int num_logit_rows_ = 0;     // of the step
  bool shared_begun_ = false;  // Route has done DenseFfn's first product of the rows that decode
  bool use_graphs_ = true, as_graph_ = false, records_ = false, replays_ = false;
  std::vector<DeviceBuffer> memory_;
  std::vector<PinnedBuffer> host_memory_;
  DeviceBuffer cache_;
  // For Hopper's products of experts.
  const RowMaps& MapsOf(const bf16* x, int columns);
  struct MapsOfRows {
    const bf16* x;
    int columns;
    RowMaps maps;
  };
  std::vector<MapsOfRows> row_maps_;  // made when a buffer is first multiplied
  int num_pages_ = 0, cache_width_ = 0;
  Limits limits_{};
  AttentionForms forms_;

  std::array<Planned, 2> planned_;
  bool absorbable_ = false, expandable_ = false;
  int prompt_keys_ = 0;                    // that fit the scratch
  std::optional<PromptMaps> prompt_maps_;  // of the scratch, made when first attended

  // [max_tokens, …]
  DeviceBuffer queries_, absorbed_, attended_, heads_;
  DeviceBuffer gate_up_;  // [2, max_tokens, max_width]
  DeviceBuffer split_parts_, split_stats_, key_latents_, expanded_, prompts_taken_;
  DeviceBuffer router_logits_;
  DeviceBuffer counts_, next_row_, token_of_row_, row_of_, row_tiles_, num_row_tiles_, h_, y_;
  DeviceBuffer picked_, normed_, logits_, all_logits_, choose_workspace_;

  struct PendingStates {
    uint16_t* to;
    size_t count;
    const uint16_t* from;
  };
  struct PendingTokens {
    ChosenToken* to;
    int first, count;
  };
  DeviceBuffer captured_;
  PinnedBuffer captured_host_;
  size_t num_captured_ = 0;
  std::vector<PendingStates> pending_states_, pending_copies_;
  DeviceBuffer results_;  // ChosenToken [max_tokens]
  PinnedBuffer results_host_;
  std::vector<PendingTokens> pending_tokens_;
  Event captured_event_, finished_, copied_;
};

// devices[r]: the GPU of rank r. Throws where `comm` cannot be had.
std::shared_ptr<DeviceGroup> MakeGroup(const std::vector<int>& devices, CudaOptions::Comm comm);

}  // namespace statetap::cuda
