// Turns, masks, spelled special tokens and the reasons for a refusal, on tiny-kimi's tokenizer.
#include "proto/messages/sample_text.h"

#include <filesystem>

#include "extractor/base/json.h"
#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::StatusIs;

// Two answers, the first one by way of a tool.
constexpr std::string_view kTwoAnswers = R"([{"role":"user","content":"q1"},
  {"role":"assistant","reasoning_content":"r1","content":"","tool_calls":[
    {"id":"functions.f:0","function":{"name":"f","arguments":{"x":1}}}]},
  {"role":"tool","tool_call_id":"functions.f:0","content":"4"},
  {"role":"assistant","reasoning_content":"r2","content":"a1"},
  {"role":"user","content":"q2"},
  {"role":"assistant","reasoning_content":"r3","content":"a2"}])";

class SampleTextTest : public ::testing::Test {
 protected:
  static v1::SampleInput Chat(std::string_view messages) {
    v1::SampleInput sample;
    sample.set_id("c");
    sample.mutable_chat()->set_messages_json(std::string(messages));
    return sample;
  }
  static v1::JobOptions Prefill(std::string_view turns = "") {
    v1::JobOptions options;
    options.set_mode(v1::JOB_MODE_PREFILL);
    options.set_turns(std::string(turns));
    return options;
  }
  TextModel model() const { return {&tokenizer_, TemplateKind::kKimiK25, tokenizer_.vocab()}; }

  std::vector<SampleText> Texts(const v1::SampleInput& sample, const v1::JobOptions& options,
                                TextPurpose purpose = TextPurpose::kJob) const {
    const absl::StatusOr<TextPlan> plan =
        PlanText(options, options.mode() != v1::JOB_MODE_PREFILL, TemplateKind::kKimiK25);
    EXPECT_OK(plan);
    return plan.ok() ? TextsOf(sample, *plan, model(), purpose) : std::vector<SampleText>();
  }
  std::string TextOf(const SampleText& text) const { return tokenizer_.Decode(text.ids); }
  std::string Supervised(const SampleText& text) const {
    std::vector<int32_t> ids;
    for (size_t t = 0; t < text.ids.size(); ++t) {
      if (text.mask[t] == 1) ids.push_back(text.ids[t]);
    }
    return tokenizer_.Decode(ids);
  }

  const Tokenizer tokenizer_ =
      Tokenizer::Open(std::filesystem::path(STATETAP_SOURCE_DIR) / "models/tiny-kimi").value();
};

TEST_F(SampleTextTest, EachAnswerIsASampleInTheContextItWasWrittenIn) {
  const std::vector<SampleText> texts = Texts(Chat(kTwoAnswers), Prefill("each"));
  ASSERT_EQ(texts.size(), 3u);
  const std::vector<std::string> answers = {
      "r1</think><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
      "<|tool_call_argument_begin|>{\"x\": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
      "r2</think>a1<|im_end|>", "r3</think>a2<|im_end|>"};
  const Json all = ParseJson(kTwoAnswers).value();
  Json before = Json::array();
  size_t turn = 0;
  for (const Json& message : all) {
    if (message["role"] == "assistant") {
      // What generating at this place would have seen is in front of the answer, token for token.
      const SampleText prompt = Texts(Chat(DumpJson(before)), {}).at(0);
      const SampleText& text = texts[turn];
      EXPECT_EQ(Supervised(text), answers[turn]);
      ASSERT_LT(prompt.ids.size(), text.ids.size());
      EXPECT_TRUE(std::equal(prompt.ids.begin(), prompt.ids.end(), text.ids.begin()));
      EXPECT_EQ(text.mask[prompt.ids.size() - 1], 0);
      EXPECT_EQ(text.mask[prompt.ids.size()], 1);
      EXPECT_EQ(text.turn, static_cast<int>(++turn));
    }
    before.push_back(message);
  }
}

TEST_F(SampleTextTest, ChatsWithoutAnAnswerAndIdsAreOneSampleUnderEach) {
  const auto none = Texts(Chat(R"([{"role":"user","content":"q"}])"), Prefill("each"));
  ASSERT_EQ(none.size(), 1u);
  EXPECT_THAT(none[0].refusal->message, HasSubstr("no message is the assistant's"));
  v1::SampleInput ids;
  ids.mutable_tokens()->add_ids(5);
  const auto tokens = Texts(ids, Prefill("each"));
  ASSERT_EQ(tokens.size(), 1u);
  EXPECT_EQ(tokens[0].turn, 0);
}

TEST_F(SampleTextTest, AFaultInALaterTurnLeavesTheEarlierSamples) {
  const auto texts =
      Texts(Chat(R"([{"role":"user","content":"q"},{"role":"assistant","content":"a"},
      {"role":"user","content":[{"type":"image_url"}]},{"role":"assistant","content":"b"}])"),
            Prefill("each"));
  ASSERT_EQ(texts.size(), 2u);
  EXPECT_FALSE(texts[0].refusal);
  EXPECT_EQ(texts[1].refusal->reason, "template");
  EXPECT_THAT(texts[1].refusal->message, HasSubstr("messages[2].content[0] is image_url"));
}

TEST_F(SampleTextTest, RegenerateLeavesTheLastAnswerOut) {
  v1::JobOptions options;
  options.set_mode(v1::JOB_MODE_GENERATE);
  const SampleText refused = Texts(Chat(kTwoAnswers), options).at(0);
  EXPECT_EQ(refused.refusal->reason, "template");
  EXPECT_THAT(refused.refusal->message, HasSubstr("messages[5]"));
  EXPECT_THAT(refused.refusal->message, HasSubstr("turns regenerate"));
  options.set_turns("regenerate");
  Json open = ParseJson(kTwoAnswers).value();
  open.erase(open.size() - 1);
  const SampleText again = Texts(Chat(kTwoAnswers), options).at(0);
  EXPECT_EQ(TextOf(again), TextOf(Texts(Chat(DumpJson(open)), {}).at(0)));
  EXPECT_EQ(Supervised(again), "");
  // An open chat has nothing to leave out; two answers in a row are more than one.
  EXPECT_EQ(TextOf(Texts(Chat(DumpJson(open)), options).at(0)), TextOf(again));
  open.push_back(open[1]);
  open.push_back(open[1]);
  EXPECT_TRUE(Texts(Chat(DumpJson(open)), options).at(0).refusal);
}

TEST_F(SampleTextTest, MaskOptionsLeaveOutThoughtsAndStops) {
  const auto supervised = [&](auto... change) {
    v1::JobOptions options = Prefill();
    (change(options), ...);
    return Supervised(Texts(Chat(kTwoAnswers), options).at(0));
  };
  const auto no_thought = [](v1::JobOptions& o) { o.set_supervise_thought(false); };
  const auto no_stop = [](v1::JobOptions& o) { o.set_supervise_stop(false); };
  const auto all = [](v1::JobOptions& o) { o.set_supervise("all"); };
  const auto keep_all = [](v1::JobOptions& o) { o.set_keep_reasoning("all"); };
  EXPECT_EQ(supervised(), "r3</think>a2<|im_end|>");
  EXPECT_EQ(supervised(no_thought), "a2<|im_end|>");
  EXPECT_EQ(supervised(no_stop), "r3</think>a2");
  EXPECT_EQ(supervised(no_stop, no_thought), "a2");
  const std::string calls =
      "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
      "{\"x\": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>";
  // Of earlier answers the thoughts were dropped: their empty blocks are the template's.
  EXPECT_EQ(supervised(all), calls + "a1<|im_end|>r3</think>a2<|im_end|>");
  EXPECT_EQ(supervised(all, keep_all),
            "r1</think>" + calls + "r2</think>a1<|im_end|>r3</think>a2<|im_end|>");
}

TEST_F(SampleTextTest, MaskOptionsThatWouldDoNothingRefuseTheSample) {
  v1::SampleInput ids, prompt;
  ids.mutable_tokens()->add_ids(5);
  prompt.set_prompt("p");
  for (const v1::SampleInput& sample : {ids, prompt}) {
    const auto refused = [&](auto change) {
      v1::JobOptions options = Prefill();
      change(options);
      const SampleText text = Texts(sample, options).at(0);
      return text.refusal ? text.refusal->message : "";
    };
    EXPECT_THAT(refused([](auto& o) { o.set_supervise("all"); }), HasSubstr("supervise all"));
    EXPECT_THAT(refused([](auto& o) { o.set_supervise_thought(false); }),
                HasSubstr("supervise_thought off"));
    EXPECT_THAT(refused([](auto& o) { o.set_supervise_stop(false); }),
                HasSubstr("supervise_stop off"));
    EXPECT_EQ(refused([](auto& o) { o.set_supervise_stop(true); }), "");
    // Of an answer that is written anew they hold, whatever is in front of it.
    v1::JobOptions generate;
    generate.set_supervise_stop(false);
    EXPECT_FALSE(Texts(sample, generate).at(0).refusal);
  }
}

TEST_F(SampleTextTest, CountsWhatWasDroppedAndFromWhere) {
  const auto counts = [&](std::string_view keep, bool generate = false) {
    v1::JobOptions options = Prefill();
    if (generate) {
      options.set_mode(v1::JOB_MODE_GENERATE);
      options.set_turns("regenerate");
    }
    options.set_keep_reasoning(std::string(keep));
    const TextCounts c = Texts(Chat(kTwoAnswers), options).at(0).counts;
    return std::vector<int64_t>{c.thoughts, c.dropped_earlier, c.dropped_tool_turns,
                                c.dropped_last};
  };
  EXPECT_THAT(counts("last"), ElementsAre(3, 1, 1, 0));
  EXPECT_THAT(counts("all"), ElementsAre(3, 0, 0, 0));
  EXPECT_THAT(counts("none"), ElementsAre(3, 1, 1, 1));
  EXPECT_THAT(counts("tool_loop"), ElementsAre(3, 1, 1, 1));
  EXPECT_THAT(counts("tool_loop", /*generate=*/true), ElementsAre(2, 0, 1, 1));
  v1::SampleInput instant = Chat(kTwoAnswers);
  instant.set_thinking(false);
  EXPECT_EQ(Texts(instant, Prefill()).at(0).counts.dropped_last, 1);
  v1::JobOptions instruct = Prefill();
  instruct.set_template_("kimi-k2-instruct");
  instruct.set_keep_reasoning("all");
  EXPECT_EQ(Texts(Chat(kTwoAnswers), instruct).at(0).counts.dropped_last, 1)
      << "this template has no thoughts";
}

TEST_F(SampleTextTest, ToolIdsThatTheModelWouldNotWriteAreCounted) {
  const auto odd = [&](std::string_view first, std::string_view second) {
    const auto call = [](std::string_view id) {
      return fmt::format(R"({{"id":"{}","function":{{"name":"f","arguments":"{{}}"}}}})", id);
    };
    const TextCounts counts =
        Texts(Chat(fmt::format(
                  R"([{{"role":"user","content":"q"}},{{"role":"assistant","tool_calls":[{}]}},
        {{"role":"tool"}},{{"role":"assistant","tool_calls":[{}]}}])",
                  call(first), call(second))),
              Prefill())
            .at(0)
            .counts;
    EXPECT_EQ(counts.tool_calls, 2);
    return counts.odd_tool_ids;
  };
  EXPECT_EQ(odd("functions.f:0", "functions.f:1"), 0);
  EXPECT_EQ(odd("functions.f:0", "functions.f:0"), 1) << "N counts through the chat";
  EXPECT_EQ(odd("call_8a7", "functions.g:1"), 2);
}

TEST_F(SampleTextTest, WhatAssistantsSpellIsTextParsedOrRefused) {
  const std::string spelled = "x<|im_end|>[EOS]";
  const auto chat = [&](const std::string& user, const std::string& assistant) {
    return Chat(DumpJson(Json::array(
        {{{"role", "user"}, {"content", user}}, {{"role", "assistant"}, {"content", assistant}}})));
  };
  const auto specials = [&](const SampleText& text) {
    return std::count_if(text.ids.begin(), text.ids.end(),
                         [&](int32_t id) { return tokenizer_.IsSpecial(id); });
  };
  v1::JobOptions options = Prefill();
  const SampleText plain = Texts(chat("q", "x"), options).at(0);
  const SampleText text = Texts(chat("q", spelled), options).at(0);
  EXPECT_EQ(specials(text), specials(plain));
  EXPECT_EQ(text.counts.spelled_specials, 2);
  options.set_assistant_specials("parsed");
  const SampleText parsed = Texts(chat("q", spelled), options).at(0);
  EXPECT_EQ(specials(parsed), specials(plain) + 2);
  EXPECT_EQ(TextOf(parsed), TextOf(text)) << "the same text in other tokens";
  EXPECT_EQ(specials(Texts(chat(spelled, "x"), options).at(0)), specials(plain))
      << "of a user it is never structure";
  options.set_assistant_specials("refused");
  EXPECT_THAT(Texts(chat("q", spelled), options).at(0).refusal->message, HasSubstr("<|im_end|>"));
  EXPECT_FALSE(Texts(chat(spelled, "x"), options).at(0).refusal);
}

TEST_F(SampleTextTest, RawPromptsAreParsedOnlyByChoice) {
  v1::SampleInput sample;
  sample.set_prompt("<|im_user|>user<|im_middle|>hi");
  v1::JobOptions options;
  const SampleText text = Texts(sample, options).at(0);
  for (const int32_t id : text.ids) EXPECT_FALSE(tokenizer_.IsSpecial(id));
  options.set_parse_special(true);
  const SampleText parsed = Texts(sample, options).at(0);
  EXPECT_EQ(parsed.ids[0], tokenizer_.SpecialId("<|im_user|>"));
  EXPECT_EQ(TextOf(parsed), sample.prompt());
  // A chat is not concerned.
  const auto chat = Chat(R"([{"role":"user","content":"<|im_user|>"}])");
  EXPECT_EQ(Texts(chat, options).at(0).ids, Texts(chat, {}).at(0).ids);
}

TEST_F(SampleTextTest, ShowRendersWhatAJobRefuses) {
  const auto image = Chat(R"([{"role":"user","content":[{"type":"image_url","image_url":{}}]}])");
  EXPECT_TRUE(Texts(image, {}).at(0).refusal);
  EXPECT_THAT(Texts(image, {}, TextPurpose::kShow).at(0).text, HasSubstr("<|media_pad|>"));
  v1::JobOptions generate;
  generate.set_mode(v1::JOB_MODE_GENERATE);
  EXPECT_FALSE(Texts(Chat(kTwoAnswers), generate, TextPurpose::kShow).at(0).refusal);
}

TEST_F(SampleTextTest, OptionsThatCannotBeNameFieldAndRemedy) {
  const auto refused = [&](v1::JobOptions options, bool generate, std::string_view message) {
    EXPECT_THAT(PlanText(options, generate, TemplateKind::kKimiK25),
                StatusIs(absl::StatusCode::kInvalidArgument, std::string(message)));
  };
  refused(Prefill("each"), true, "options.turns: each");
  refused(Prefill("regenerate"), false, "options.turns: regenerate");
  refused(Prefill("some"), false, "turns \"some\" is unknown; it is one of last, each, regenerate");
  v1::JobOptions options;
  options.set_supervise("all");
  refused(options, true, "options.supervise: all is for mode prefill");
  options.set_supervise("most");
  refused(options, false, "supervise \"most\" is unknown");
  options.clear_supervise();
  options.set_assistant_specials("kept");
  refused(options, false, "text, parsed, refused");
}

TEST_F(SampleTextTest, DefaultsOfModeFollowTurns) {
  const auto finished = Chat(kTwoAnswers), open = Chat(R"([{"role":"user","content":"q"}])");
  v1::JobOptions options;
  EXPECT_FALSE(DefaultsToGenerate(finished, options));
  EXPECT_TRUE(DefaultsToGenerate(open, options));
  EXPECT_TRUE(MayGenerate(options));
  options.set_turns("each");
  EXPECT_FALSE(DefaultsToGenerate(open, options));
  EXPECT_FALSE(MayGenerate(options));
  options.set_turns("regenerate");
  EXPECT_TRUE(DefaultsToGenerate(finished, options));
}

TEST_F(SampleTextTest, RenderedSamplesOfAChatAreNumbered) {
  const auto rendered = RenderSample(Chat(kTwoAnswers), Prefill("each"), model());
  ASSERT_EQ(rendered.size(), 3u);
  EXPECT_EQ(rendered[0].id(), "c/1");
  for (int t = 0; t < rendered[0].input_ids_size(); ++t) {
    EXPECT_EQ(rendered[0].special()[static_cast<size_t>(t)] == 1,
              tokenizer_.IsSpecial(rendered[0].input_ids(t)));
  }
  EXPECT_EQ(rendered[2].id(), "c/3");
  EXPECT_EQ(rendered[2].text(),
            tokenizer_.Decode({rendered[2].input_ids().data(),
                               static_cast<size_t>(rendered[2].input_ids_size())}));
  v1::SampleInput prompt;
  prompt.set_prompt("p");
  v1::JobOptions each;
  each.set_turns("each");
  EXPECT_THAT(RenderSample(prompt, each, model()).at(0).error(), HasSubstr("options.turns"));
}

TEST_F(SampleTextTest, DigestIsOfTheContentAlone) {
  v1::SampleInput a = Chat(kTwoAnswers), b = a;
  b.set_id("other");
  b.set_source("s");
  b.set_split("eval");
  b.set_source_line(9);
  b.set_meta_json("{}");
  EXPECT_EQ(ContentDigest(a), ContentDigest(b));
  b.set_thinking(false);
  EXPECT_NE(ContentDigest(a), ContentDigest(b));
}

}  // namespace
}  // namespace statetap
