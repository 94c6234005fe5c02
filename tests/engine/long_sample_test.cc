// Lengths at which buffers end and positions far behind YaRN's boundary, from the engine into a
// shard and back.
#include <cmath>
#include <random>

#include "extractor/shard/shard_reader.h"
#include "tests/support/engine_harness.h"
#include "tests/support/narrow_model.h"

namespace statetap {
namespace {

using testing::Captured;
using testing::NarrowModel;
using testing::RunTasks;

constexpr int kHidden = NarrowModel::kHidden;
constexpr double kTolerance = 0x1p-8;  // one rounding to bf16, relative to the row

class LongSampleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto index = model_.Write(folder_ / "model");
    ASSERT_OK(index);
    index_.emplace(*std::move(index));
    std::mt19937 random(3);
    for (int i = 0; i < 66000; ++i) text_.push_back(static_cast<int32_t>(random() % 256));
  }
  std::unique_ptr<Engine> Open(int max_batch_tokens) {
    auto engine = Engine::Open(*index_, {.max_batch_tokens = max_batch_tokens});
    EXPECT_OK(engine);
    return *std::move(engine);
  }
  std::vector<int32_t> Text(size_t tokens) const { return {text_.begin(), text_.begin() + tokens}; }
  SampleTask Prefill(size_t tokens) const {
    SampleTask task;
    task.input_ids = Text(tokens);
    task.max_length = static_cast<int>(tokens);
    task.boundaries = {0, 1};
    return task;
  }
  SampleTask Generate(size_t prompt, int new_tokens) const {
    SampleTask task = Prefill(prompt);
    task.generate = true;
    task.max_new_tokens = new_tokens;
    task.max_length = 1 << 17;
    return task;
  }
  // How far row `row` of boundary 1 is from the double-precision one, relative to its norm.
  double ErrorOf(const Captured& captured, const std::vector<int32_t>& ids, size_t row,
                 NarrowModel::Pairs pairs = NarrowModel::Pairs::kInterleaved) const {
    const std::vector<double> expected =
        model_.LastRow({ids.begin(), ids.begin() + static_cast<int64_t>(row) + 1}, pairs);
    double error = 0, norm = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double ours = double{Bf16ToFloat(captured.states.at(1)[row * kHidden + i])};
      error += std::pow(ours - expected[i], 2);
      norm += std::pow(expected[i], 2);
    }
    return std::sqrt(error / norm);
  }

  const NarrowModel model_;
  const testing::TempDir folder_;
  std::optional<CheckpointIndex> index_;
  std::vector<int32_t> text_;
};

SampleRecord RecordOf(const SampleTask& task, const Captured& captured, size_t index) {
  SampleRecord record;
  record.id = fmt::format("s{}", index);
  record.digest = record.id;
  record.input_ids = task.input_ids;
  record.input_ids.insert(record.input_ids.end(), captured.sampled.begin(), captured.sampled.end());
  record.loss_mask.assign(record.input_ids.size(), 1);
  record.prompt_tokens = static_cast<int32_t>(task.input_ids.size());
  record.finish_reason = task.generate ? "length" : "prefill";
  record.source_index = static_cast<int64_t>(index);
  return record;
}

ShardConfig ConfigOf(const CheckpointIndex& index) {
  ShardConfig config;
  config.job = "job-1";
  config.model_name = "narrow";
  config.model_digest = index.digest();
  config.quantization = "none";
  config.hidden = kHidden;
  config.layers = 1;
  config.boundaries = {0, 1};
  config.rope_json = config.options_json = "{}";
  config.producer = "test";
  return config;
}

TEST_F(LongSampleTest, EveryLengthComesBackWhole) {
  const std::vector<SampleTask> tasks = {Prefill(1),        Prefill(2),        Prefill(8191),
                                         Prefill(8192),     Prefill(8193),     Generate(8190, 1),
                                         Generate(8190, 2), Generate(8190, 3), Prefill(66000)};
  const auto captured = RunTasks(*Open(512), tasks, kHidden);
  const auto path = folder_ / "shard.h5";
  {
    ASSERT_OK_AND_ASSIGN(const auto writer, ShardWriter::Create(path, ConfigOf(*index_), {}));
    for (size_t i = 0; i < tasks.size(); ++i) {
      const std::vector<std::span<const uint16_t>> states = {captured[i].states.at(0),
                                                             captured[i].states.at(1)};
      ASSERT_OK(writer->Append(RecordOf(tasks[i], captured[i], i), states));
    }
    ASSERT_OK(writer->Commit());
  }
  ASSERT_OK_AND_ASSIGN(const auto shard, ShardReader::Open(path));
  ASSERT_OK_AND_ASSIGN(const auto damaged, shard->Verify());
  EXPECT_TRUE(damaged.empty());
  ASSERT_EQ(shard->samples().size(), tasks.size());
  const int64_t lengths[] = {1, 2, 8191, 8192, 8193, 8191, 8192, 8193, 66000};
  for (size_t i = 0; i < tasks.size(); ++i) {
    EXPECT_EQ(captured[i].finished,
              tasks[i].generate ? FinishReason::kLength : FinishReason::kPrefill);
    const SampleEntry& entry = shard->samples()[i];
    EXPECT_EQ(entry.rows, lengths[i]);
    ASSERT_OK_AND_ASSIGN(const SampleRecord record, shard->ReadRecord(static_cast<int64_t>(i)));
    EXPECT_EQ(record.input_ids, RecordOf(tasks[i], captured[i], i).input_ids);
    for (const int boundary : {0, 1}) {
      std::vector<uint16_t> states(static_cast<size_t>(entry.rows * kHidden));
      ASSERT_OK(shard->ReadStates(boundary, entry.first_row, states));
      EXPECT_EQ(states, captured[i].states.at(boundary)) << lengths[i];
      // All are the beginning of one text: so are their rows, bit by bit.
      const auto common = std::min<size_t>(states.size(), tasks[i].input_ids.size() * kHidden);
      EXPECT_TRUE(std::equal(states.begin(), states.begin() + static_cast<int64_t>(common),
                             captured.back().states.at(boundary).begin()))
          << lengths[i];
    }
  }
  EXPECT_LT(ErrorOf(captured.back(), tasks.back().input_ids, 65999), kTolerance);
}

TEST_F(LongSampleTest, OneChunkAndManyAreTheSameBitsAt8192) {
  const std::vector<SampleTask> tasks = {Prefill(8191), Prefill(8192), Prefill(8193)};
  const auto whole = RunTasks(*Open(8192), tasks, kHidden);
  const auto chunked = RunTasks(*Open(509), tasks, kHidden);
  for (size_t i = 0; i < tasks.size(); ++i) EXPECT_EQ(whole[i].states, chunked[i].states) << i;
}

TEST_F(LongSampleTest, PositionsAreRightFarBehindTheOriginalContext) {
  const std::vector<SampleTask> tasks = {Prefill(2), Prefill(8000)};
  const auto captured = RunTasks(*Open(512), tasks, kHidden);
  for (const size_t row : {0, 1}) {
    EXPECT_LT(ErrorOf(captured[0], tasks[0].input_ids, row), kTolerance) << row;
  }
  double largest_control = 0;
  for (const size_t row : {0, 1, 2, 63, 64, 2047, 2048, 2049, 4095, 4096, 7998, 7999}) {
    EXPECT_LT(ErrorOf(captured[1], tasks[1].input_ids, row), kTolerance) << row;
    largest_control = std::max(largest_control, ErrorOf(captured[1], tasks[1].input_ids, row,
                                                        NarrowModel::Pairs::kHalves));
  }
  // The comparison can tell one rotary from another.
  EXPECT_GT(largest_control, 10 * kTolerance);
}

}  // namespace
}  // namespace statetap
