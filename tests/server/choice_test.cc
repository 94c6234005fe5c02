// From an answer's tokens to what an OpenAI client is told: stop strings, thought and tool calls.
#include "server/web/choice.h"

#include "tests/support/job_harness.h"

namespace statetap {
namespace {

using testing::FakeModel;

// An answer told twice: whole, and in the pieces of a stream.
struct Told {
  Json whole;
  std::vector<Json> pieces;
};

class ChoiceTest : public ::testing::Test {
 protected:
  // Of an answer whose special tokens are those that `written` spells.
  Told Tell(const std::string& written, const std::string& prompt = "hi",
            FinishReason reason = FinishReason::kStop) {
    Told told;
    for (const bool whole : {true, false}) {
      SampleTask task;
      task.input_ids = *model_.tokenizer->EncodeWithSpecials(prompt);
      auto answer = std::make_shared<Answer>(task, [] {});
      const auto ids = model_.tokenizer->EncodeWithSpecials(written);
      EXPECT_OK(ids);
      for (const int32_t id : *ids) answer->Add({id, {}});
      answer->End(absl::OkStatus(), reason);
      Choice choice(request_, AnswerReader(answer, model_), model_);
      bool ended = false;
      while (!ended) {
        ended = choice.Next(std::chrono::milliseconds(0)) == AnswerReader::Event::kEnd;
        if (!whole && (ended || choice.has_news())) told.pieces.push_back(choice.Piece(0, ended));
      }
      EXPECT_OK(choice.status());
      if (whole) told.whole = choice.Whole(0);
    }
    return told;
  }
  // The same field of all pieces together.
  static std::string Joined(const Told& told, const std::string& field) {
    std::string all;
    for (const Json& piece : told.pieces) {
      const Json& from = piece.contains("delta") ? piece["delta"] : piece;
      if (from.contains(field)) all += from[field].get<std::string>();
    }
    return all;
  }
  const ServedModel model_ = FakeModel();
  ApiRequest request_{.chat = true};
};

TEST_F(ChoiceTest, ToolCallsAreTakenApart) {
  const Told told = Tell(
      "thought</think>Let me "
      "look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
      "<|tool_call_argument_begin|>{\"q\": \"Paris\"}<|tool_call_end|>\n<|tool_call_begin|>"
      "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
      "<|im_end|>",
      "<think>");
  const Json calls =
      Json::array({{{"id", "functions.look_up:0"},
                    {"type", "function"},
                    {"function", {{"name", "look_up"}, {"arguments", "{\"q\": \"Paris\"}"}}}},
                   {{"id", "functions.now:1"},
                    {"type", "function"},
                    {"function", {{"name", "now"}, {"arguments", "{}"}}}}});
  const Json& message = told.whole["message"];
  EXPECT_EQ(message["tool_calls"], calls);
  EXPECT_EQ(message["content"], "Let me look.");
  EXPECT_EQ(message["reasoning_content"], "thought");
  EXPECT_EQ(told.whole["finish_reason"], "tool_calls");
  EXPECT_EQ(Joined(told, "content"), "Let me look.");
  EXPECT_EQ(Joined(told, "reasoning_content"), "thought");
  Json streamed = Json::array();
  for (const Json& piece : told.pieces) {
    if (!piece["delta"].contains("tool_calls")) continue;
    for (Json call : piece["delta"]["tool_calls"]) {
      EXPECT_EQ(call["index"], streamed.size());
      call.erase("index");
      streamed.push_back(call);
    }
  }
  EXPECT_EQ(streamed, calls);
  EXPECT_EQ(told.pieces.back()["finish_reason"], "tool_calls");
}

TEST_F(ChoiceTest, ASectionWithoutItsEndIsWholeAndOneThatIsCutStaysText) {
  const std::string call =
      "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{";
  const Told open = Tell(call + "}<|tool_call_end|><|im_end|>");
  EXPECT_EQ(open.whole["message"]["tool_calls"].size(), 1u);
  EXPECT_TRUE(open.whole["message"]["content"].is_null());
  const Told cut = Tell(call, "hi", FinishReason::kLength);
  EXPECT_FALSE(cut.whole["message"].contains("tool_calls"));
  EXPECT_EQ(cut.whole["message"]["content"], call);
  EXPECT_EQ(Joined(cut, "content"), call);
  EXPECT_EQ(cut.whole["finish_reason"], "length");
  for (const std::string broken :
       {"<|tool_calls_section_begin|>no call<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>a<|tool_call_begin|>"}) {
    const Told told = Tell("So: " + broken + "<|im_end|>");
    EXPECT_EQ(told.whole["message"]["content"], "So: " + broken);
    EXPECT_EQ(told.whole["finish_reason"], "stop");
  }
}

TEST_F(ChoiceTest, OfAThoughtOrACompletionToolTokensStayText) {
  const std::string section = "<|tool_calls_section_begin|><|tool_calls_section_end|>";
  const Told thought = Tell("I could " + section, "<think>", FinishReason::kLength);
  EXPECT_EQ(thought.whole["message"]["reasoning_content"], "I could " + section);
  EXPECT_TRUE(thought.whole["message"]["content"].is_null());
  request_.chat = false;
  const Told raw = Tell("a</think>b" + section);
  EXPECT_EQ(raw.whole["text"], "a</think>b" + section);
  EXPECT_EQ(Joined(raw, "text"), "a</think>b" + section);
}

TEST_F(ChoiceTest, StopStringsEndTheContentAndNotTheThought) {
  request_.stop = {"END", "nothing like it"};
  const Told told =
      Tell("not the END of it</think>one E two EN three ENDfour<|im_end|>", "<think>");
  EXPECT_EQ(told.whole["message"]["reasoning_content"], "not the END of it");
  EXPECT_EQ(told.whole["message"]["content"], "one E two EN three ");
  EXPECT_EQ(Joined(told, "content"), "one E two EN three ");
  EXPECT_EQ(told.whole["finish_reason"], "stop");
}

// Against the plain search, whatever the pieces.
TEST(StopFilterTest, GivesWhatStandsBeforeTheFirstStop) {
  const std::vector<std::string> stops = {"aab", "ba", "é"};
  for (int code = 0; code < 3 * 3 * 3 * 3 * 3 * 3; ++code) {
    StopFilter filter(stops);
    std::string text, given;
    for (int i = 0, rest = code; i < 6; ++i, rest /= 3) {
      const std::string piece = rest % 3 == 0 ? "a" : rest % 3 == 1 ? "b" : "c";
      text += piece;
      if (!filter.hit()) given += filter.Add(piece);
    }
    size_t first = std::string::npos;
    for (const std::string& stop : stops) first = std::min(first, text.find(stop));
    EXPECT_EQ(filter.hit(), first != std::string::npos) << text;
    EXPECT_EQ(given + filter.Rest(), text.substr(0, first)) << text;
  }
}

}  // namespace
}  // namespace statetap
