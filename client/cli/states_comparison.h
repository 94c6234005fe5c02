// Two captures of the same tokens, row by row: how far apart their states are, and what the model's
// head makes of that.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/sample_source.h"
#include "extractor/checkpoint/output_head.h"

namespace statetap {

struct BoundaryDifference {
  int boundary = 0;
  int64_t rows = 0;       // finite on both sides; of them:
  int64_t compared = 0;   // those that are zero on neither, the ones that have a cosine
  int64_t nonfinite = 0;  // rows left out
  double cosine = 0;      // summed over the compared rows
  double lowest_cosine = 1;
  double squared_error = 0, squares = 0;  // of ours − theirs, and of theirs

  double MeanCosine() const;     // NaN where nothing was compared
  double RelativeError() const;  // ‖ours − theirs‖ / ‖theirs‖ over all rows
};

// Of one sample, at the boundary where its relative error is largest.
struct SampleDifference {
  std::string id;
  int64_t rows = 0;
  int boundary = 0;
  double relative_error = 0, cosine = 0;
  double median_error = 0;  // of its rows' relative errors: a few rows that were routed elsewhere
                            // do not raise it
};

// Of the head over final states, ours against theirs.
struct HeadDifference {
  int64_t rows = 0;
  int64_t same_top = 0;  // rows whose most probable token is the same
  double kl = 0;         // KL(ours ‖ theirs), nats, the mean
  double highest_kl = 0;
};

class StatesComparison {
 public:
  // Rows of final states that are kept for the head, spread over the samples; 0: none.
  explicit StatesComparison(int64_t head_rows) : head_rows_(head_rows) {}

  // The samples have the same tokens, or begin with the same: what follows the first that differs
  // is left out and noted. FAILED_PRECONDITION where they share no boundary, or are of another
  // width; both name the sample. `expected_pairs` tells how many rows of each the head may have.
  absl::Status Add(const SampleStates& ours, const SampleStates& theirs, int64_t expected_pairs);
  // Runs the head once over what was kept.
  absl::Status CompareHead(const OutputHead& head);

  int64_t rows() const;  // of all samples
  const std::vector<SampleDifference>& samples() const { return samples_; }
  const std::vector<BoundaryDifference>& boundaries() const { return boundaries_; }

  struct OtherTokens {
    std::string id;
    int64_t from_token;
  };
  // Ids on one side alone, as the caller found them.
  std::vector<std::string> only_here, only_there;

  Json ToJson(size_t worst) const;
  void Print(Context& context, size_t worst) const;

 private:
  BoundaryDifference& DifferenceAt(int boundary);
  void KeepForHead(const SampleStates& ours, const SampleStates& theirs, int64_t rows,
                   int64_t expected_pairs);
  std::vector<SampleDifference> Worst(size_t count) const;

  const int64_t head_rows_;
  std::vector<BoundaryDifference> boundaries_;  // ascending
  std::vector<SampleDifference> samples_;
  std::vector<OtherTokens> other_tokens_;
  std::vector<uint16_t> our_finals_, their_finals_;  // [rows, hidden]
  std::optional<HeadDifference> head_;
};

}  // namespace statetap
