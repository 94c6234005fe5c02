#include "extractor/shard/statistics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

#include "extractor/shard/statistics_kernel.h"

namespace statetap {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int kBinsPerOctave = 8, kLowestOctave = -16;

int BinOf(double rms) {
  if (!(rms > 0)) return 0;
  const double bin = std::floor((std::log2(rms) - kLowestOctave) * kBinsPerOctave);
  return static_cast<int>(std::clamp(bin, 0.0, double{kRmsBins - 1}));
}

void AddCosine(std::span<const uint16_t> row, double squares, std::span<const uint16_t> before,
               ClassStatistics& to) {
  const RowProducts products = MultiplyRows(row, before);
  if (!(squares > 0 && products.other_squares > 0) || !std::isfinite(products.other_squares))
    return;
  const double cosine = products.dot / std::sqrt(squares) / std::sqrt(products.other_squares);
  ++to.compared;
  to.cosine += cosine;
  to.squared_cosine += cosine * cosine;
}

}  // namespace

double QuantileOf(const RmsHistogram& rows, double q) {
  int64_t count = 0;
  for (const int64_t of_bin : rows) count += of_bin;
  if (count == 0) return kNan;
  const auto rank = std::clamp<int64_t>(
      static_cast<int64_t>(std::ceil(q * static_cast<double>(count))), 1, count);
  int64_t seen = 0;
  int bin = 0;
  while (bin < kRmsBins - 1 && (seen += rows[bin]) < rank) ++bin;
  return bin == 0 ? 0 : std::exp2((bin + 0.5) / kBinsPerOctave + kLowestOctave);
}

void ClassStatistics::Merge(const ClassStatistics& other) {
  count += other.count;
  for (int bin = 0; bin < kRmsBins; ++bin) row_rms_histogram[bin] += other.row_rms_histogram[bin];
  compared += other.compared;
  cosine += other.cosine;
  squared_cosine += other.squared_cosine;
}

double ClassStatistics::MeanCosine() const {
  return compared == 0 ? kNan : cosine / static_cast<double>(compared);
}

double ClassStatistics::CosineStd() const {
  if (compared == 0) return kNan;
  const double mean = MeanCosine();
  return std::sqrt(std::max(0.0, squared_cosine / static_cast<double>(compared) - mean * mean));
}

ClassStatistics BoundaryStatistics::AllClasses() const {
  ClassStatistics all;
  for (const ClassStatistics& of_class : by_class) all.Merge(of_class);
  return all;
}

BoundaryStatistics::BoundaryStatistics(int hidden)
    : mean(static_cast<size_t>(hidden)),
      m2(mean.size()),
      min(mean.size(), kInfinity),
      max(mean.size(), -kInfinity),
      abs_max(mean.size()) {}

void BoundaryStatistics::Add(std::span<const uint16_t> rows, std::span<const TokenClass> classes,
                             std::span<const uint16_t> before) {
  const size_t width = mean.size();
  assert(rows.size() % width == 0);
  assert(classes.empty() || classes.size() == rows.size() / width);
  assert(before.empty() || before.size() == rows.size());
  const uint16_t* group[kRowsPerGroup];
  int group_rows = 0;
  const auto merge_group = [&] {
    MergeRowGroup(group, group_rows, hidden(), count,
                  {mean.data(), m2.data(), min.data(), max.data()});
    count += group_rows;
    group_rows = 0;
  };
  for (size_t begin = 0; begin < rows.size(); begin += width) {
    const auto row = rows.subspan(begin, width);
    const RowSummary summary = SummarizeRow(row);
    if (!summary.finite) {
      ++nonfinite;
      continue;
    }
    zero_rows += summary.zero;
    const int bin = BinOf(std::sqrt(summary.sum_of_squares / static_cast<double>(width)));
    ++row_rms_histogram[bin];
    if (!classes.empty()) {
      ClassStatistics& of_class = by_class[static_cast<size_t>(classes[begin / width])];
      ++of_class.count;
      ++of_class.row_rms_histogram[bin];
      if (!before.empty())
        AddCosine(row, summary.sum_of_squares, before.subspan(begin, width), of_class);
    }
    group[group_rows++] = row.data();
    if (group_rows == kRowsPerGroup) merge_group();
  }
  merge_group();
  for (size_t c = 0; count > 0 && c < width; ++c) abs_max[c] = std::max(-min[c], max[c]);
}

void BoundaryStatistics::Merge(const BoundaryStatistics& other) {
  assert(hidden() == other.hidden());
  nonfinite += other.nonfinite;
  squared_error += other.squared_error;
  for (int c = 0; c < kTokenClasses; ++c) by_class[c].Merge(other.by_class[c]);
  if (other.count == 0) return;
  const double total = static_cast<double>(count + other.count);
  const double other_share = static_cast<double>(other.count) / total;
  const double cross_weight = static_cast<double>(count) * other_share;
  for (size_t c = 0; c < mean.size(); ++c) {
    const double delta = other.mean[c] - mean[c];
    mean[c] += delta * other_share;
    m2[c] += other.m2[c] + delta * delta * cross_weight;
    min[c] = std::min(min[c], other.min[c]);
    max[c] = std::max(max[c], other.max[c]);
    abs_max[c] = std::max(abs_max[c], other.abs_max[c]);
  }
  count += other.count;
  zero_rows += other.zero_rows;
  for (int bin = 0; bin < kRmsBins; ++bin) row_rms_histogram[bin] += other.row_rms_histogram[bin];
}

double BoundaryStatistics::RelativeError() const {
  if (squared_error == 0) return 0;
  const double values = static_cast<double>(count) * static_cast<double>(mean.size());
  return std::sqrt(squared_error / values) / Summary().rms;
}

BoundaryStatistics::Overall BoundaryStatistics::Summary() const {
  if (count == 0 || mean.empty()) return {kNan, kNan, kNan, kNan, kNan, kNan};
  const double rows = static_cast<double>(count), channels = static_cast<double>(mean.size());
  double mean_sum = 0;
  for (const double m : mean) mean_sum += m;
  const double overall_mean = mean_sum / channels;
  double deviations = 0, squares = 0;
  for (size_t c = 0; c < mean.size(); ++c) {
    const double delta = mean[c] - overall_mean;
    deviations += m2[c] + rows * delta * delta;
    squares += m2[c] + rows * mean[c] * mean[c];
  }
  return {.mean = overall_mean,
          .std = std::sqrt(deviations / (rows * channels)),
          .min = *std::min_element(min.begin(), min.end()),
          .max = *std::max_element(max.begin(), max.end()),
          .abs_max = *std::max_element(abs_max.begin(), abs_max.end()),
          .rms = std::sqrt(squares / (rows * channels))};
}

}  // namespace statetap
