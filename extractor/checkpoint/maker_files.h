// The small files beside the weights of a made checkpoint.
#pragma once

#include <string>

#include "extractor/base/json.h"
#include "extractor/checkpoint/maker.h"

namespace statetap {

// config.json. INVALID_ARGUMENT for an unknown preset.
absl::StatusOr<Json> MakeConfig(const MakeOptions& options);

// tiktoken.model: `size` ranks, the 256 bytes first, each later entry a merge of two earlier ones.
std::string MakeVocabulary(int size);

// generation_config.json and tokenizer_config.json; `base` ordinary tokens, special ones behind.
Json MakeGenerationConfig(int base, int max_positions);
Json MakeTokenizerConfig(int base, int max_positions);

// Ids behind the ordinary ones, as the real vocabulary reserves them.
inline constexpr int kSpecialTokens = 256;

}  // namespace statetap
