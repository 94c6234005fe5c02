#include "extractor/model/layout.h"

namespace statetap {
namespace {

constexpr int kInt4Group = 32;

absl::Status MustDivide(std::string_view what, int size, int world, int unit) {
  if (size % (world * unit) == 0) return absl::OkStatus();
  std::string whole = unit == 1 ? "" : fmt::format(" into whole groups of {}", unit);
  return absl::InvalidArgumentError(
      fmt::format("{} = {} cannot be split over {} ranks{}: choose --tp so that it can", what, size,
                  world, whole));
}

}  // namespace

absl::StatusOr<ParallelLayout> ParallelLayout::Make(const ModelConfig& config, int world,
                                                    ExpertLayout experts, bool int4) {
  if (world < 1)
    return absl::InvalidArgumentError(fmt::format("{} ranks: at least one is needed", world));
  ParallelLayout layout;
  layout.world_ = world;
  layout.experts_ = experts;
  layout.num_experts_ = config.num_experts;
  STATETAP_RETURN_IF_ERROR(MustDivide("num_attention_heads", config.num_heads, world, 1));
  layout.heads_ = config.num_heads / world;
  if (config.num_experts == 0 || config.num_dense_layers > 0) {
    STATETAP_RETURN_IF_ERROR(MustDivide("intermediate_size", config.dense_width, world, 1));
    layout.dense_width_ = config.dense_width / world;
  }
  if (config.num_experts > 0) {
    const int shared = config.num_shared_experts * config.expert_width;
    STATETAP_RETURN_IF_ERROR(
        MustDivide("n_shared_experts * moe_intermediate_size", shared, world, 1));
    layout.shared_width_ = shared / world;
    if (experts == ExpertLayout::kExpert) {
      STATETAP_RETURN_IF_ERROR(MustDivide("n_routed_experts", config.num_experts, world, 1));
      layout.num_slots_ = config.num_experts / world;
      layout.expert_width_ = config.expert_width;
    } else {
      STATETAP_RETURN_IF_ERROR(
          MustDivide("moe_intermediate_size", config.expert_width, world, int4 ? kInt4Group : 1));
      layout.num_slots_ = config.num_experts;
      layout.expert_width_ = config.expert_width / world;
    }
  }
  layout.vocab_per_rank_ = (config.vocab + world - 1) / world;
  return layout;
}

int ParallelLayout::RankOf(int, int expert) const { return expert / num_slots_; }

std::vector<int32_t> ParallelLayout::SlotsOf(int layer, int rank) const {
  std::vector<int32_t> slots;
  int next = 0;
  for (int expert = 0; expert < num_experts_; ++expert) {
    const bool here = experts_ == ExpertLayout::kTensor || RankOf(layer, expert) == rank;
    slots.push_back(here ? next++ : -1);
  }
  return slots;
}

}  // namespace statetap
