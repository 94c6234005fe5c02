#include "server/jobs/estimate.h"

#include "tests/support/job_harness.h"

namespace statetap {
namespace {

using testing::ChatSample;
using testing::IdsSample;
using testing::JobHarness;
using testing::StatusIs;

using Samples = google::protobuf::RepeatedPtrField<v1::SampleInput>;

Samples Chats(int from, int count) {
  Samples samples;
  for (int i = from; i < from + count; ++i) {
    v1::SampleInput sample = ChatSample(fmt::format("chat-{}", i), fmt::format("Say {} words.", i));
    sample.set_source(i % 2 == 0 ? "even" : "odd");
    *samples.Add() = std::move(sample);
  }
  return samples;
}

absl::StatusOr<v1::EstimateResponse> Estimate(JobHarness& harness, const v1::JobOptions& options,
                                              const Samples& samples,
                                              const std::string& pilot = "") {
  STATETAP_ASSIGN_OR_RETURN(Estimator estimator,
                            Estimator::Begin(*harness.store, harness.model, options, pilot));
  STATETAP_RETURN_IF_ERROR(estimator.Add(samples));
  return estimator.Finish(/*free_bytes=*/1000);
}

TEST(EstimateTest, APilotForetellsTheWholeJob) {
  JobHarness harness;
  harness.Run();
  v1::JobOptions options;
  options.set_max_length(256);
  const Samples pilot = Chats(0, 200), all = Chats(0, 1000);
  ASSERT_OK_AND_ASSIGN(const JobRecord first,
                       harness.Submit(options, {pilot.begin(), pilot.end()}));
  EXPECT_EQ(harness.WaitForEnd(first).counts.stored, 200);
  ASSERT_OK_AND_ASSIGN(const v1::EstimateResponse estimate,
                       Estimate(harness, options, all, first.id));
  EXPECT_EQ(estimate.pilot_answers(), 200);
  EXPECT_EQ(estimate.rate_from(), first.id);
  EXPECT_EQ(estimate.estimate().samples(), 1000);
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted,
                       harness.Submit(options, {all.begin(), all.end()}));
  const JobRecord job = harness.WaitForEnd(submitted);
  ASSERT_EQ(job.counts.stored, 1000);
  const auto near = [](double value, double expected) {
    EXPECT_NEAR(value / expected, 1.0, 0.2) << value << " against " << expected;
  };
  near(estimate.estimate().answer_tokens(), static_cast<double>(job.generated));
  near(static_cast<double>(estimate.estimate().bytes()), static_cast<double>(job.bytes));
  EXPECT_EQ(estimate.estimate().prompt_tokens(), job.tokens - job.generated);
}

TEST(EstimateTest, WithoutAPilotAnswersAreAsLongAsTheLimitsAllow) {
  JobHarness harness;
  v1::JobOptions options;
  options.set_max_length(64);
  options.set_max_new_tokens(10);
  ASSERT_OK_AND_ASSIGN(const v1::EstimateResponse estimate,
                       Estimate(harness, options, Chats(0, 5)));
  EXPECT_EQ(estimate.estimate().answer_tokens(), 50);
  EXPECT_EQ(estimate.pilot_answers(), 0);
  EXPECT_EQ(estimate.tokens_per_second(), 0);
  EXPECT_EQ(estimate.estimate().seconds(), 0);
  EXPECT_EQ(estimate.free_bytes(), 1000);
}

TEST(EstimateTest, TheTableSaysWhatEachLengthLosesToRejects) {
  JobHarness harness;
  Samples samples;
  for (const int tokens : {10, 300, 500, 700})
    *samples.Add() = IdsSample(std::to_string(tokens), std::vector<int32_t>(tokens, 1));
  *samples.Add() = IdsSample("bad", {1, 99999});
  ASSERT_OK_AND_ASSIGN(const v1::EstimateResponse estimate, Estimate(harness, {}, samples));
  // The server's limit is 512.
  ASSERT_EQ(estimate.by_max_length_size(), 1);
  EXPECT_EQ(estimate.by_max_length(0).max_length(), 512);
  EXPECT_EQ(estimate.by_max_length(0).samples(), 3);
  EXPECT_EQ(estimate.by_max_length(0).rejected(), 2);
  EXPECT_EQ(estimate.by_max_length(0).prompt_tokens(), 810);
  v1::JobOptions options;
  options.set_max_length(300);
  options.set_too_long(v1::TOO_LONG_TRUNCATE);
  ASSERT_OK_AND_ASSIGN(const v1::EstimateResponse cut, Estimate(harness, options, samples));
  EXPECT_EQ(cut.estimate().samples(), 4);
  EXPECT_EQ(cut.estimate().cut(), 2);
  EXPECT_EQ(cut.estimate().prompt_tokens(), 910);
}

TEST(EstimateTest, CountsAndRefusesSamplesAsAJobDoes) {
  JobHarness harness;
  Samples twice = Chats(0, 5);
  twice.MergeFrom(Chats(0, 5));
  ASSERT_OK_AND_ASSIGN(const v1::EstimateResponse estimate, Estimate(harness, {}, twice));
  EXPECT_EQ(estimate.estimate().samples(), 5);
  Samples other = Chats(0, 2);
  other[1].set_id(other[0].id());
  EXPECT_THAT(Estimate(harness, {}, other).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "but different content"));
  Samples mixed = Chats(0, 1);
  *mixed.Add() = IdsSample("ids", {1, 2, 3});
  EXPECT_THAT(Estimate(harness, {}, mixed).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "options.mode"));
}

TEST(EstimateTest, RefusesWhatCannotBe) {
  JobHarness harness;
  EXPECT_THAT(Estimator::Begin(*harness.store, harness.model, {}, "nobody").status(),
              StatusIs(absl::StatusCode::kNotFound, "nobody"));
  v1::JobOptions options;
  options.set_states("fp4");
  EXPECT_THAT(Estimator::Begin(*harness.store, harness.model, options, "").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "states"));
  ASSERT_OK_AND_ASSIGN(Estimator none, Estimator::Begin(*harness.store, harness.model, {}, ""));
  EXPECT_THAT(none.Finish(0).status(), StatusIs(absl::StatusCode::kInvalidArgument, "none came"));
}

}  // namespace
}  // namespace statetap
