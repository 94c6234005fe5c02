// The passes over bf16 rows that statistics are made of. Plain loops that compilers vectorise;
// the same operations in the same order on every machine, so the same bits.
#pragma once

#include <cstdint>
#include <span>

namespace statetap {

struct RowSummary {
  double sum_of_squares;  // meaningless where not finite
  bool finite, zero;
};
RowSummary SummarizeRow(std::span<const uint16_t> row);

// Of two rows of one width: what their cosine and distance are made of. Not finite where a row has
// a value that is not.
struct RowProducts {
  double dot, other_squares;
};
RowProducts MultiplyRows(std::span<const uint16_t> row, std::span<const uint16_t> other);

inline constexpr int kRowsPerGroup = 16;

// Running sums by channel, [hidden] each.
struct ChannelSums {
  double* mean;
  double* m2;
  double* min;
  double* max;
};
// Merges `num_rows` (1 to kRowsPerGroup) finite rows of `hidden` values into sums over
// `count` rows. Within a group deviations are taken from its first row, so m2 is never the small
// difference of large sums, and a constant channel gives exactly 0.
void MergeRowGroup(const uint16_t* const* rows, int num_rows, int hidden, int64_t count,
                   const ChannelSums& sums);

}  // namespace statetap
