// Statistics of hidden states by boundary: sums that merge in any order (Chan et al. 1979 for mean
// and M2), quantiles from a fixed logarithmic histogram.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace statetap {

// Row rms falls into bin i when it lies in [2^(i/8 − 16), 2^((i+1)/8 − 16)); the first and last bin
// take what lies outside.
inline constexpr int kRmsBins = 256;

class BoundaryStatistics {
 public:
  explicit BoundaryStatistics(int hidden);
  // bf16 [rows, hidden]. A row with a non-finite value is counted in nonfinite and left out of
  // everything else.
  void Add(std::span<const uint16_t> rows);
  void Merge(const BoundaryStatistics& other);  // REQUIRES: same hidden
  // Of the stored states against those that were captured: root of squared_error over the sum of
  // squares. 0 for bf16.
  double RelativeError() const;

  int hidden() const { return static_cast<int>(mean.size()); }
  double RmsQuantile(double q) const;  // geometric middle of the bin; NaN where count is 0
  struct Overall {
    double mean, std, min, max, abs_max, rms;  // over all rows and channels; NaN where count is 0
  };
  Overall Summary() const;

  int64_t count = 0;                                // finite rows
  std::vector<double> mean, m2, min, max, abs_max;  // [hidden]; m2 is the sum of squared deviations
  std::array<int64_t, kRmsBins> row_rms_histogram{};
  int64_t zero_rows = 0;
  int64_t nonfinite = 0;
  double squared_error = 0;  // what rounding to fp8 changed, summed over all values
};

}  // namespace statetap
