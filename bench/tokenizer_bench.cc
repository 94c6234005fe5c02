// Encodes a text as one string on one thread and prints the seconds of processor time it took; what
// scripts/tokenizer_bench.sh holds against tiktoken.
//
//   tokenizer_bench MODEL_FOLDER TEXT_FILE [IDS_FILE]     ids as int32, little endian
#include <cstdio>
#include <ctime>
#include <string>
#include <string_view>

#include "extractor/base/file.h"
#include "extractor/text/tokenizer.h"

namespace statetap::bench {
namespace {

absl::Status Main(const std::string& model, const std::string& text_file, const char* ids_file) {
  STATETAP_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Open(model));
  STATETAP_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(text_file));
  size_t warm = text.size() / 8;
  while (warm > 0 && (text[warm] & 0xC0) == 0x80) --warm;  // not inside a character
  STATETAP_RETURN_IF_ERROR(tokenizer.Encode(text.substr(0, warm)).status());
  const std::clock_t begun = std::clock();
  STATETAP_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.Encode(text));
  fmt::print("{:.6f}\n", static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC);
  if (ids_file == nullptr) return absl::OkStatus();
  return WriteFileAtomically(
      ids_file, std::string_view(reinterpret_cast<const char*>(ids.data()), ids.size() * 4));
}

}  // namespace
}  // namespace statetap::bench

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    fmt::print(stderr, "usage: tokenizer_bench MODEL_FOLDER TEXT_FILE [IDS_FILE]\n");
    return 2;
  }
  const absl::Status status =
      statetap::bench::Main(argv[1], argv[2], argc == 4 ? argv[3] : nullptr);
  if (status.ok()) return 0;
  fmt::print(stderr, "tokenizer_bench: {}\n", statetap::MessageOf(status));
  return 1;
}
