#include "extractor/shard/sample_filter.h"

#include <string>

#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using testing::StatusIs;

SampleFacts Facts() {
  return {.id = "chat-7",
          .source = "toolbench",
          .split = "train",
          .finish = "stop",
          .meta_json = R"({"lang": "de", "score": 2.5, "ok": true, "none": null, "a b": "x"})",
          .index = 7,
          .prompt_tokens = 10,
          .tokens = 30,
          .supervised_tokens = 20,
          .generated_tokens = 20,
          .logprob = -0.25,
          .truncated = false};
}

bool Holds(std::string_view text, const SampleFacts& facts = Facts()) {
  const auto filter = SampleFilter::Parse(text);
  EXPECT_OK(filter);
  return filter.ok() && filter->Holds(facts);
}

TEST(SampleFilterTest, ComparesEveryFieldByItsKind) {
  EXPECT_TRUE(Holds(R"(source == "toolbench" and finish == 'stop')"));
  EXPECT_FALSE(Holds(R"(source != "toolbench")"));
  EXPECT_TRUE(Holds(R"(id >= "chat-6" and id < "chat-8" and split == "train")"));
  EXPECT_TRUE(Holds("tokens > 29 and tokens >= 30 and tokens <= 30 and not tokens < 30"));
  EXPECT_TRUE(Holds("prompt_tokens == 10 and supervised_tokens == 20 and generated_tokens == 2e1"));
  EXPECT_TRUE(Holds("index == 7 and logprob < -0.2 and logprob > -.3"));
  EXPECT_TRUE(Holds("not truncated and truncated == false and truncated != true"));
  EXPECT_TRUE(Holds(R"(meta.lang == "de" and meta.score > 2 and meta.ok == true)"));
  EXPECT_TRUE(Holds(R"(meta."a b" == "x")"));
}

TEST(SampleFilterTest, ListsHoldForAnyOfTheirValues) {
  EXPECT_TRUE(Holds(R"(source in ("a", "toolbench"))"));
  EXPECT_FALSE(Holds(R"(source not in ("a", "toolbench"))"));
  EXPECT_TRUE(Holds(R"(meta.lang in ("en", 3, "de"))"));
  EXPECT_TRUE(Holds("tokens in (29, 30)"));
}

TEST(SampleFilterTest, OrBindsLessThanAndAndAndLessThanNot) {
  EXPECT_TRUE(Holds("tokens == 30 or tokens == 1 and tokens == 2"));
  EXPECT_FALSE(Holds("(tokens == 30 or tokens == 1) and tokens == 2"));
  EXPECT_FALSE(Holds("not tokens == 1 and tokens == 2"));
  EXPECT_TRUE(Holds("not (tokens == 1 and tokens == 2)"));
}

TEST(SampleFilterTest, AComparisonWithWhatIsMissingOrOfAnotherKindIsFalseAndItsNotTrue) {
  EXPECT_FALSE(Holds("meta.absent == 1"));
  EXPECT_FALSE(Holds("meta.absent != 1"));
  EXPECT_TRUE(Holds("not meta.absent == 1"));
  EXPECT_FALSE(Holds("meta.none == 1 or meta.lang > 3 or meta.score == \"2.5\""));
  SampleFacts without = Facts();
  without.logprob.reset();
  without.meta_json = "";
  EXPECT_FALSE(Holds("logprob < 0 or logprob >= 0 or meta.lang != \"de\"", without));
}

TEST(SampleFilterTest, AnEmptyTextHoldsForAll) {
  EXPECT_TRUE(Holds("  "));
  ASSERT_OK_AND_ASSIGN(const SampleFilter filter, SampleFilter::Parse(""));
  EXPECT_TRUE(filter.holds_for_all());
}

TEST(SampleFilterTest, StringsTakeBothQuotesAndEscapes) {
  SampleFacts facts = Facts();
  facts.source = "a\"b'c\\d\n";
  EXPECT_TRUE(Holds(R"(source == "a\"b'c\\d\n")", facts));
  EXPECT_TRUE(Holds(R"(source == 'a"b\'c\\d\n')", facts));
}

TEST(SampleFilterTest, RefusesWithThePlaceAndWhatIsWanted) {
  const auto refused = [](std::string_view text, std::string_view what) {
    EXPECT_THAT(SampleFilter::Parse(text), StatusIs(absl::StatusCode::kInvalidArgument, what))
        << text;
  };
  refused("sorce == \"x\"", "at character 1, before \"sorce == \"x\"\": a field (id, source");
  refused("source = \"x\"", "at character 8");
  refused("source == toolbench", "at character 11");
  refused("source == 3", "text in quotes to compare source with");
  refused("tokens > \"3\"", "a number to compare tokens with");
  refused("tokens > 3 &&  source == 'x'", "at character 12");
  refused("tokens > 3x", "at character 10");
  refused("tokens > nan", "at character 10");
  refused("(tokens > 3", "closing parenthesis");
  refused("source == \"x", "ends with the quote");
  refused("source == \"\\q\"", "one of");
  refused("source in (\"x\"", "a comma");
  refused("source not \"x\"", "in is wanted");
  refused("meta == 1", "meta.lang");
  refused("meta.ok < true", "== and != only");
  refused("tokens", "a comparison");
  refused("tokens > 3 or", "a field");
  refused(std::string(5000, '(') + "tokens > 3", "fewer levels");
  std::string nots;
  for (int i = 0; i < 5000; ++i) nots += "not ";
  refused(nots + "truncated", "fewer levels");
}

}  // namespace
}  // namespace statetap
