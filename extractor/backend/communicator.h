// The ranks of one model. How they pass rows to each other is each backend's own affair (host
// memory, device memory and events); everywhere, all ranks make the same calls in the same order
// and sums are taken in rank order, so all ranks hold the same bits.
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

  // Ends the group: calls that wait, now or later, throw RankAborted on every rank.
  virtual void Abort() = 0;
};

}  // namespace statetap
