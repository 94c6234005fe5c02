// A tokenizer_config.json: refused, or each of the 256 special tokens has one name and one id.
#include "extractor/base/json.h"
#include "extractor/text/special_tokens.h"
#include "tests/fuzz/fuzz.h"

using namespace statetap;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int32_t kFirst = 2048;
  const absl::StatusOr<Json> config =
      ParseJson(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!config.ok()) return 0;
  const absl::StatusOr<SpecialTokens> tokens = SpecialTokens::Parse(*config, kFirst);
  if (!tokens.ok()) return 0;
  for (int32_t id = kFirst; id < kFirst + SpecialTokens::kCount; ++id) {
    const std::string& name = tokens->NameOf(id);
    fuzz::Require(tokens->Contains(id) && tokens->IdOf(name) == id);
    const SpecialTokens::Match match = tokens->Find(name, 0);
    fuzz::Require(match.begin < match.end && match.end <= name.size());
  }
  return 0;
}
