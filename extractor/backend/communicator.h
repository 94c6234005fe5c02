// What the ranks of one model say to each other. Every rank makes the same calls in the same order;
// sums are taken in rank order, so all ranks hold the same bits.
#pragma once

#include <cstddef>
#include <stdexcept>

namespace statetap {

// Thrown from a waiting call when another rank has failed: the engine ends the group.
class RankAborted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Rows of a step that a rank keeps of the residual stream.
struct RowRange {
  int begin = 0;
  int count = 0;
};

// Equal parts of ceil(num_tokens / world) rows, the last ones short or empty.
constexpr RowRange ShardOfRows(int num_tokens, int rank, int world) {
  const int part = (num_tokens + world - 1) / world;
  const int begin = rank * part < num_tokens ? rank * part : num_tokens;
  return {begin, num_tokens - begin < part ? num_tokens - begin : part};
}

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;

  // own[i] = sum over ranks, in rank order, of their partial[(rows.begin + i)], i in [0,
  // rows.count). fp32 [num_tokens, width]. Sharded ranges give a reduce-scatter, the whole range on
  // every rank an all-reduce. `own` may not overlap any partial.
  virtual void SumRows(const float* partial, RowRange rows, int width, float* own) = 0;
  // all[t] for every row t of the step from the rank that owns it: ShardOfRows(num_tokens, r,
  // world). Rows of `row_bytes`. `own` may be all + begin * row_bytes.
  virtual void GatherRows(const void* own, int num_tokens, size_t row_bytes, void* all) = 0;
  // all[r * bytes …] = rank r's own. Blocks of the same size.
  virtual void GatherBlocks(const void* own, size_t bytes, void* all) = 0;
  // Ends the group: calls that wait, now or later, throw RankAborted on every rank.
  virtual void Abort() = 0;
};

}  // namespace statetap
