#include "extractor/text/bpe.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace statetap {
namespace {

// Ranks are compared unsigned, so that "no such pair" comes last.
constexpr auto kNoMerge = static_cast<uint32_t>(Vocabulary::kNoRank);
// Up to here looking at every pair for each merge is faster than sorting them.
constexpr size_t kShortPiece = 96;

uint32_t LeastOf(const uint32_t* values, size_t count) {
  uint32_t least = kNoMerge;
  for (size_t i = 0; i < count; ++i) least = std::min(least, values[i]);
  return least;
}

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

void PairMerger::MergeShort(std::string_view piece, std::vector<int32_t>* ids) const {
  uint8_t begins[kShortPiece + 1];  // part i is [begins[i], begins[i + 1])
  uint32_t ranks[kShortPiece];      // of part i joined with part i + 1
  size_t count = piece.size();
  for (size_t i = 0; i <= count; ++i) begins[i] = static_cast<uint8_t>(i);
  for (size_t i = 0; i + 1 < count; ++i)
    ranks[i] = static_cast<uint32_t>(vocabulary_.RankOfTwo(piece[i], piece[i + 1]));
  for (;;) {
    const uint32_t least = LeastOf(ranks, count - 1);
    if (least == kNoMerge) break;
    const size_t at = std::find(ranks, ranks + count - 1, least) - ranks;
    std::memmove(begins + at + 1, begins + at + 2, count - at - 1);
    std::memmove(ranks + at, ranks + at + 1, (count - at - 2) * sizeof ranks[0]);
    --count;
    if (at + 1 < count) ranks[at] = Rank(piece, begins[at], begins[at + 2]);
    if (at > 0) ranks[at - 1] = Rank(piece, begins[at - 1], begins[at + 1]);
  }
  for (size_t i = 0; i < count; ++i)
    ids->push_back(vocabulary_.RankOf(piece.substr(begins[i], begins[i + 1] - begins[i])));
}

void PairMerger::MergeLong(std::string_view piece, std::vector<int32_t>* ids) {
  BeginLong(piece);
  while (!ranks_.empty()) JoinBucket(piece, ranks_.front());
  for (uint32_t i = 0; i < piece.size(); i = parts_[i].next)
    ids->push_back(vocabulary_.RankOf(piece.substr(i, parts_[i].next - i)));
}

void PairMerger::BeginLong(std::string_view piece) {
  const auto size = static_cast<uint32_t>(piece.size());
  parts_.resize(size + 1);  // the last one stands behind the piece
  for (uint32_t i = 0; i <= size; ++i) {
    const int32_t rank =
        i + 2 <= size ? vocabulary_.RankOfTwo(piece[i], piece[i + 1]) : Vocabulary::kNoRank;
    parts_[i] = {i - 1, i + 1, static_cast<uint32_t>(rank)};
    if (parts_[i].rank != kNoMerge) Offer(i);
  }
}

void PairMerger::Offer(uint32_t part) {
  const auto [entry, added] = buckets_.try_emplace(parts_[part].rank);
  if (added) {
    ranks_.push_back(parts_[part].rank);
    std::push_heap(ranks_.begin(), ranks_.end(), std::greater<>());
  }
  Bucket& bucket = entry->second;
  bucket.sorted = bucket.sorted && (bucket.parts.empty() || bucket.parts.back() < part);
  bucket.parts.push_back(part);
}

// Joins the bucket's parts from left to right, until it is used up or a join makes a pair of lower
// rank possible: that one comes first. New pairs are longer than this bucket's, so none of them
// belongs into it.
void PairMerger::JoinBucket(std::string_view piece, uint32_t rank) {
  Bucket& bucket = buckets_.find(rank)->second;
  if (!bucket.sorted) std::sort(bucket.parts.begin() + bucket.done, bucket.parts.end());
  bucket.sorted = true;
  while (bucket.done < bucket.parts.size() && ranks_.front() == rank) {
    const uint32_t part = bucket.parts[bucket.done++];
    // A part only ever grows, so an entry is current exactly while its rank is the part's.
    if (parts_[part].rank == rank) Join(piece, part);
  }
  if (ranks_.front() != rank) return;
  std::pop_heap(ranks_.begin(), ranks_.end(), std::greater<>());
  ranks_.pop_back();
  buckets_.erase(rank);
}

void PairMerger::Join(std::string_view piece, uint32_t part) {
  const uint32_t gone = parts_[part].next;
  parts_[part].next = parts_[gone].next;
  parts_[parts_[gone].next].previous = part;
  parts_[gone].rank = kNoMerge;
  UpdateRank(piece, part);
  if (part != 0) UpdateRank(piece, parts_[part].previous);
}

void PairMerger::UpdateRank(std::string_view piece, uint32_t part) {
  const uint32_t next = parts_[part].next;
  parts_[part].rank = next < piece.size() ? Rank(piece, part, parts_[next].next) : kNoMerge;
  if (parts_[part].rank != kNoMerge) Offer(part);
}

}  // namespace statetap
