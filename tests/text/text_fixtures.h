// The text fixtures under tests/data, and the tokenizer they were made with.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/text/tokenizer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap::testing {

inline std::filesystem::path DataPath(const std::string& name) {
  return std::filesystem::path(STATETAP_SOURCE_DIR) / "tests/data" / name;
}

// Lines end with "\n" only: texts hold raw U+0085, U+2028 and U+2029.
inline std::vector<Json> JsonLines(const std::string& name) {
  const std::string content = ReadWholeFile(DataPath(name)).value();
  std::vector<Json> lines;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    if (end > begin) lines.push_back(ParseJson(content.substr(begin, end - begin)).value());
    begin = end + 1;
  }
  return lines;
}

inline Tokenizer OpenBpe20k() {
  const TempDir folder;
  std::filesystem::copy_file(DataPath("text/bpe20k.tiktoken.model"), folder / "tiktoken.model");
  std::filesystem::copy_file(DataPath("text/bpe20k.tokenizer_config.json"),
                             folder / "tokenizer_config.json");
  return Tokenizer::Open(folder.path()).value();
}

}  // namespace statetap::testing
