// Statistics of hidden states by boundary: sums that merge in any order (Chan et al. 1979 for mean
// and M2), quantiles from a fixed logarithmic histogram.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "extractor/shard/token_class.h"

namespace statetap {

// Row rms falls into bin i when it lies in [2^(i/8 − 16), 2^((i+1)/8 − 16)); the first and last bin
// take what lies outside.
inline constexpr int kRmsBins = 256;

using RmsHistogram = std::array<int64_t, kRmsBins>;
// Geometric middle of the bin where the q-th of all rows lies; 0 in the first, where rows of zeros
// are; NaN where there is no row.
double QuantileOf(const RmsHistogram& rows, double q);

// Of the rows of one TokenClass.
struct ClassStatistics {
  int64_t count = 0;  // finite rows
  RmsHistogram row_rms_histogram{};
  // Cosine of a row and the same row at the boundary captured before: rows where there is one, and
  // both are finite and not zero, the sum over them and that of the squares.
  int64_t compared = 0;
  double cosine = 0, squared_cosine = 0;

  void Merge(const ClassStatistics& other);
  double MeanCosine() const;  // NaN where nothing was compared, as is the next
  double CosineStd() const;
};

class BoundaryStatistics {
 public:
  explicit BoundaryStatistics(int hidden);
  // bf16 [rows, hidden]. A row with a non-finite value is counted in nonfinite and left out of
  // everything else. `classes` [rows]: empty where they are not known, and nothing goes into
  // by_class then. `before`: the same rows at the boundary captured before; empty at the first.
  void Add(std::span<const uint16_t> rows, std::span<const TokenClass> classes = {},
           std::span<const uint16_t> before = {});
  void Merge(const BoundaryStatistics& other);  // REQUIRES: same hidden
  // Of the stored states against those that were captured: root of squared_error over the sum of
  // squares. 0 for bf16.
  double RelativeError() const;

  int hidden() const { return static_cast<int>(mean.size()); }
  double RmsQuantile(double q) const { return QuantileOf(row_rms_histogram, q); }
  ClassStatistics AllClasses() const;  // of the rows whose class is known
  struct Overall {
    double mean, std, min, max, abs_max, rms;  // over all rows and channels; NaN where count is 0
  };
  Overall Summary() const;

  int64_t count = 0;                                // finite rows
  std::vector<double> mean, m2, min, max, abs_max;  // [hidden]; m2 is the sum of squared deviations
  RmsHistogram row_rms_histogram{};
  // As TokenClass. Their counts add up to `count` less the rows whose class was not known.
  std::array<ClassStatistics, kTokenClasses> by_class{};
  int64_t zero_rows = 0;
  int64_t nonfinite = 0;
  double squared_error = 0;  // what rounding to fp8 changed, summed over all values
};

}  // namespace statetap
