#include "extractor/text/bpe.h"

#include <algorithm>
#include <functional>

namespace statetap {
namespace {

constexpr int32_t kNoMerge = INT32_MAX;
// Up to here looking at every pair for each merge is faster than keeping a heap.
constexpr size_t kShortPiece = 64;

}  // namespace

void PairMerger::Encode(std::string_view piece, std::vector<int32_t>* ids) {
  if (piece.empty()) return;
  if (const int32_t rank = vocabulary_.RankOf(piece); rank != Vocabulary::kNoRank) {
    ids->push_back(rank);
  } else if (piece.size() <= kShortPiece) {
    MergeShort(piece, ids);
  } else {
    MergeLong(piece, ids);
  }
}

int32_t PairMerger::PairRank(std::string_view piece, size_t begin, size_t end) const {
  const int32_t rank = vocabulary_.RankOf(piece.substr(begin, end - begin));
  return rank == Vocabulary::kNoRank ? kNoMerge : rank;
}

void PairMerger::MergeShort(std::string_view piece, std::vector<int32_t>* ids) {
  // One part a byte and one behind the last, so that part i is [begin of i, begin of i + 1).
  parts_.resize(piece.size() + 1);
  for (uint32_t i = 0; i <= piece.size(); ++i)
    parts_[i] = {i, 0, 0, i + 2 <= piece.size() ? PairRank(piece, i, i + 2) : kNoMerge};
  const auto update = [&](size_t i) {
    parts_[i].rank =
        i + 2 < parts_.size() ? PairRank(piece, parts_[i].begin, parts_[i + 2].begin) : kNoMerge;
  };
  for (;;) {
    const auto lowest = std::min_element(
        parts_.begin(), parts_.end(), [](const Part& a, const Part& b) { return a.rank < b.rank; });
    if (lowest->rank == kNoMerge) break;
    const size_t at = lowest - parts_.begin();
    parts_.erase(lowest + 1);
    update(at);
    if (at > 0) update(at - 1);
  }
  for (size_t i = 0; i + 1 < parts_.size(); ++i)
    ids->push_back(PairRank(piece, parts_[i].begin, parts_[i + 1].begin));
}

void PairMerger::Offer(size_t part) {
  heap_.push_back(uint64_t(parts_[part].rank) << 32 | part);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

// Sets the rank of `part` with its next one. The sentinel behind the last part is its own next.
void PairMerger::UpdateLong(std::string_view piece, size_t part) {
  const uint32_t next = parts_[part].next;
  const bool last = next + 1 == parts_.size();
  parts_[part].rank =
      last ? kNoMerge : PairRank(piece, parts_[part].begin, parts_[parts_[next].next].begin);
  if (parts_[part].rank != kNoMerge) Offer(part);
}

void PairMerger::JoinWithNext(std::string_view piece, size_t part) {
  const uint32_t gone = parts_[part].next;
  parts_[part].next = parts_[gone].next;
  parts_[parts_[gone].next].previous = static_cast<uint32_t>(part);
  parts_[gone].rank = kNoMerge;
  UpdateLong(piece, part);
  if (part != 0) UpdateLong(piece, parts_[part].previous);
}

void PairMerger::MergeLong(std::string_view piece, std::vector<int32_t>* ids) {
  const auto size = static_cast<uint32_t>(piece.size());
  parts_.resize(size + 1);
  heap_.clear();
  for (uint32_t i = 0; i <= size; ++i) {
    const int32_t rank = i + 2 <= size ? PairRank(piece, i, i + 2) : kNoMerge;
    parts_[i] = {i, i == 0 ? 0 : i - 1, std::min(i + 1, size), rank};
    if (rank != kNoMerge) heap_.push_back(uint64_t(rank) << 32 | i);
  }
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const auto part = static_cast<uint32_t>(heap_.back());
    const auto rank = static_cast<int32_t>(heap_.back() >> 32);
    heap_.pop_back();
    // A part's pair only ever grows, so an entry is current exactly while its rank is the part's.
    if (parts_[part].rank == rank) JoinWithNext(piece, part);
  }
  for (uint32_t i = 0; i != size; i = parts_[i].next)
    ids->push_back(PairRank(piece, parts_[i].begin, parts_[parts_[i].next].begin));
}

}  // namespace statetap
