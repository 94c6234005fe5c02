// The 256 special tokens behind the ranks, by name and by id.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "extractor/base/json_fwd.h"
#include "extractor/base/status.h"

namespace statetap {

// Immutable; safe from many threads.
class SpecialTokens {
 public:
  static constexpr int kCount = 256;

  // `config`: a tokenizer_config.json; its added_tokens_decoder maps an id to an object with
  // `content`. An id without a name gets "<|reserved_token_ID|>"; ids beyond the 256 (an early
  // K2-Instruct has two) have no embedding row and are left out. INVALID_ARGUMENT names the field;
  // also where the first name is not that of first_id: then tokens are missing between.
  static absl::StatusOr<SpecialTokens> Parse(const Json& config, int32_t first_id);

  std::optional<int32_t> IdOf(std::string_view name) const;
  const std::string& NameOf(int32_t id) const { return names_[id - first_id_]; }
  bool Contains(int32_t id) const { return id >= first_id_ && id - first_id_ < kCount; }

  struct Match {
    size_t begin, end;  // in the text; begin == end == text.size() where there is none
    int32_t id;
  };
  // The first special token that `text` spells at or behind `from`, the longest of several.
  Match Find(std::string_view text, size_t from) const;

 private:
  struct NameHash {  // of views too
    using is_transparent = void;
    size_t operator()(std::string_view name) const { return std::hash<std::string_view>()(name); }
  };

  absl::Status Name(const std::string& key, const Json& entry);
  absl::Status BuildIndex();

  int32_t first_id_ = 0;
  int32_t lowest_ = std::numeric_limits<int32_t>::max();  // that has a name
  std::vector<std::string> names_;
  std::unordered_map<std::string, int32_t, NameHash, std::equal_to<>> ids_;
  std::vector<size_t> lengths_;  // that occur, longest first
  std::string first_bytes_;      // that occur
};

}  // namespace statetap
