#include "extractor/model/weights.h"

#include <algorithm>

namespace statetap {
namespace {

struct Range {
  int64_t begin, end;
};
constexpr Range kAll{0, -1};

Range Part(int64_t part, int rank) { return {part * rank, part * (rank + 1)}; }

// Collects the slices of all ranks, and on loading passes each piece to the weight that it belongs
// to.
class Collector final : public SliceSink {
 public:
  explicit Collector(const CheckpointIndex& checkpoint) : checkpoint_(checkpoint) {}

  // A rectangle of a tensor into a part of a weight.
  void Add(std::string_view name, Range rows, Range cols, Weight* weight, int part) {
    const TensorInfo* tensor = checkpoint_.Find(name);
    const auto [num_rows, num_cols] = ShapeOf(*tensor);
    if (rows.end < 0) rows.end = num_rows;
    if (cols.end < 0) cols.end = num_cols;
    slices_.push_back({tensor, rows.begin, rows.end, cols.begin, cols.end});
    targets_.push_back({weight, part});
  }

  // A matrix of one rank; null where the checkpoint has no such tensor.
  WeightPtr Matrix(Backend& backend, std::string_view name, Range rows = kAll, Range cols = kAll) {
    const TensorInfo* tensor = checkpoint_.Find(name);
    if (tensor == nullptr) return nullptr;
    const auto [num_rows, num_cols] = ShapeOf(*tensor);
    const int64_t height = (rows.end < 0 ? num_rows : rows.end) - rows.begin,
                  width = (cols.end < 0 ? num_cols : cols.end) - cols.begin;
    WeightPtr weight = backend.NewMatrix(height, width, tensor->dtype);
    Add(name, rows, cols, weight.get(), 0);
    return weight;
  }

  void Deliver(size_t slice, int64_t first_row, int64_t rows, const std::byte* from,
               int64_t stride_bytes) override {
    targets_[slice].weight->Fill(targets_[slice].part, first_row, rows, from, stride_bytes);
  }
  const std::vector<TensorSlice>& slices() const { return slices_; }

 private:
  static std::pair<int64_t, int64_t> ShapeOf(const TensorInfo& tensor) {
    if (tensor.shape.size() == 1) return {1, tensor.shape[0]};
    return {tensor.shape[0], tensor.shape[1]};
  }
  struct Target {
    Weight* weight;
    int part;
  };
  const CheckpointIndex& checkpoint_;
  std::vector<TensorSlice> slices_;
  std::vector<Target> targets_;
};

class RankLoader {
 public:
  RankLoader(const CheckpointIndex& checkpoint, const ParallelLayout& layout, int rank,
             Backend& backend, Collector& collector)
      : checkpoint_(checkpoint),
        config_(checkpoint.config()),
        layout_(layout),
        rank_(rank),
        backend_(backend),
        collector_(collector) {}

  ModelWeights Load() {
    ModelWeights weights;
    const Range vocab{
        std::min<int64_t>(config_.vocab, int64_t{layout_.vocab_per_rank()} * rank_),
        std::min<int64_t>(config_.vocab, int64_t{layout_.vocab_per_rank()} * (rank_ + 1))};
    weights.embed = collector_.Matrix(backend_, "model.embed_tokens.weight", vocab);
    weights.norm = collector_.Matrix(backend_, "model.norm.weight");
    weights.lm_head = collector_.Matrix(
        backend_, config_.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight",
        vocab);
    for (int layer = 0; layer < config_.num_layers; ++layer)
      weights.layers.push_back(LoadLayer(layer));
    return weights;
  }

 private:
  LayerWeights LoadLayer(int layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const auto matrix = [&](std::string_view name, Range rows = kAll, Range cols = kAll) {
      return collector_.Matrix(backend_, fmt::format("{}{}.weight", prefix, name), rows, cols);
    };
    LayerWeights w;
    w.input_norm = matrix("input_layernorm");
    w.post_attention_norm = matrix("post_attention_layernorm");
    const Range query_rows = Part(int64_t{layout_.heads()} * config_.qk_dim(), rank_);
    if (config_.q_lora_rank > 0) {
      w.q_a = matrix("self_attn.q_a_proj");
      w.q_a_norm = matrix("self_attn.q_a_layernorm");
      w.q_b = matrix("self_attn.q_b_proj", query_rows);
    } else {
      w.q_b = matrix("self_attn.q_proj", query_rows);
    }
    w.kv_a = matrix("self_attn.kv_a_proj_with_mqa");
    w.kv_a_norm = matrix("self_attn.kv_a_layernorm");
    w.kv_b = matrix("self_attn.kv_b_proj",
                    Part(int64_t{layout_.heads()} * (config_.nope_dim + config_.v_dim), rank_));
    w.o = matrix("self_attn.o_proj", kAll, Part(int64_t{layout_.heads()} * config_.v_dim, rank_));
    const auto ffn = [&](const std::string& name, int width) {
      const Range part = Part(width, rank_);
      return FfnWeights{matrix(name + ".gate_proj", part), matrix(name + ".up_proj", part),
                        matrix(name + ".down_proj", kAll, part)};
    };
    if (!config_.IsMoe(layer)) {
      w.dense = ffn("mlp", layout_.dense_width());
      return w;
    }
    if (config_.num_shared_experts > 0) w.dense = ffn("mlp.shared_experts", layout_.shared_width());
    w.router = matrix("mlp.gate");
    w.router_bias = collector_.Matrix(backend_, prefix + "mlp.gate.e_score_correction_bias");
    w.experts = LoadExperts(prefix + "mlp.experts.", layout_.SlotsOf(layer, rank_));
    return w;
  }

  WeightPtr LoadExperts(const std::string& prefix, const std::vector<int32_t>& slots) {
    ExpertsShape shape;
    shape.num_slots = layout_.num_slots();
    shape.hidden = config_.hidden;
    shape.width = layout_.expert_width();
    shape.int4 = checkpoint_.quantized();
    shape.slot_of_expert = slots;
    if (shape.int4) {
      shape.scale_dtype = checkpoint_.Find(prefix + "0.gate_proj.weight_scale")->dtype;
    } else {
      shape.dtype = checkpoint_.Find(prefix + "0.gate_proj.weight")->dtype;
    }
    WeightPtr experts = backend_.NewExperts(shape);
    const Range part = layout_.experts() == ExpertLayout::kTensor ? Part(shape.width, rank_)
                                                                  : Range{0, shape.width};
    for (size_t expert = 0; expert < slots.size(); ++expert) {
      if (slots[expert] < 0) continue;
      const std::string name = fmt::format("{}{}.", prefix, expert);
      AddProjection(name + "gate_proj.weight", slots[expert], Projection::kGate, part, *experts);
      AddProjection(name + "up_proj.weight", slots[expert], Projection::kUp, part, *experts);
      AddProjection(name + "down_proj.weight", slots[expert], Projection::kDown, part, *experts);
    }
    return experts;
  }

  // `part` of the width: rows of gate and up, columns of down. A packed word holds 8 columns, a
  // scale 32.
  void AddProjection(const std::string& name, int slot, Projection projection, Range part,
                     Weight& experts) {
    const bool down = projection == Projection::kDown;
    const auto add = [&](const std::string& tensor, int64_t columns_each, bool scales) {
      const Range cols = {part.begin / columns_each, part.end / columns_each};
      collector_.Add(tensor, down ? kAll : part, down ? cols : kAll, &experts,
                     ExpertPart(slot, projection, scales));
    };
    if (!checkpoint_.quantized()) return add(name, 1, false);
    add(name + "_packed", 8, false);
    add(name + "_scale", 32, true);
  }

  const CheckpointIndex& checkpoint_;
  const ModelConfig& config_;
  const ParallelLayout& layout_;
  int rank_;
  Backend& backend_;
  Collector& collector_;
};

}  // namespace

absl::StatusOr<std::vector<ModelWeights>> LoadWeights(
    const CheckpointIndex& checkpoint, const ParallelLayout& layout,
    std::span<const std::unique_ptr<Backend>> backends, const LoadOptions& options) {
  Collector collector(checkpoint);
  std::vector<ModelWeights> ranks;
  for (size_t rank = 0; rank < backends.size(); ++rank) {
    ranks.push_back(
        RankLoader(checkpoint, layout, static_cast<int>(rank), *backends[rank], collector).Load());
  }
  STATETAP_RETURN_IF_ERROR(LoadSlices(checkpoint, collector.slices(), collector, options));
  for (const auto& backend : backends) backend->FinishWeights();
  return ranks;
}

}  // namespace statetap
