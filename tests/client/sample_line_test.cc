#include "client/lib/sample_line.h"

#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using testing::StatusIs;

ParsedLine Parse(std::string_view line) {
  absl::StatusOr<ParsedLine> parsed = ParseSampleLine(line, "file.jsonl");
  EXPECT_OK(parsed) << line;
  return parsed.ok() ? *std::move(parsed) : ParsedLine();
}

std::vector<int> IdsOf(const ParsedLine& line) {
  return {line.sample.tokens().ids().begin(), line.sample.tokens().ids().end()};
}

TEST(SampleLineTest, ChatKeepsOrderAndNumberForms) {
  const ParsedLine line = Parse(
      R"({"id":"a","messages":[{"role":"user","content":"hi"},{"role":"tool","z":1.0,"a":1}],)"
      R"("tools":[{"b":1e22,"a":10}]})");
  EXPECT_EQ(line.sample.id(), "a");
  EXPECT_EQ(line.sample.source(), "file.jsonl");
  EXPECT_EQ(line.sample.chat().messages_json(),
            R"([{"role":"user","content":"hi"},{"role":"tool","z":1.0,"a":1}])");
  EXPECT_EQ(line.sample.chat().tools_json(), R"([{"b":1e+22,"a":10}])");
  EXPECT_EQ(line.kind, LineKind::kOpenChat);
}

TEST(SampleLineTest, KindFollowsTheLastTurn) {
  EXPECT_EQ(Parse(R"({"messages":[{"role":"user"}]})").kind, LineKind::kOpenChat);
  EXPECT_EQ(Parse(R"({"messages":[{"role":"tool"}]})").kind, LineKind::kOpenChat);
  EXPECT_EQ(Parse(R"({"messages":[{"role":"assistant"}]})").kind, LineKind::kFinishedChat);
  EXPECT_EQ(Parse(R"({"messages":[{"role":"system"}]})").kind, LineKind::kOtherChat);
  EXPECT_EQ(Parse(R"({"messages":[]})").kind, LineKind::kOtherChat);
  EXPECT_EQ(Parse(R"({"prompt":"x"})").kind, LineKind::kPrompt);
  EXPECT_EQ(Parse(R"({"input_ids":[1]})").kind, LineKind::kTokens);
  const auto line =
      Parse(R"({"messages":[{"role":"assistant"},{"role":"user"},{"role":"assistant"}]})");
  EXPECT_EQ(line.answers, 2);
}

TEST(SampleLineTest, ModeFollowsKindAndTurns) {
  using K = LineKind;
  const v1::JobMode generate = v1::JOB_MODE_GENERATE, prefill = v1::JOB_MODE_PREFILL;
  EXPECT_EQ(ModeOf(K::kOpenChat, ""), generate);
  EXPECT_EQ(ModeOf(K::kOpenChat, "each"), prefill);
  EXPECT_EQ(ModeOf(K::kFinishedChat, "last"), prefill);
  EXPECT_EQ(ModeOf(K::kFinishedChat, "regenerate"), generate);
  EXPECT_EQ(ModeOf(K::kOtherChat, ""), v1::JOB_MODE_UNSPECIFIED);
  for (const char* turns : {"last", "each", "regenerate"}) {
    EXPECT_EQ(ModeOf(K::kPrompt, turns), generate);
    EXPECT_EQ(ModeOf(K::kTokens, turns), prefill);
  }
}

TEST(SampleLineTest, WhatNothingReadsIsNamed) {
  using ::testing::ElementsAre;
  EXPECT_THAT(ParseSampleLine(R"({"id":"a","input_ids":[1],"prompt":"text"})", ""),
              StatusIs(absl::StatusCode::kInvalidArgument, "both input_ids and prompt"));
  EXPECT_THAT(
      Parse(R"({"id":"a","messages":[],"tools":[],"meta":{},"source":"s","x":null})").ignored,
      ElementsAre());
  EXPECT_THAT(Parse(R"({"messages":[],"temperature":1,"prompt":"p","loss_mask":[]})").ignored,
              ElementsAre("temperature", "prompt", "loss_mask"));
  EXPECT_THAT(Parse(R"({"prompt":"p","tools":[],"max_new_tokens":3})").ignored,
              ElementsAre("tools"));
  EXPECT_THAT(
      Parse(R"({"custom_id":"a","method":"POST","url":"/v1","body":{"prompt":"x"}})").ignored,
      ElementsAre());
  EXPECT_THAT(Parse(R"({"conversations":[],"system":"s","lang":"de"})").ignored,
              ElementsAre("lang"));
  EXPECT_EQ(Parse(R"({"id":340282366920938463463374607431768211456,"prompt":"x"})").sample.id(),
            "340282366920938463463374607431768211456");
}

TEST(SampleLineTest, OddMessagesAreTheServersToReject) {
  for (const char* messages : {"[]", "[null]", "[3]", R"([{"role":"user","content":7}])"}) {
    const ParsedLine line = Parse(fmt::format(R"({{"messages":{}}})", messages));
    EXPECT_EQ(line.sample.chat().messages_json(), messages);
  }
}

TEST(SampleLineTest, PromptAndIds) {
  EXPECT_EQ(Parse(R"({"prompt":"<|im_end|>"})").sample.prompt(), "<|im_end|>");
  const ParsedLine ids = Parse(R"({"input_ids":[3,0,9],"loss_mask":[0,1,true]})");
  EXPECT_EQ(IdsOf(ids), (std::vector<int>{3, 0, 9}));
  EXPECT_EQ(ids.sample.tokens().loss_mask(), std::string("\0\1\1", 3));
  EXPECT_EQ(Parse(R"({"input_ids":[3],"loss_mask":null})").sample.tokens().loss_mask(), "");
}

TEST(SampleLineTest, AnotherEnginesAnswerIsSupervised) {
  const ParsedLine line =
      Parse(R"({"prompt":"text","prompt_token_ids":[1,2],"token_ids":[3],"finish_reason":"stop"})");
  EXPECT_EQ(IdsOf(line), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(line.sample.tokens().loss_mask(), std::string("\0\0\1", 3));
}

TEST(SampleLineTest, BatchLineHonoursSampling) {
  const ParsedLine line = Parse(
      R"({"custom_id":"r-1","method":"POST","url":"/v1/chat/completions","body":{"model":"m",)"
      R"("messages":[{"role":"user","content":"q"}],"temperature":0,"top_p":0.5,"max_tokens":7,)"
      R"("n":1,"stop":null,"seed":null,"chat_template_kwargs":{"thinking":false}}})");
  EXPECT_EQ(line.sample.id(), "r-1");
  EXPECT_EQ(line.sample.temperature(), 0);
  EXPECT_TRUE(line.sample.has_temperature());
  EXPECT_EQ(line.sample.top_p(), 0.5);
  EXPECT_EQ(line.sample.max_new_tokens(), 7);
  EXPECT_TRUE(line.sample.has_thinking());
  EXPECT_FALSE(line.sample.thinking());
}

TEST(SampleLineTest, BatchLineRefusesWhatItCannotHonour) {
  for (const char* field : {R"("n":2)", R"("stop":["\n"])", R"("seed":3)", R"("top_k":50)",
                            R"("frequency_penalty":0.5)", R"("logit_bias":{"5":1})"}) {
    const std::string line = fmt::format(R"({{"body":{{"messages":[],{}}}}})", field);
    EXPECT_THAT(ParseSampleLine(line, ""), StatusIs(absl::StatusCode::kInvalidArgument, "body."))
        << field;
  }
}

TEST(SampleLineTest, ShareGptBecomesMessages) {
  const ParsedLine line =
      Parse(R"({"system":"Be brief.","conversations":[{"from":"human","value":"q"},)"
            R"({"from":"function_call","value":"{\"name\":\"f\",\"arguments\":{\"x\":1}}"},)"
            R"({"from":"observation","value":"4"},{"from":"gpt","value":"a"}],)"
            R"("tools":"[{\"name\":\"f\"}]"})");
  EXPECT_EQ(line.sample.chat().messages_json(),
            R"([{"role":"system","content":"Be brief."},{"role":"user","content":"q"},)"
            R"({"role":"assistant","content":"","tool_calls":[{"id":"functions.f:0",)"
            R"("type":"function","function":{"name":"f","arguments":{"x":1}}}]},)"
            R"({"role":"tool","content":"4","tool_call_id":"functions.f:0"},)"
            R"({"role":"assistant","content":"a"}])");
  EXPECT_EQ(line.sample.chat().tools_json(), R"([{"name":"f"}])");
  EXPECT_EQ(line.kind, LineKind::kFinishedChat);
  EXPECT_EQ(
      Parse(R"({"conversations":[{"role":"user","content":"q"}]})").sample.chat().messages_json(),
      R"([{"role":"user","content":"q"}])");
}

TEST(SampleLineTest, OptionalFields) {
  const ParsedLine line =
      Parse(R"({"id":12,"prompt":"x","source":"web","meta":{"k":1,"n":null},"thinking":false,)"
            R"("max_new_tokens":3})");
  EXPECT_EQ(line.sample.id(), "12");
  EXPECT_EQ(line.sample.source(), "web");
  EXPECT_EQ(line.sample.meta_json(), R"({"k":1,"n":null})");
  EXPECT_EQ(line.sample.max_new_tokens(), 3);
  const ParsedLine nulls =
      Parse(R"({"id":null,"messages":null,"prompt":"x","source":null,"meta":null,"thinking":null,)"
            R"("max_new_tokens":null,"input_ids":null,"tools":null})");
  EXPECT_EQ(nulls.sample.id(), "");
  EXPECT_EQ(nulls.sample.source(), "file.jsonl");
  EXPECT_FALSE(nulls.sample.has_thinking());
  EXPECT_EQ(nulls.sample.prompt(), "x");
}

struct Fault {
  std::string line, part;
};

TEST(SampleLineTest, EveryFaultNamesFieldAndRemedy) {
  const std::vector<Fault> faults = {
      {"", "JSON"},
      {"{", "a line must be one JSON object"},
      {"[{\"prompt\":\"x\"}]", "jq -c"},
      {"[", "jq -c"},
      {"\"text\"", "one JSON object"},
      {"{\"prompt\":\"\x80\"}", "not UTF-8"},
      {"\x80", "JSON object"},
      {R"({"prompt":"\ud800"})", "JSON"},
      {R"({"prompt":"a","prompt":"b"})", "given twice"},
      {R"({"text":"x"})", "none of messages, prompt"},
      {R"({"messages":"hi"})", "messages is \"hi\""},
      {R"({"messages":[],"tools":{}})", "tools is an object"},
      {R"({"messages":[],"input_ids":[1]})", "more than one"},
      {R"({"prompt":["a"]})", "prompt is a list"},
      {R"({"input_ids":"1 2"})", "input_ids is \"1 2\""},
      {R"({"input_ids":[1,2.5]})", "input_ids[1] is 2.5"},
      {R"({"input_ids":[4294967296]})", "input_ids[0] is 4294967296"},
      {R"({"input_ids":[1,2],"loss_mask":[1]})", "loss_mask has 1 values for 2"},
      {R"({"input_ids":[1],"loss_mask":[2]})", "loss_mask[0] is 2"},
      {R"({"prompt_token_ids":[1]})", "token_ids is missing"},
      {R"({"custom_id":"a","body":{}})", "body has neither"},
      {R"({"body":{"messages":[],"temperature":"hot"}})", "body.temperature"},
      {R"({"conversations":{}})", "conversations"},
      {R"({"conversations":[{"value":"x"}]})", "conversations[0].from"},
      {R"({"conversations":[{"from":"alien","value":"x"}]})", "alien"},
      {R"({"prompt":"x","id":[1]})", "id is a list"},
      {R"({"prompt":"x","source":3})", "source is 3"},
      {R"({"prompt":"x","meta":{"a":{}}})", "meta.a is an object"},
      {R"({"prompt":"x","meta":"a"})", "meta is \"a\""},
      {R"({"prompt":"x","thinking":"on"})", "thinking is \"on\""},
      {R"({"prompt":"x","max_new_tokens":0})", "max_new_tokens is 0"},
      {R"({"prompt":"x","max_new_tokens":-1})", "max_new_tokens is -1"},
      {R"({"prompt":"x","max_new_tokens":2147483648})", "2147483648"},
      {R"({"prompt":"x","max_new_tokens":18446744073709551615})", "18446744073709551615"},
      {R"({"prompt":"x","max_new_tokens":1.5})", "max_new_tokens is 1.5"},
  };
  for (const Fault& fault : faults)
    EXPECT_THAT(ParseSampleLine(fault.line, ""),
                StatusIs(absl::StatusCode::kInvalidArgument, fault.part))
        << fault.line;
}

TEST(SampleLineTest, MessagesOfHugeLinesStayShort) {
  const std::string line = "{\"prompt\":\"" + std::string(1 << 20, 'x');
  const auto parsed = ParseSampleLine(line, "");
  ASSERT_FALSE(parsed.ok());
  EXPECT_LT(MessageOf(parsed.status()).size(), 500u);
}

}  // namespace
}  // namespace statetap
