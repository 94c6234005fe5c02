// What is supervised, and which thoughts are kept.
#include <map>

#include "extractor/base/json.h"
#include "extractor/text/chat_template.h"
#include "tests/support/status_matchers.h"
#include "tests/text/text_fixtures.h"

namespace statetap {
namespace {

using testing::JsonLines;
using testing::StatusIs;

Json Chat(std::string_view text) { return ParseJson(text).value(); }

std::string Render(const Json& messages, const RenderOptions& options) {
  return TextOf(RenderChat(messages, nullptr, options).value());
}

// The supervised segments, joined.
std::string Supervised(const Json& messages, RenderOptions options) {
  if (options.supervision.answers == Supervision::Answers::kNone)
    options.supervision.answers = Supervision::Answers::kLast;
  options.generation_prompt = false;
  std::string text;
  const std::vector<Segment> segments = RenderChat(messages, nullptr, options).value();
  for (const Segment& segment : segments) {
    if (segment.supervised) text += segment.text;
  }
  return text;
}

const Supervision kLastAnswer = {.answers = Supervision::Answers::kLast};
const Json kFinished = Chat(R"([
    {"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0", "reasoning_content": "r0"},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "", "reasoning_content": "r1", "tool_calls": [
      {"id": "functions.f:0", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "functions.f:0", "content": "t"},
    {"role": "assistant", "content": "a1", "reasoning_content": "r2"}])");

std::vector<std::string> ThoughtsOf(const RenderOptions& options) {
  std::vector<std::string> thoughts;
  const std::string text = Render(kFinished, options);
  for (size_t at = 0; (at = text.find("<think>", at)) != std::string::npos;) {
    at += 7;
    const size_t end = text.find("</think>", at);
    if (end != std::string::npos) thoughts.push_back(text.substr(at, end - at));
  }
  return thoughts;
}

TEST(KeepReasoningTest, EachChoiceKeepsItsThoughts) {
  const auto thoughts = [](KeepReasoning keep, bool thinking = true) {
    return ThoughtsOf({.thinking = thinking, .keep_reasoning = keep, .generation_prompt = false});
  };
  using Thoughts = std::vector<std::string>;
  EXPECT_EQ(thoughts(KeepReasoning::kNone), (Thoughts{"", "", ""}));
  EXPECT_EQ(thoughts(KeepReasoning::kToolLoop), (Thoughts{"", "", ""}));
  EXPECT_EQ(thoughts(KeepReasoning::kLast), (Thoughts{"", "r1", "r2"}));
  EXPECT_EQ(thoughts(KeepReasoning::kAll), (Thoughts{"r0", "r1", "r2"}));
  EXPECT_EQ(thoughts(KeepReasoning::kLast, /*thinking=*/false), (Thoughts{"", "", ""}));
  EXPECT_EQ(thoughts(KeepReasoning::kAll, /*thinking=*/false), (Thoughts{"r0", "r1", "r2"}));
}

TEST(KeepReasoningTest, LastGivesTheContextInWhichTheAnswerWasWritten) {
  Json before = kFinished;
  before.erase(before.size() - 1);
  const std::string prompt = Render(before, {});
  const std::string finished =
      Render(kFinished, {.keep_reasoning = KeepReasoning::kLast, .generation_prompt = false});
  EXPECT_EQ(finished, prompt + "r2</think>a1<|im_end|>");
}

TEST(KeepReasoningTest, ThoughtsInsideContentCountWhereAThoughtIsKept) {
  const auto last = [](const std::string& content) {
    Json chat = Chat(R"([{"role": "user", "content": "q"}, {"role": "assistant"}])");
    chat[1]["content"] = content;
    return Supervised(chat, {.keep_reasoning = KeepReasoning::kLast});
  };
  EXPECT_EQ(last("<think>t</think>a"), "t</think>a<|im_end|>");
  EXPECT_EQ(last("\n <think>t</think>\n\na"), "t</think>\n\na<|im_end|>");
  EXPECT_EQ(last("t</think>a"), "t</think>a<|im_end|>");
  EXPECT_EQ(last("a"), "</think>a<|im_end|>");
  // A tool section inside a thought belongs to it; the thought has to end.
  const std::string section = "<|tool_calls_section_begin|>x<|tool_calls_section_end|>";
  EXPECT_EQ(last("<think>t" + section + "u</think>a"), "t" + section + "u</think>a<|im_end|>");
  const Json inside = Chat(R"([{"role": "user", "content": "q"},
      {"role": "assistant", "content": "<think>t<|tool_calls_section_begin|>x"}])");
  EXPECT_THAT(RenderChat(inside, nullptr, {.keep_reasoning = KeepReasoning::kLast}),
              StatusIs(absl::StatusCode::kInvalidArgument, "calls a tool inside the thought"));
  const Json cut =
      Chat(R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>t"}])");
  EXPECT_THAT(RenderChat(cut, nullptr, {.keep_reasoning = KeepReasoning::kLast}),
              StatusIs(absl::StatusCode::kInvalidArgument, "messages[1]: content opens <think>"));
  EXPECT_EQ(Render(cut, {.generation_prompt = false}),
            "<|im_user|>user<|im_middle|>q<|im_end|><|im_assistant|>assistant<|im_middle|>"
            "<think></think><think>t<|im_end|>");
}

TEST(LossMaskTest, SupervisesWhatFollowsTheGenerationPrompt) {
  const Json chat = Chat(R"([{"role": "user", "content": "q"},
      {"role": "assistant", "content": "a", "reasoning_content": "r"}, {"role": "user", "content": "z"}])");
  using K = TemplateKind;
  using R = KeepReasoning;
  EXPECT_EQ(Supervised(chat, {.keep_reasoning = R::kLast}), "r</think>a<|im_end|>");
  // The thought was dropped: the model never wrote this empty block.
  EXPECT_EQ(Supervised(chat, {.keep_reasoning = R::kToolLoop}), "a<|im_end|>");
  EXPECT_EQ(Supervised(chat, {.thinking = false}), "a<|im_end|>");
  EXPECT_EQ(Supervised(chat, {.thinking = false, .keep_reasoning = R::kAll}),
            "r</think>a<|im_end|>");
  EXPECT_EQ(Supervised(chat, {.kind = K::kKimiK2Thinking, .keep_reasoning = R::kLast}),
            "<think>r</think>a<|im_end|>");
  EXPECT_EQ(Supervised(chat, {.kind = K::kKimiK2Instruct}), "a<|im_end|>");
}

TEST(LossMaskTest, ToolCallsOfTheLastTurnAreSupervised) {
  Json chat = kFinished;
  chat.erase(chat.size() - 1);
  chat.erase(chat.size() - 1);
  EXPECT_EQ(Supervised(chat, {}),
            "r1</think><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>");
}

TEST(LossMaskTest, NothingIsSupervisedUnlessAskedFor) {
  const std::vector<Segment> segments = RenderChat(kFinished, nullptr, {}).value();
  for (const Segment& segment : segments) EXPECT_FALSE(segment.supervised) << segment.text;
  const Json no_answer = Chat(R"([{"role": "user", "content": "q"}])");
  EXPECT_EQ(Supervised(no_answer, {}), "");
}

Tokenizer TinyKimi() {
  return Tokenizer::Open(std::filesystem::path(STATETAP_SOURCE_DIR) / "models/tiny-kimi").value();
}

TEST(TinyKimiTest, PromptsAreTheOnesTheReferenceContinued) {
  const Tokenizer tokenizer = TinyKimi();
  EXPECT_EQ(DetectTemplate("kimi_k25", tokenizer), TemplateKind::kKimiK25);
  std::map<std::string, std::vector<int32_t>> reference;
  for (const Json& line : JsonLines("tiny-kimi/greedy.jsonl"))
    reference[line["id"]] = line["prompt_ids"].get<std::vector<int32_t>>();
  const std::vector<Json> prompts = JsonLines("tiny-kimi/prompts_64.jsonl");
  ASSERT_EQ(prompts.size(), 64u);
  for (const Json& line : prompts) {
    ASSERT_OK_AND_ASSIGN(const auto segments, RenderChat(line["messages"], nullptr, {}));
    ASSERT_OK_AND_ASSIGN(const EncodedText encoded, EncodeSegments(tokenizer, segments));
    EXPECT_EQ(encoded.ids, reference[line["id"]]) << line["id"];
  }
}

TEST(TinyKimiTest, TheMaskOfAFinishedChatStartsBehindItsPrompt) {
  const Tokenizer tokenizer = TinyKimi();
  for (const Json& line : JsonLines("tiny-kimi/conversations_64.jsonl")) {
    Json prompt = line["messages"];
    prompt.erase(prompt.size() - 1);
    ASSERT_OK_AND_ASSIGN(const auto prompt_segments, RenderChat(prompt, nullptr, {}));
    ASSERT_OK_AND_ASSIGN(const EncodedText before, EncodeSegments(tokenizer, prompt_segments));
    ASSERT_OK_AND_ASSIGN(const auto segments, RenderChat(line["messages"], nullptr,
                                                         {.keep_reasoning = KeepReasoning::kLast,
                                                          .generation_prompt = false,
                                                          .supervision = kLastAnswer}));
    ASSERT_OK_AND_ASSIGN(const EncodedText all, EncodeSegments(tokenizer, segments));
    std::vector<uint8_t> mask(before.ids.size(), 0);
    mask.resize(all.ids.size(), 1);
    ASSERT_EQ(all.loss_mask, mask);
    ASSERT_TRUE(std::equal(before.ids.begin(), before.ids.end(), all.ids.begin()));
    ASSERT_EQ(all.ids.back(), tokenizer.SpecialId("<|im_end|>"));
  }
}

}  // namespace
}  // namespace statetap
