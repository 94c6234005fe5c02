#include "extractor/shard/alarms.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cmath>

namespace statetap {
namespace {

bool SameStatistics(const BoundaryStatistics& a, const BoundaryStatistics& b) {
  return a.count == b.count && a.mean == b.mean && a.m2 == b.m2 && a.min == b.min && a.max == b.max;
}

// A norm leaves most rows with nearly the same rms and none far above: a few lie lower, those whose
// energy sits in channels of small weight. The stream before it grows from layer to layer, and its
// rows differ.
bool LooksNormed(double median_before, const BoundaryStatistics& found) {
  constexpr double kAbove = 1.35, kBelow = 2.5, kFall = 0.5;
  constexpr int64_t kLeastRows = 64;
  if (found.count < kLeastRows || found.zero_rows > 0) return false;
  const double median = found.RmsQuantile(0.5);
  return found.RmsQuantile(0.99) <= kAbove * median && median <= kBelow * found.RmsQuantile(0.01) &&
         median < kFall * median_before;
}

double MedianOf(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Finder {
 public:
  Finder(std::span<const int> boundaries, std::span<const BoundaryStatistics> statistics)
      : boundaries_(boundaries), statistics_(statistics) {}

  std::vector<StatisticsAlarm> Find() {
    for (size_t i = 0; i < statistics_.size(); ++i) Look(i);
    return std::move(alarms_);
  }

 private:
  void Look(size_t i) {
    const BoundaryStatistics& found = statistics_[i];
    if (found.nonfinite > 0) {
      Add(i, "nonfinite",
          fmt::format("{} of {} rows hold NaN or infinity", found.nonfinite,
                      found.nonfinite + found.count));
    }
    if (found.count == 0) return;
    if (found.zero_rows == found.count) {
      return Add(
          i, "zero_boundary",
          fmt::format("all {} rows are zero: a dead tap, nothing was captured there", found.count));
    }
    if (found.min == found.max && found.count > 1) {
      Add(i, "constant_boundary", fmt::format("all {} rows are the same: a dead tap", found.count));
    }
    for (size_t j = 0; j < i; ++j) {
      if (!SameStatistics(found, statistics_[j])) continue;
      Add(i, "equal_boundaries",
          fmt::format("has the same statistics as boundary {} to the last bit", boundaries_[j]));
      break;
    }
    // The largest before it: a tap between may be dead.
    size_t largest = 0;
    for (size_t j = 1; j < i; ++j)
      if (Median(j) > Median(largest)) largest = j;
    if (i > 0 && LooksNormed(Median(largest), found)) {
      Add(i, "normed_boundary",
          fmt::format("nearly every row has an rms of about {:.3g}, boundary {} one of {:.3g}: a "
                      "norm seems to have been applied already, a trainer's would be the second",
                      found.RmsQuantile(0.5), boundaries_[largest], Median(largest)));
    }
  }

  // 0 where there are no rows.
  double Median(size_t i) const {
    return statistics_[i].count == 0 ? 0 : statistics_[i].RmsQuantile(0.5);
  }

  void Add(size_t i, std::string kind, const std::string& what) {
    alarms_.push_back(
        {std::move(kind), boundaries_[i], fmt::format("boundary {}: {}", boundaries_[i], what)});
  }

  std::span<const int> boundaries_;
  std::span<const BoundaryStatistics> statistics_;
  std::vector<StatisticsAlarm> alarms_;
};

}  // namespace

std::vector<StatisticsAlarm> FindAlarms(std::span<const int> boundaries,
                                        std::span<const BoundaryStatistics> statistics) {
  assert(boundaries.size() == statistics.size());
  return Finder(boundaries, statistics).Find();
}

std::vector<StatisticsAlarm> FindDrift(std::span<const int> boundaries,
                                       std::span<const ShardLevel> shards) {
  constexpr int64_t kLeastRows = 256;
  constexpr size_t kLeastShards = 3;
  constexpr double kFactor = 1.4;
  std::vector<const ShardLevel*> compared;
  for (const ShardLevel& shard : shards) {
    if (shard.rows >= kLeastRows) compared.push_back(&shard);
  }
  std::vector<StatisticsAlarm> alarms;
  if (compared.size() < kLeastShards) return alarms;
  for (size_t b = 0; b < boundaries.size(); ++b) {
    std::vector<double> levels;
    for (const ShardLevel* shard : compared) levels.push_back(shard->median_rms[b]);
    const double usual = MedianOf(levels);
    for (const ShardLevel* shard : compared) {
      const double level = shard->median_rms[b];
      if (level <= kFactor * usual && kFactor * level >= usual) continue;
      alarms.push_back({"shard_drift", boundaries[b],
                        fmt::format("boundary {}: {} has a median rms of {:.3g}, the shards as a "
                                    "rule {:.3g}: another model, precision or kind of text",
                                    boundaries[b], shard->shard, level, usual)});
    }
  }
  return alarms;
}

std::vector<StatisticsAlarm> FindFinalMismatch(int boundary, const FinalCheck& finals) {
  constexpr size_t kLeastTokens = 4;
  // What rounding may change: bf16 states of tiny-kimi are 0.0007 to 0.0075 away, fp8 ones, a
  // thirtieth of their length wrong, up to 0.096; normed ones of either at least 0.29 and 0.37.
  constexpr double kErrorBf16 = 0.1, kErrorFp8 = 0.25;
  constexpr size_t kNamed = 3;
  std::vector<std::string> names;
  size_t wrong = 0, compared = 0;
  double worst = 0;
  for (const FinalCheck::Shard& shard : finals.shards()) {
    if (shard.tokens.size() < kLeastTokens || !shard.error) continue;
    ++compared;
    if (*shard.error <= (shard.dtype == StatesDtype::kFp8 ? kErrorFp8 : kErrorBf16)) continue;
    worst = std::max(worst, *shard.error);
    if (++wrong <= kNamed) names.push_back(shard.name);
  }
  if (wrong == 0) return {};
  if (wrong > kNamed) names.emplace_back("…");
  return {{"final_mismatch", boundary,
           fmt::format("boundary {}: under the model's norm and head, the final states of {} of {} "
                       "shards ({}) give their tokens log-odds that are up to {:.2f} nats away "
                       "from those stored with them (the mean of a shard): normed already, of "
                       "other rows or of another model",
                       boundary, wrong, compared, fmt::join(names, ", "), worst)}};
}

std::vector<StatisticsAlarm> FindPolicyGaps(const TokenReport& tokens) {
  constexpr double kGap = 0.5, kErrors = 5;
  std::vector<StatisticsAlarm> alarms;
  for (const auto& [source, report] : tokens.sources()) {
    const double gap = report.PolicyGap();
    // Comparisons with NaN are false: nothing scored is no alarm.
    if (!(gap - kErrors * report.PolicyGapError() > kGap)) continue;
    alarms.push_back(
        {"policy_gap", -1,
         fmt::format("source {}: its tokens surprise the model by {:.2f} nats more than its own "
                     "would: written by people or another model, or with another template, "
                     "thinking mode or quantisation",
                     source, gap)});
  }
  return alarms;
}

}  // namespace statetap
