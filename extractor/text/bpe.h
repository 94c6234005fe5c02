// Byte-pair merging of one piece of text, as tiktoken does it: the adjacent pair whose joined bytes
// have the lowest rank is merged first, the leftmost of equals, until no pair is in the vocabulary.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "extractor/text/vocabulary.h"

namespace statetap {

// Holds the buffers of a merge, to be reused from piece to piece. One thread at a time; make one an
// encoding call. `vocabulary` must outlive it.
class PairMerger {
 public:
  explicit PairMerger(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}
  // Appends the ids of `piece`. Time grows as n for the pieces of prose and for long runs of one
  // character, and as n log n at worst.
  void Encode(std::string_view piece, std::vector<int32_t>* ids);

 private:
  // A part of a long piece, in a list by index; a part's index is where its bytes begin.
  struct Part {
    uint32_t previous, next;
    uint32_t rank;  // of this part joined with the next one
  };
  // The parts that may be joined at one rank, from the left; some may have changed meanwhile.
  struct Bucket {
    std::vector<uint32_t> parts;
    size_t done = 0;
    bool sorted = true;
  };

  void MergeShort(std::string_view piece, std::vector<int32_t>* ids) const;
  void MergeLong(std::string_view piece, std::vector<int32_t>* ids);
  void BeginLong(std::string_view piece);
  void JoinBucket(std::string_view piece, uint32_t rank);
  void Join(std::string_view piece, uint32_t part);
  void UpdateRank(std::string_view piece, uint32_t part);
  void Offer(uint32_t part);
  uint32_t Rank(std::string_view piece, size_t begin, size_t end) const {
    return static_cast<uint32_t>(vocabulary_.RankOf(piece.substr(begin, end - begin)));
  }

  const Vocabulary& vocabulary_;
  std::vector<Part> parts_;
  std::unordered_map<uint32_t, Bucket> buckets_;  // by rank
  std::vector<uint32_t> ranks_;                   // of the buckets, a heap with the least on top
};

}  // namespace statetap
