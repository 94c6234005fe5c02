// The cases are data that the Python package runs too: tests/data/sample_filter_cases.json.
#include "extractor/shard/sample_filter.h"

#include <fstream>
#include <iterator>
#include <string>

#include "extractor/base/json.h"
#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using testing::StatusIs;

Json ReadCases() {
  std::ifstream file(STATETAP_SOURCE_DIR "/tests/data/sample_filter_cases.json");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const absl::StatusOr<Json> cases = ParseJson(text);
  EXPECT_OK(cases);
  return cases.value_or(Json::object());
}

// Refers to the texts of `from`.
SampleFacts FactsFrom(const Json& from) {
  const auto text = [&](const char* name) -> std::string_view {
    return from.at(name).get_ref<const std::string&>();
  };
  SampleFacts facts{.id = text("id"),
                    .source = text("source"),
                    .split = text("split"),
                    .finish = text("finish"),
                    .meta_json = text("meta_json"),
                    .index = from.at("index"),
                    .prompt_tokens = from.at("prompt_tokens"),
                    .tokens = from.at("tokens"),
                    .supervised_tokens = from.at("supervised_tokens"),
                    .generated_tokens = from.at("generated_tokens"),
                    .truncated = from.at("truncated")};
  if (const Json* logprob = FindMember(from, "logprob")) facts.logprob = logprob->get<double>();
  return facts;
}

TEST(SampleFilterTest, HoldsOrRefusesAsTheCasesSay) {
  const Json data = ReadCases();
  int held = 0, refused = 0;
  for (const Json& test : data.at("cases")) {
    const std::string where = test.at("where");
    SCOPED_TRACE(where);
    const absl::StatusOr<SampleFilter> filter = SampleFilter::Parse(where);
    if (const Json* parts = FindMember(test, "error")) {
      for (const Json& part : *parts) {
        EXPECT_THAT(filter, StatusIs(absl::StatusCode::kInvalidArgument, part.get<std::string>()));
      }
      ++refused;
      continue;
    }
    ASSERT_OK(filter);
    const SampleFacts facts = FactsFrom(data.at("facts").at(test.at("facts").get<std::string>()));
    EXPECT_EQ(filter->Holds(facts), test.at("holds").get<bool>());
    ++held;
  }
  EXPECT_GT(held, 30);
  EXPECT_GT(refused, 20);
}

TEST(SampleFilterTest, AnEmptyTextIsKnownToHoldForAll) {
  ASSERT_OK_AND_ASSIGN(const SampleFilter filter, SampleFilter::Parse(" "));
  EXPECT_TRUE(filter.holds_for_all());
}

}  // namespace
}  // namespace statetap
