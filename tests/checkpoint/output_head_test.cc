#include "extractor/checkpoint/output_head.h"

#include <gmock/gmock.h>

#include <cmath>
#include <random>

#include "extractor/base/file.h"
#include "tests/support/narrow_model.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using testing::NarrowModel;
using testing::StatusIs;
using testing::TempDir;

std::vector<double> Tensor(const CheckpointIndex& index, const std::string& name) {
  const TensorInfo& info = *index.Find(name);
  std::vector<uint16_t> bits(static_cast<size_t>(info.size_bytes) / 2);
  const auto file = File::OpenForRead(index.files()[static_cast<size_t>(info.file)]);
  EXPECT_OK(file->ReadAt(info.offset, std::as_writable_bytes(std::span(bits))));
  std::vector<double> values;
  for (const uint16_t word : bits) values.push_back(Bf16ToFloat(word));
  return values;
}

TEST(OutputHeadTest, GivesTheLogProbabilitiesOfNormAndHead) {
  const TempDir folder;
  const NarrowModel model;
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, model.Write(folder / "model"));
  const std::vector<double> norm = Tensor(index, "model.norm.weight");
  const std::vector<double> head = Tensor(index, "lm_head.weight");
  const size_t hidden = norm.size(), vocab = head.size() / hidden, rows = 7;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> states;
  for (size_t i = 0; i < rows * hidden; ++i) states.push_back(FloatToBf16(20 * normal(random)));
  const std::vector<int32_t> tokens = {0, 5, static_cast<int32_t>(vocab) - 1, 17, 100, 2, 200};
  for (const auto& opened : {OutputHead::Open(index), OutputHead::Open(folder / "model")}) {
    ASSERT_OK(opened.status());
    ASSERT_OK_AND_ASSIGN(const auto found, opened->LogProbabilities(states, tokens));
    ASSERT_EQ(found.size(), rows);
    for (size_t row = 0; row < rows; ++row) {
      double squares = 0;
      std::vector<double> x;
      for (size_t c = 0; c < hidden; ++c) x.push_back(Bf16ToFloat(states[row * hidden + c]));
      for (const double value : x) squares += value * value;
      const double rms = std::sqrt(squares / static_cast<double>(hidden) + NarrowModel::kEps);
      double sum = 0, chosen = 0;
      for (size_t token = 0; token < vocab; ++token) {
        double logit = 0;
        for (size_t c = 0; c < hidden; ++c)
          logit += x[c] / rms * norm[c] * head[token * hidden + c];
        sum += std::exp(logit);
        if (static_cast<int32_t>(token) == tokens[row]) chosen = logit;
      }
      EXPECT_NEAR(found[row], chosen - std::log(sum), 1e-4) << row;  // fp32 sums of 32 products
    }
  }
}

TEST(OutputHeadTest, RefusesTokensAndFoldersThatDoNotFit) {
  const TempDir folder;
  const NarrowModel model;
  ASSERT_OK_AND_ASSIGN(const CheckpointIndex index, model.Write(folder / "model"));
  ASSERT_OK_AND_ASSIGN(const OutputHead head, OutputHead::Open(index));
  const std::vector<uint16_t> row(static_cast<size_t>(head.hidden()));
  EXPECT_THAT(head.LogProbabilities(row, std::vector<int32_t>{NarrowModel::kVocab}),
              StatusIs(absl::StatusCode::kOutOfRange, "300"));
  EXPECT_THAT(OutputHead::Open(folder / "nothing").status(),
              StatusIs(absl::StatusCode::kNotFound, "nothing"));
}

TEST(LogSumExpTest, HoldsForLargeAndSmall) {
  LogSumExp sum;
  for (const double x : {-1000.0, 1000.0, 999.0, 1000.0, -5.0}) sum.Add(x);
  EXPECT_NEAR(sum.value(), 1000 + std::log(2 + std::exp(-1.0)), 1e-12);
}

}  // namespace
}  // namespace statetap
