#include "extractor/checkpoint/checkpoint_index.h"

#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using ::testing::ElementsAre;

const std::filesystem::path kTinyKimi = STATETAP_SOURCE_DIR "/models/tiny-kimi";

TEST(CheckpointIndexTest, ReadsTheEmbeddedModel) {
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, CheckpointIndex::Open(kTinyKimi));
  EXPECT_EQ(index.name(), "tiny-kimi");
  EXPECT_TRUE(index.quantized());
  EXPECT_EQ(index.config().num_layers, 8);
  EXPECT_EQ(index.config().q_lora_rank, 96);
  EXPECT_TRUE(index.config().rope.yarn);
  EXPECT_EQ(index.files().size(), 3u);
  EXPECT_THAT(index.stop_ids(), ElementsAre(2049, 2050));
  EXPECT_EQ(index.digest().size(), 64u);
  // The index file's total_size less the two vision tensors of 16 bf16 each.
  EXPECT_EQ(index.total_bytes(), 11179904 - 2 * 16 * 2);

  const TensorInfo* packed = index.Find("model.layers.7.mlp.experts.15.down_proj.weight_packed");
  ASSERT_NE(packed, nullptr);
  EXPECT_EQ(packed->dtype, DType::kI32);
  EXPECT_THAT(packed->shape, ElementsAre(128, 32));
  EXPECT_EQ(packed->size_bytes, 128 * 32 * 4);
  EXPECT_EQ(index.Find("language_model.lm_head.weight"), nullptr);
  EXPECT_EQ(index.Find("vision_tower.encoder.final_layernorm.weight"), nullptr);
}

}  // namespace
}  // namespace statetap
