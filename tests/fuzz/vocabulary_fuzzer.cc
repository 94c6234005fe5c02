// A tiktoken.model: refused, or every rank finds its bytes and every byte string its rank.
#include "extractor/text/bpe.h"
#include "extractor/text/vocabulary.h"
#include "tests/fuzz/fuzz.h"

using namespace statetap;

namespace {

// The 256 single bytes, which no random file begins with.
const std::string& SingleBytes() {
  static const std::string lines = [] {
    constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (int byte = 0; byte < 256; ++byte)
      text += std::string{kDigits[byte >> 2], kDigits[(byte & 3) << 4], '=', '=', ' '} +
              std::to_string(byte) + "\n";
    return text;
  }();
  return lines;
}

void Check(std::string_view content) {
  const absl::StatusOr<Vocabulary> vocabulary = Vocabulary::Parse(content);
  if (!vocabulary.ok()) return;
  std::string all;
  for (int32_t rank = 0; rank < vocabulary->size(); ++rank) {
    fuzz::Require(vocabulary->RankOf(vocabulary->BytesOf(rank)) == rank);
    all += vocabulary->BytesOf(rank);
  }
  std::vector<int32_t> ids;
  PairMerger(*vocabulary).Encode(all, &ids);
  std::string merged;
  for (const int32_t id : ids) merged += vocabulary->BytesOf(id);
  fuzz::Require(merged == all);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string content(reinterpret_cast<const char*>(data), size);
  Check(content);
  Check(SingleBytes() + content);
  return 0;
}
