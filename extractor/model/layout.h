// Which part of the model a rank holds: heads and widths in equal parts, vocabulary by rows,
// experts whole or by width.
#pragma once

#include <cstdint>
#include <vector>

#include "extractor/base/status.h"
#include "extractor/checkpoint/model_config.h"

namespace statetap {

// Whole experts on a rank, or every expert's width in equal parts on all ranks.
enum class ExpertLayout { kExpert, kTensor };

class ParallelLayout {
 public:
  // INVALID_ARGUMENT names the size that `world` does not divide. `int4`: slices of a width must
  // hold whole groups of 32.
  static absl::StatusOr<ParallelLayout> Make(const ModelConfig& config, int world,
                                             ExpertLayout experts, bool int4);

  int world() const { return world_; }
  ExpertLayout experts() const { return experts_; }
  int heads() const { return heads_; }                    // of a rank
  int dense_width() const { return dense_width_; }        // of a rank
  int shared_width() const { return shared_width_; }      // of a rank; 0 without shared experts
  int expert_width() const { return expert_width_; }      // of an expert on a rank
  int num_slots() const { return num_slots_; }            // experts of a layer on a rank
  int vocab_per_rank() const { return vocab_per_rank_; }  // the last rank may hold fewer

  // Where an expert of a layer lives. Contiguous blocks today; placement by load changes only this.
  int RankOf(int layer, int expert) const;
  // slot_of_expert of ExpertsShape: this rank's slot, −1 where another rank has it.
  std::vector<int32_t> SlotsOf(int layer, int rank) const;

 private:
  int world_ = 1, heads_ = 0, dense_width_ = 0, shared_width_ = 0, expert_width_ = 0,
      num_slots_ = 0, vocab_per_rank_ = 0;
  int num_experts_ = 0;
  ExpertLayout experts_ = ExpertLayout::kExpert;
};

}  // namespace statetap
