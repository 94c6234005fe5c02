#include "extractor/shard/token_class.h"

#include <cassert>

namespace statetap {

std::string_view NameOf(TokenClass token_class) {
  switch (token_class) {
    case TokenClass::kFirst: return "first";
    case TokenClass::kSpecial: return "special";
    case TokenClass::kSupervised: return "supervised";
    case TokenClass::kPrompt: return "prompt";
  }
  return "?";
}

std::vector<TokenClass> TokenClassesOf(std::span<const int32_t> ids, std::span<const uint8_t> mask,
                                       int first_special) {
  assert(ids.size() == mask.size());
  std::vector<TokenClass> classes;
  if (first_special < 0) return classes;
  classes.reserve(ids.size());
  for (size_t t = 0; t < ids.size(); ++t) {
    classes.push_back(t == 0                    ? TokenClass::kFirst
                      : ids[t] >= first_special ? TokenClass::kSpecial
                      : mask[t] == 1            ? TokenClass::kSupervised
                                                : TokenClass::kPrompt);
  }
  return classes;
}

}  // namespace statetap
