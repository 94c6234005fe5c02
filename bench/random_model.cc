#include "bench/random_model.h"

#include <cmath>

#include "bench/random_fill.h"
#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/weights.h"

namespace statetap::bench {
namespace {

// Fills a rank's matrices, each from a seed of its own.
class Filler {
 public:
  Filler(Backend& backend, int rank) : backend_(backend), rank_(static_cast<uint32_t>(rank)) {}

  // Every rank has it whole, or a part that no other has.
  WeightPtr Whole(int64_t rows, int64_t cols) { return Matrix(rows, cols, 1, 0); }
  WeightPtr Part(int64_t rows, int64_t cols, float scale = 1) {
    return Matrix(rows, cols, scale, rank_ + 1);
  }
  WeightPtr Vector(int64_t cols, float value) {
    auto weight = backend_.NewMatrix(1, cols, DType::kBf16);
    FillValue(const_cast<float*>(cuda::AsMatrix(*weight).vector()), cols, value);
    return weight;
  }
  WeightPtr Experts(const ExpertsShape& shape) {
    auto weight = backend_.NewExperts(shape);
    const auto& experts = cuda::AsExperts(*weight);
    FillBlocks(experts.memory(), shape.num_slots * experts.slot_bytes() / cuda::kInt4BlockBytes,
               1 / (4.61f * 84), Seed(rank_ + 1));
    return weight;
  }

 private:
  uint32_t Seed(uint32_t part) { return ++number_ + part * 1'000'003u; }
  WeightPtr Matrix(int64_t rows, int64_t cols, float scale, uint32_t part) {
    auto weight = backend_.NewMatrix(rows, cols, DType::kBf16);
    FillNormal(const_cast<cuda::bf16*>(cuda::AsMatrix(*weight).data()), rows * cols,
               scale / std::sqrt(static_cast<float>(cols)), Seed(part));
    return weight;
  }

  Backend& backend_;
  const uint32_t rank_;
  uint32_t number_ = 0;  // of the last matrix
};

}  // namespace

ModelConfig KimiK25(int layers) {
  ModelConfig c;
  c.hidden = 7168;
  c.num_layers = layers;
  c.num_heads = 64;
  c.q_lora_rank = 1536;
  c.kv_lora_rank = 512;
  c.nope_dim = 128;
  c.rope_dim = 64;
  c.v_dim = 128;
  c.dense_width = 18432;
  c.expert_width = 2048;
  c.num_experts = 384;
  c.top_k = 8;
  c.num_shared_experts = 1;
  c.num_dense_layers = 1;
  c.routed_scaling = 2.827;
  c.rms_norm_eps = 1e-5;
  c.rope = {50000, true, 64, 4096, 32, 1, 1, 1};
  c.max_positions = 262144;
  c.vocab = 163840;
  return c;
}

ModelWeights RandomWeights(Backend& backend, const ModelConfig& c, const ParallelLayout& layout,
                           int rank) {
  Filler filler(backend, rank);
  ModelWeights w;
  w.embed = filler.Part(layout.vocab_per_rank(), c.hidden, 80);
  w.lm_head = filler.Part(layout.vocab_per_rank(), c.hidden);
  w.norm = filler.Vector(c.hidden, 1);
  const int heads = layout.heads();
  for (int layer = 0; layer < c.num_layers; ++layer) {
    LayerWeights l;
    l.input_norm = filler.Vector(c.hidden, 1);
    l.post_attention_norm = filler.Vector(c.hidden, 1);
    l.q_a = filler.Whole(c.q_lora_rank, c.hidden);
    l.q_a_norm = filler.Vector(c.q_lora_rank, 1);
    l.q_b = filler.Part(heads * c.qk_dim(), c.q_lora_rank);
    l.kv_a = filler.Whole(c.latent_dim(), c.hidden);
    l.kv_a_norm = filler.Vector(c.kv_lora_rank, 1);
    l.kv_b = filler.Part(heads * (c.nope_dim + c.v_dim), c.kv_lora_rank);
    l.o = filler.Part(c.hidden, heads * c.v_dim);
    const int width = c.IsMoe(layer) ? layout.shared_width() : layout.dense_width();
    l.dense = {filler.Part(width, c.hidden), filler.Part(width, c.hidden),
               filler.Part(c.hidden, width)};
    if (c.IsMoe(layer)) {
      l.router = filler.Whole(c.num_experts, c.hidden);
      l.router_bias = filler.Vector(c.num_experts, 0);
      ExpertsShape shape;
      shape.num_slots = layout.num_slots();
      shape.hidden = c.hidden;
      shape.width = layout.expert_width();
      shape.slot_of_expert = layout.SlotsOf(layer, rank);
      l.experts = filler.Experts(shape);
    }
    w.layers.push_back(std::move(l));
  }
  cuda::Check(cudaDeviceSynchronize());
  return w;
}

}  // namespace statetap::bench
