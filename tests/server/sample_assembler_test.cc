#include "server/jobs/sample_assembler.h"

#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using ::testing::ElementsAre;
using testing::StatusIs;

constexpr int32_t kThink = 100, kThinkEnd = 101, kStop = 102;

// The mask of an answer to `prompt`.
std::vector<int> MaskOf(AnswerMask mask, const std::vector<int32_t>& prompt,
                        const std::vector<int32_t>& answer, FinishReason reason) {
  mask.think_id = kThink;
  mask.think_end_id = kThinkEnd;
  SampleRow sample;
  sample.ids = prompt;
  SampleAssembler assembler(sample, mask, {}, /*hidden=*/1, /*max_rows=*/16);
  for (const int32_t id : answer) assembler.AddToken(id, {});
  absl::StatusOr<FinishedSample> finished = assembler.Finish(reason);
  EXPECT_OK(finished);
  return {finished->record.loss_mask.begin(), finished->record.loss_mask.end()};
}

TEST(SampleAssemblerTest, AllThatWasSampledIsSupervised) {
  EXPECT_THAT(MaskOf({}, {1, kThink}, {2, kThinkEnd, 3, kStop}, FinishReason::kStop),
              ElementsAre(0, 0, 1, 1, 1, 1));
}

TEST(SampleAssemblerTest, AThoughtIsLeftOutUpToItsEnd) {
  const AnswerMask no_thought = {.thought = false};
  EXPECT_THAT(MaskOf(no_thought, {1, kThink}, {2, kThinkEnd, 3, kStop}, FinishReason::kStop),
              ElementsAre(0, 0, 0, 0, 1, 1));
  // Opened by the answer, as with K2-Thinking.
  EXPECT_THAT(MaskOf(no_thought, {1}, {kThink, 2, kThinkEnd, 3}, FinishReason::kLength),
              ElementsAre(0, 0, 0, 0, 1));
  // It never ended.
  EXPECT_THAT(MaskOf(no_thought, {kThink}, {2, 3}, FinishReason::kLength), ElementsAre(0, 0, 0));
  // There is none: an instant answer may speak of the tag.
  EXPECT_THAT(MaskOf(no_thought, {kThink, kThinkEnd}, {2, kThinkEnd, 3}, FinishReason::kLength),
              ElementsAre(0, 0, 1, 1, 1));
}

TEST(SampleAssemblerTest, TheStopTokenIsLeftOutWhereItWasSampled) {
  const AnswerMask no_stop = {.stop = false};
  EXPECT_THAT(MaskOf(no_stop, {1}, {2, kStop}, FinishReason::kStop), ElementsAre(0, 1, 0));
  EXPECT_THAT(MaskOf(no_stop, {1}, {2, 3}, FinishReason::kLength), ElementsAre(0, 1, 1));
}

TEST(SampleAssemblerTest, ATextKeepsItsOwnMask) {
  SampleRow sample;
  sample.ids = {1, 2, 3};
  sample.mask = {0, 1, 0};
  SampleAssembler assembler(sample, std::nullopt, {}, /*hidden=*/1, /*max_rows=*/3);
  ASSERT_OK_AND_ASSIGN(const FinishedSample finished, assembler.Finish(FinishReason::kPrefill));
  EXPECT_THAT(finished.record.loss_mask, ElementsAre(0, 1, 0));
}

// Of a text of two tokens whose rows of boundary 2 come with these numbers.
absl::Status StatusOf(const std::vector<int64_t>& rows) {
  const std::vector<int> boundaries = {2};
  SampleRow sample;
  sample.ids = {1, 2};
  sample.mask = {1, 1};
  SampleAssembler assembler(sample, std::nullopt, boundaries, /*hidden=*/1, /*max_rows=*/2);
  const std::vector<uint16_t> row = {0x3f80};
  for (const int64_t number : rows) assembler.AddStates(2, number, row);
  return assembler.Finish(FinishReason::kPrefill).status();
}

TEST(SampleAssemblerTest, RowsAndTokensMustAgree) {
  EXPECT_THAT(StatusOf({0}), StatusIs(absl::StatusCode::kInternal, "1 rows for 2 tokens"));
}

TEST(SampleAssemblerTest, NoRowComesTwice) {
  EXPECT_THAT(StatusOf({0, 0, 1}),
              StatusIs(absl::StatusCode::kInternal, "row 0 of boundary 2 came out of order"));
}

}  // namespace
}  // namespace statetap
