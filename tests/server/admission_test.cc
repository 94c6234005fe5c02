#include "server/jobs/admission.h"

#include <cmath>
#include <functional>

#include "tests/support/job_harness.h"

namespace statetap {
namespace {

using testing::ChatSample;
using testing::FakeModel;
using ::testing::HasSubstr;
using testing::IdsSample;
using testing::JobHarness;
using testing::StatusIs;

class AdmissionTest : public ::testing::Test {
 protected:
  absl::StatusOr<JobPlan> Plan(const v1::JobOptions& options, bool generate = true) {
    return PlanJob(options, generate, model_);
  }
  SampleRow Admit(const v1::SampleInput& sample, const v1::JobOptions& options, bool generate) {
    auto plan = Plan(options, generate);
    EXPECT_OK(plan);
    return AdmitSample(sample, *plan, model_).at(0);
  }
  const ServedModel model_ = FakeModel();
};

TEST_F(AdmissionTest, FillsInEveryDefault) {
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, Plan({}));
  EXPECT_EQ(plan.boundaries, (std::vector<int>{2, 4, 5, 8}));
  EXPECT_EQ(plan.options.max_length(), 512);  // the server's limit is below 8192
  EXPECT_EQ(plan.options.temperature(), 1.0);
  EXPECT_EQ(plan.options.top_p(), 0.95);
  EXPECT_EQ(plan.options.shard_bytes(), uint64_t{4} << 30);
  EXPECT_EQ(plan.options.template_(), "kimi-k2.5");
  EXPECT_EQ(plan.options.keep_reasoning(), "tool_loop");
  EXPECT_TRUE(plan.options.logprobs());
  v1::JobOptions instant;
  instant.set_thinking(false);
  instant.set_no_final(true);
  ASSERT_OK_AND_ASSIGN(const JobPlan other, Plan(instant, /*generate=*/false));
  EXPECT_EQ(other.options.temperature(), 0.6);
  EXPECT_EQ(other.boundaries, (std::vector<int>{2, 4, 5}));
  EXPECT_EQ(other.options.keep_reasoning(), "last");
  EXPECT_FALSE(other.options.logprobs());
  // What is stored gives the same plan again.
  ASSERT_OK_AND_ASSIGN(const JobPlan again,
                       PlanOfStored(other.options.SerializeAsString(), model_));
  EXPECT_EQ(again.options.SerializeAsString(), other.options.SerializeAsString());
}

TEST_F(AdmissionTest, RefusesOptionsNamingFieldValueAndRemedy) {
  const auto refused = [&](const std::function<void(v1::JobOptions&)>& change,
                           std::string_view field, std::string_view value) {
    v1::JobOptions options;
    change(options);
    EXPECT_THAT(Plan(options), StatusIs(absl::StatusCode::kInvalidArgument,
                                        fmt::format("options.{}: {}", field, value)));
  };
  refused([](auto& o) { o.add_taps(9); }, "taps", "9");
  refused([](auto& o) { o.add_taps(-1); }, "taps", "-1");
  refused([](auto& o) { o.add_taps(3), o.add_taps(3); }, "taps", "3 behind 3");
  refused([](auto& o) { o.add_taps(4), o.add_taps(2); }, "taps", "2 behind 4");
  refused([](auto& o) { o.set_max_length(513); }, "max_length", "513");
  refused([](auto& o) { o.set_max_length(1); }, "max_length", "1");
  refused([](auto& o) { o.set_max_length(-5); }, "max_length", "-5");
  refused([](auto& o) { o.set_max_new_tokens(-1); }, "max_new_tokens", "-1");
  refused([](auto& o) { o.set_temperature(-0.5); }, "temperature", "-0.5");
  refused([](auto& o) { o.set_temperature(std::nan("")); }, "temperature", "nan");
  refused([](auto& o) { o.set_top_p(0); }, "top_p", "0");
  refused([](auto& o) { o.set_top_p(1.5); }, "top_p", "1.5");
  refused([](auto& o) { o.set_shard_bytes(1000); }, "shard_bytes", "1000");
  refused([](auto& o) { o.set_template_("llama"); }, "template", "");
  refused([](auto& o) { o.set_keep_reasoning("most"); }, "keep_reasoning", "");
  refused([](auto& o) { o.set_turns("each"); }, "turns", "each");
  refused([](auto& o) { o.set_supervise("all"); }, "supervise", "all");
  refused([](auto& o) { o.set_eval_fraction(1); }, "eval_fraction", "1");
  refused([](auto& o) { o.set_mode(static_cast<v1::JobMode>(7)); }, "mode", "7");
  refused([](auto& o) { o.set_too_long(static_cast<v1::TooLong>(-3)); }, "too_long", "-3");
  refused([](auto& o) { o.set_name(std::string(201, 'x')); }, "name", "a name of 201 characters");
  v1::JobOptions wide;  // 200 characters of three bytes
  for (int i = 0; i < 200; ++i) *wide.mutable_name() += "名";
  EXPECT_OK(Plan(wide));
  ServedModel shallow = model_;
  shallow.config.num_layers = 6;
  EXPECT_THAT(PlanJob({}, true, shallow),
              StatusIs(absl::StatusCode::kInvalidArgument, "options.taps"));
}

TEST_F(AdmissionTest, LengthLimitIsExact) {
  v1::JobOptions options;
  options.set_max_length(64);
  const auto with = [](size_t n) { return IdsSample("x", std::vector<int32_t>(n, 5)); };
  EXPECT_FALSE(Admit(with(63), options, true).rejection);
  EXPECT_EQ(Admit(with(64), options, true).rejection->reason, "too_long");
  EXPECT_FALSE(Admit(with(64), options, false).rejection);
  const SampleRow refused = Admit(with(65), options, false);
  ASSERT_TRUE(refused.rejection);
  EXPECT_EQ(refused.rejection->reason, "too_long");
  EXPECT_THAT(refused.rejection->message, HasSubstr("65 tokens, max_length is 64"));
  options.set_too_long(v1::TOO_LONG_TRUNCATE);
  const SampleRow cut = Admit(with(65), options, false);
  EXPECT_FALSE(cut.rejection);
  EXPECT_TRUE(cut.truncated);
  EXPECT_EQ(cut.ids.size(), 64u);
  EXPECT_EQ(cut.mask.size(), 64u);
}

TEST_F(AdmissionTest, RejectsWhatCannotBeASample) {
  const SampleRow vocabulary = Admit(IdsSample("x", {1, 2, 2304}), {}, false);
  EXPECT_EQ(vocabulary.rejection->reason, "token_id");
  EXPECT_EQ(vocabulary.rejection->token, 2);
  EXPECT_THAT(vocabulary.rejection->message, HasSubstr("2304"));
  EXPECT_EQ(Admit(IdsSample("x", {-1}), {}, false).rejection->reason, "token_id");
  EXPECT_EQ(Admit(IdsSample("x", {}), {}, false).rejection->reason, "input");
  v1::SampleInput sample = IdsSample("x", {1, 2, 3});
  sample.mutable_tokens()->set_loss_mask(std::string(2, '\1'));
  EXPECT_THAT(Admit(sample, {}, false).rejection->message, HasSubstr("2 values for 3"));
  sample.mutable_tokens()->set_loss_mask(std::string("\0\1\2", 3));
  EXPECT_THAT(Admit(sample, {}, false).rejection->message, HasSubstr("other than 0 and 1"));
  sample = ChatSample("x", "hi");
  sample.mutable_chat()->set_messages_json("[{\"role\": \"user\", \"content\": 7}]");
  EXPECT_EQ(Admit(sample, {}, true).rejection->reason, "template");
  sample.mutable_chat()->set_messages_json("[{");
  EXPECT_EQ(Admit(sample, {}, true).rejection->reason, "input");
  EXPECT_EQ(Admit(v1::SampleInput(), {}, true).rejection->reason, "input");
  sample = ChatSample("x", "hi");
  sample.set_meta_json("{\"a\": [1]}");
  EXPECT_THAT(Admit(sample, {}, true).rejection->message, HasSubstr("meta.a"));
  sample = ChatSample("x", "hi");
  sample.set_max_new_tokens(-2147483647 - 1);
  EXPECT_THAT(Admit(sample, {}, true).rejection->message, HasSubstr("max_new_tokens"));
  EXPECT_EQ(Admit(ChatSample(std::string(1001, 'x'), "hi"), {}, true).rejection->reason, "input");
}

TEST_F(AdmissionTest, RejectsChatsThatGiveNoSample) {
  v1::SampleInput answered;
  answered.mutable_chat()->set_messages_json(
      R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])");
  SampleRow row = Admit(answered, {}, /*generate=*/true);
  ASSERT_TRUE(row.rejection);
  EXPECT_EQ(row.rejection->reason, "template");
  EXPECT_THAT(row.rejection->message, HasSubstr("messages[1] is the assistant's"));
  EXPECT_FALSE(Admit(answered, {}, /*generate=*/false).rejection);
  row = Admit(ChatSample("x", "hi"), {}, /*generate=*/false);
  ASSERT_TRUE(row.rejection);
  EXPECT_EQ(row.rejection->reason, "template");
  EXPECT_THAT(row.rejection->message, HasSubstr("no token would be supervised"));
  // Nothing looks at an image: its states would be those of a placeholder.
  v1::SampleInput image;
  image.mutable_chat()->set_messages_json(
      R"([{"role":"user","content":[{"type":"text","text":"what is this?"},)"
      R"({"type":"image_url","image_url":{"url":"https://example.com/a.png"}}]}])");
  row = Admit(image, {}, /*generate=*/true);
  ASSERT_TRUE(row.rejection);
  EXPECT_EQ(row.rejection->reason, "template");
  EXPECT_THAT(row.rejection->message, HasSubstr("messages[0]"));
}

TEST_F(AdmissionTest, LongFieldsAreRejectedAndNotEchoed) {
  v1::SampleInput sample = ChatSample("x", "hi");
  sample.set_meta_json(fmt::format("{{\"note\": \"{}\"}}", std::string(5 << 20, 'n')));
  SampleRow row = Admit(sample, {}, true);
  ASSERT_TRUE(row.rejection);
  EXPECT_EQ(row.rejection->reason, "input");
  EXPECT_THAT(row.rejection->message, HasSubstr("meta has 5242892 bytes"));
  EXPECT_THAT(row.rejection->message, HasSubstr("at most 65536"));
  EXPECT_LT(row.meta_json.size(), size_t{1} << 16);
  sample = ChatSample("x", "hi");
  sample.set_source(std::string(100'000, 's'));
  row = Admit(sample, {}, true);
  EXPECT_THAT(row.rejection->message, HasSubstr("source has 100000 bytes"));
  EXPECT_LT(row.source.size(), 1100u);
  sample = ChatSample("x", "hi");
  sample.set_meta_json(fmt::format("{{\"{}\": [1]}}", std::string(20'000, 'k')));
  row = Admit(sample, {}, true);
  EXPECT_LT(row.rejection->message.size(), 1100u);
  EXPECT_TRUE(row.rejection->message.ends_with("is not a scalar"));
}

TEST_F(AdmissionTest, PrefillOfAChatSupervisesItsLastAnswer) {
  v1::SampleInput sample;
  sample.mutable_chat()->set_messages_json(
      R"([{"role":"user","content":"a"},{"role":"assistant","content":"first"},)"
      R"({"role":"user","content":"b"},{"role":"assistant","content":"second"}])");
  const SampleRow row = Admit(sample, {}, false);
  ASSERT_FALSE(row.rejection);
  std::vector<int32_t> supervised;
  for (size_t i = 0; i < row.ids.size(); ++i) {
    if (row.mask[i] == 1) supervised.push_back(row.ids[i]);
  }
  const std::string text = model_.tokenizer->Decode(supervised);
  EXPECT_THAT(text, HasSubstr("second"));
  EXPECT_THAT(text, HasSubstr("<|im_end|>"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("first")));
  EXPECT_EQ(row.mask[static_cast<size_t>(row.prompt_tokens)], 1);
}

TEST_F(AdmissionTest, EachAnswerHasAnIdOfItsChatAndItsSplit) {
  JobHarness harness;
  v1::JobOptions options;
  options.set_mode(v1::JOB_MODE_PREFILL);
  options.set_turns("each");
  options.set_eval_fraction(0.5);
  v1::SampleInput sample = ChatSample("", "hi");
  sample.mutable_chat()->set_messages_json(
      R"([{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"r"},)"
      R"({"role":"user","content":"c"},{"role":"assistant","content":"d","tool_calls":)"
      R"([{"id":"call_1","function":{"name":"f","arguments":"{}"}}]}])");
  std::vector<v1::SampleInput> samples;
  for (int i = 0; i < 16; ++i) {
    sample.set_id(i == 0 ? "" : fmt::format("chat{}", i));
    samples.push_back(sample);
  }
  samples.push_back(sample);  // again: counts once, in the report too
  samples.push_back(ChatSample("open", "hi"));
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(options, samples));
  EXPECT_EQ(job.counts.submitted, 33);
  EXPECT_EQ(job.counts.rejected, 1);
  ASSERT_OK_AND_ASSIGN(const auto rows, harness.store->ToDo(job.key, -1, 100));
  ASSERT_EQ(rows.size(), 32u);
  EXPECT_EQ(rows[0].id, rows[0].digest + "/1");
  EXPECT_EQ(rows[3].id, "chat1/2");
  int eval = 0;
  for (size_t i = 0; i < rows.size(); i += 2) {
    EXPECT_EQ(rows[i].split, rows[i + 1].split) << "they share their text";
    eval += rows[i].split == "eval";
  }
  EXPECT_GT(eval, 1);
  EXPECT_LT(eval, 15);
  EXPECT_EQ(job.text.thoughts, 32);
  EXPECT_EQ(job.text.dropped_earlier, 16);
  EXPECT_EQ(job.text.dropped_last, 0);
  EXPECT_EQ(job.text.tool_calls, 16);
  EXPECT_EQ(job.text.odd_tool_ids, 16);
  ASSERT_OK_AND_ASSIGN(const JobRecord read, harness.store->GetJob(job.key));
  EXPECT_EQ(read.text.odd_tool_ids, 16);
}

TEST_F(AdmissionTest, AGivenSplitIsKept) {
  JobHarness harness;
  v1::SampleInput sample = ChatSample("a", "hi");
  sample.set_split("eval");
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit({}, {sample}));
  ASSERT_OK_AND_ASSIGN(const auto rows, harness.store->ToDo(job.key, -1, 10));
  EXPECT_EQ(rows.at(0).split, "eval");
  sample.set_split("test");
  EXPECT_THAT(Admit(sample, {}, true).rejection->message, HasSubstr("split is \"test\""));
}

TEST_F(AdmissionTest, MissingIdsAreDigestsAndRepeatsAreNumbered) {
  JobHarness harness;
  const auto same = ChatSample("", "hello");
  ASSERT_OK_AND_ASSIGN(const JobRecord job,
                       harness.Submit({}, {same, ChatSample("", "other"), same, same}));
  ASSERT_OK_AND_ASSIGN(const auto rows, harness.store->ToDo(job.key, -1, 10));
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].id, rows[0].digest);
  EXPECT_EQ(rows[2].id, rows[0].digest + "#1");
  EXPECT_EQ(rows[3].id, rows[0].digest + "#2");
  EXPECT_NE(rows[1].id, rows[0].id);
}

TEST_F(AdmissionTest, SameNameAndContentIsTheSameJob) {
  JobHarness harness;
  v1::JobOptions options;
  options.set_name("n");
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(options, {ChatSample("a", "hello")}));
  ASSERT_OK_AND_ASSIGN(const JobRecord again, harness.Submit(options, {ChatSample("a", "hello")}));
  EXPECT_EQ(job.id, again.id);
  options.set_seed(3);
  options.add_taps(1);
  EXPECT_THAT(harness.Submit(options, {ChatSample("a", "hello")}),
              StatusIs(absl::StatusCode::kAlreadyExists, "taps: [1] here, [2,4,5] there; seed: 3"));
}

TEST_F(AdmissionTest, MixedKindsMustSayTheMode) {
  JobHarness harness;
  EXPECT_THAT(harness.Submit({}, {ChatSample("a", "hello"), IdsSample("b", {1, 2})}),
              StatusIs(absl::StatusCode::kInvalidArgument, "options.mode"));
  v1::JobOptions options;
  options.set_mode(v1::JOB_MODE_PREFILL);
  v1::SampleInput answered;
  answered.mutable_chat()->set_messages_json(
      R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])");
  ASSERT_OK_AND_ASSIGN(const JobRecord job,
                       harness.Submit(options, {answered, IdsSample("b", {1, 2})}));
  EXPECT_EQ(job.counts.to_do, 2);
  EXPECT_THAT(harness.Submit({}, {}), StatusIs(absl::StatusCode::kInvalidArgument, "at least one"));
  ASSERT_OK_AND_ASSIGN(const auto jobs, harness.store->ListJobs());
  EXPECT_EQ(jobs.size(), 1u);  // the refused ones left nothing
}

TEST_F(AdmissionTest, SplitIsAHashOfTheId) {
  JobHarness harness;
  v1::JobOptions options;
  options.set_eval_fraction(0.25);
  std::vector<v1::SampleInput> samples;
  for (int i = 0; i < 400; ++i) samples.push_back(IdsSample(fmt::format("s{}", i), {1, 2}));
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness.Submit(options, samples));
  ASSERT_OK_AND_ASSIGN(const auto rows, harness.store->ToDo(job.key, -1, 1000));
  const auto eval = std::count_if(rows.begin(), rows.end(),
                                  [](const SampleRow& row) { return row.split == "eval"; });
  EXPECT_NEAR(static_cast<double>(eval), 100, 30);
}

TEST_F(AdmissionTest, AJobThatCannotFitOnTheDiskIsRefused) {
  testing::JobHarness harness;
  const auto submit = [&](int64_t free_bytes) -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(Admission admission,
                              Admission::Begin(*harness.store, harness.model, {}));
    google::protobuf::RepeatedPtrField<v1::SampleInput> batch;
    *batch.Add() = testing::IdsSample("a", std::vector<int32_t>(200, 1));
    STATETAP_RETURN_IF_ERROR(admission.Add(batch));
    STATETAP_RETURN_IF_ERROR(admission.Add(batch));  // a duplicate is stored once
    return admission.Finish(free_bytes).status();
  };
  EXPECT_THAT(submit(200 * 4 * 16 * 2),
              testing::StatusIs(absl::StatusCode::kResourceExhausted, "200 tokens of 1 samples"));
  EXPECT_OK(submit(int64_t{1} << 30));
}

}  // namespace
}  // namespace statetap
