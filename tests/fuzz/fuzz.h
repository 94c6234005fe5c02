// What a fuzzer requires holds in a release build too.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <source_location>
#include <string>

#include "extractor/text/tokenizer.h"

namespace statetap::fuzz {

inline void Require(bool holds, std::source_location at = std::source_location::current()) {
  if (holds) return;
  std::fprintf(stderr, "%s:%u does not hold\n", at.file_name(), static_cast<unsigned>(at.line()));
  std::abort();
}

inline const Tokenizer& TinyKimi() {
  static const Tokenizer tokenizer =
      Tokenizer::Open(std::filesystem::path(STATETAP_SOURCE_DIR) / "models/tiny-kimi").value();
  return tokenizer;
}

}  // namespace statetap::fuzz
