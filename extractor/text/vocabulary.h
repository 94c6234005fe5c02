// The byte strings of a tiktoken.model and their ranks, which are the token ids.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/status.h"

namespace statetap {

// Immutable; safe from many threads.
class Vocabulary {
 public:
  static constexpr int32_t kNoRank = -1;

  // One entry a line: base64 of the bytes, a space, the rank. Ranks count from 0 upwards, no byte
  // string occurs twice, every single byte occurs. INVALID_ARGUMENT names the line.
  static absl::StatusOr<Vocabulary> Parse(std::string_view content);

  int size() const { return static_cast<int>(offsets_.size()) - 1; }
  std::string_view BytesOf(int32_t rank) const {
    return std::string_view(bytes_).substr(offsets_[rank], offsets_[rank + 1] - offsets_[rank]);
  }
  // The rank of `bytes`, or kNoRank.
  int32_t RankOf(std::string_view bytes) const;
  // The same for two bytes, which every merge starts from.
  int32_t RankOfTwo(char first, char second) const { return two_bytes_[PairIndex(first, second)]; }

 private:
  // Open addressing, at most half full; `tag` saves most comparisons of bytes.
  struct Slot {
    uint32_t tag = 0;
    int32_t rank = kNoRank;
  };

  Vocabulary() = default;
  absl::Status Add(std::string_view line);
  absl::Status BuildTable();
  absl::Status CheckSingleBytes() const;
  static size_t PairIndex(char first, char second) {
    return size_t{static_cast<uint8_t>(first)} << 8 | static_cast<uint8_t>(second);
  }
  size_t SlotOf(std::string_view bytes, uint64_t hash) const;

  std::string bytes_;  // of all tokens, joined
  std::vector<uint32_t> offsets_{0};
  size_t longest_ = 0;
  std::vector<Slot> slots_;
  std::vector<int32_t> two_bytes_;  // [65536]
};

}  // namespace statetap
