#include "proto/messages/statistics.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace statetap {
namespace {

void AddChannels(const BoundaryStatistics& from, v1::BoundaryStatistics& to) {
  const auto count = static_cast<double>(std::max<int64_t>(1, from.count));
  to.mutable_channel_mean()->Assign(from.mean.begin(), from.mean.end());
  for (const double m2 : from.m2) to.add_channel_std(std::sqrt(m2 / count));
  to.mutable_channel_min()->Assign(from.min.begin(), from.min.end());
  to.mutable_channel_max()->Assign(from.max.begin(), from.max.end());
}

void Fill(int boundary, const BoundaryStatistics& from, v1::BoundaryStatistics& to) {
  const BoundaryStatistics::Overall overall = from.Summary();
  to.set_boundary(boundary);
  to.set_layer_output(boundary - 1);
  to.set_count(from.count);
  to.set_mean(overall.mean);
  to.set_std(overall.std);
  to.set_min(overall.min);
  to.set_max(overall.max);
  to.set_abs_max(overall.abs_max);
  to.set_rms(overall.rms);
  to.set_row_rms_p01(from.RmsQuantile(0.01));
  to.set_row_rms_p50(from.RmsQuantile(0.50));
  to.set_row_rms_p99(from.RmsQuantile(0.99));
  to.set_zero_rows(from.zero_rows);
  to.set_nonfinite(from.nonfinite);
  to.set_relative_error(from.RelativeError());
  to.mutable_row_rms_bins()->Assign(from.row_rms_histogram.begin(), from.row_rms_histogram.end());
}

}  // namespace

v1::Statistics StatisticsMessage(std::span<const int> boundaries,
                                 std::span<const BoundaryStatistics> statistics,
                                 Channels channels) {
  v1::Statistics message;
  for (size_t i = 0; i < statistics.size(); ++i) {
    v1::BoundaryStatistics& to = *message.add_boundaries();
    Fill(boundaries[i], statistics[i], to);
    if (channels == Channels::kYes) AddChannels(statistics[i], to);
  }
  for (const StatisticsAlarm& alarm : FindAlarms(boundaries, statistics)) {
    v1::Alarm& to = *message.add_alarms();
    to.set_kind(alarm.kind);
    to.set_boundary(alarm.boundary);
    to.set_message(alarm.message);
  }
  return message;
}

}  // namespace statetap
