// What a token is within its sample: what statistics by class tell apart.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace statetap {

// A token counts in the first of these that it is. The order is the shard format's.
enum class TokenClass : uint8_t {
  kFirst,       // of its sample: where massive activations sit
  kSpecial,     // a special token's id
  kSupervised,  // its loss mask is 1
  kPrompt,      // the rest
};
inline constexpr int kTokenClasses = 4;
std::string_view NameOf(TokenClass token_class);  // first, special, supervised, prompt

// Of one sample's tokens. Empty where `first_special`, the least id of a special token, is not
// known (-1). REQUIRES: a mask for each id.
std::vector<TokenClass> TokenClassesOf(std::span<const int32_t> ids, std::span<const uint8_t> mask,
                                       int first_special);

}  // namespace statetap
