// The plain backend: fp32, one order of every sum, nothing fused. What every other backend is held
// to.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <vector>

#include "extractor/backend/backend.h"
#include "extractor/backend/cpu/shared_communicator.h"
#include "extractor/base/worker_pool.h"

namespace statetap::cpu {

class CpuBackend : public Backend {
 public:
  CpuBackend(int rank, std::shared_ptr<SharedGroup> group, int threads)
      : communicator_(rank, std::move(group)), pool_(threads) {}

  Communicator& communicator() override { return communicator_; }
  size_t activation_bytes() const override { return sizeof(float); }
  Memory memory() const override { return used_; }
  void* Allocate(size_t bytes) override;
  void* AllocateHost(size_t bytes) override;
  std::unique_ptr<Weight> NewMatrix(int64_t rows, int64_t cols, DType stored) override;
  std::unique_ptr<Weight> NewExperts(const ExpertsShape& shape) override;
  void FinishWeights() override {}
  const void* NewRotary(std::span<const float> inverse_frequencies, int num_positions) override;
  // A GiB of all ranks together: no more than a small model needs.
  int64_t RoomForKvCache() const override { return (int64_t{1} << 30) / communicator_.world(); }
  void NewKvCache(int num_layers, int num_pages, int width) override;
  void PlanScratch(const Limits& limits) override;

  std::vector<Step> BeginSteps(std::span<const StepPlan> plans, bool sharded) override;
  void Embed(const Step& step, const EmbedParams& params) override;
  void ExchangeAddNorm(const Step& step, const ExchangeAddNormParams& params) override;
  void LatentProject(const Step& step, const LatentProjectParams& params) override;
  void Gather(const Step& step, std::initializer_list<GatherParams> arrays) override;
  void Attention(const Step& step, const AttentionParams& params) override;
  void Route(const Step& step, const RouteParams& params) override;
  // All of it in the last stage.
  void RoutedFfnStage(const Step& step, const RoutedFfnParams& params, RoutedStage stage) override;
  void DenseFfn(const Step& step, const DenseFfnParams& params) override;
  void Capture(const Step& step, const CaptureParams& params) override;
  void Sample(const Step& step, const SampleParams& params) override;
  void Finish() override {}

 private:
  struct Rotary {  // cos and sin of each pair at each position
    int pairs;
    std::vector<float> cos, sin;
  };
  float* CacheRow(int layer, int page, int slot) {
    return cache_.get() +
           ((int64_t{layer} * num_pages_ + page) * kPageTokens + slot) * cache_width_;
  }
  // Row `position` of a sequence of the step.
  float* CacheRow(const Step& step, int layer, int sequence, int position);
  void WriteCache(const Step& step, const AttentionParams& params);
  // One token and head: heads_[token][head · v_dim …] = o.
  void AttendHead(const Step& step, const AttentionParams& params, int token, int head,
                  float* scratch);

  SharedCommunicator communicator_;
  WorkerPool pool_;
  Memory used_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<std::unique_ptr<Rotary>> rotaries_;
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float[], Free> cache_;  // pages come into being as they are written
  int num_pages_ = 0, cache_width_ = 0;
  Limits limits_{};
  std::vector<float> sums_;       // [T, hidden]
  std::vector<float> queries_;    // [T, heads · (nope + rope)]
  std::vector<float> heads_;      // [T, heads · v]
  std::vector<float> kv_b_;       // of the layer at hand, fp32
  std::vector<float> attention_;  // a thread: scores [context], absorbed query, weighted latent
  std::vector<float> gate_, up_;  // [T, widest FFN]
  std::vector<float> gathered_, expert_out_;  // [T, hidden]: an expert's tokens
  std::vector<float> logits_;  // [logit rows, vocabulary of all ranks], twice: by rank, then by row
};

// y = x · rsqrt(mean(x²) + eps) · weight.
void RmsNorm(const float* x, const float* weight, int n, float eps, float* y);

}  // namespace statetap::cpu
