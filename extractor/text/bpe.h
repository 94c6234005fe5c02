// Byte-pair merging of one piece of text, as tiktoken does it: the adjacent pair whose joined bytes
// have the lowest rank is merged first, the leftmost of equals, until no pair is in the vocabulary.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "extractor/text/vocabulary.h"

namespace statetap {

// Holds the buffers of a merge, to be reused from piece to piece. One thread at a time; make one an
// encoding call. `vocabulary` must outlive it.
class PairMerger {
 public:
  explicit PairMerger(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}
  // Appends the ids of `piece`. Time is linear for short pieces and n log n for long ones, whatever
  // the bytes.
  void Encode(std::string_view piece, std::vector<int32_t>* ids);

 private:
  struct Part {
    uint32_t begin;     // of its bytes in the piece
    uint32_t previous;  // index of the part in front (long pieces)
    uint32_t next;      // index of the part behind (long pieces)
    int32_t rank;       // of this part joined with the next one
  };

  void MergeShort(std::string_view piece, std::vector<int32_t>* ids);
  void MergeLong(std::string_view piece, std::vector<int32_t>* ids);
  int32_t PairRank(std::string_view piece, size_t begin, size_t end) const;
  void Offer(size_t part);
  void JoinWithNext(std::string_view piece, size_t part);
  void UpdateLong(std::string_view piece, size_t part);

  const Vocabulary& vocabulary_;
  std::vector<Part> parts_;
  std::vector<uint64_t> heap_;  // rank above index of the part, least on top; stale ones stay
};

}  // namespace statetap
