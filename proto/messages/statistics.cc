#include "proto/messages/statistics.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
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

void AddClasses(const BoundaryStatistics& from, v1::BoundaryStatistics& to) {
  const ClassStatistics all = from.AllClasses();
  to.set_cosine(all.MeanCosine());
  to.set_cosine_std(all.CosineStd());
  to.set_cosine_rows(all.compared);
  if (all.count == 0) return;
  for (size_t i = 0; i < kTokenClasses; ++i) {
    const ClassStatistics& of_class = from.by_class[i];
    v1::TokenClassStatistics& message = *to.add_token_classes();
    message.set_token_class(std::string(NameOf(static_cast<TokenClass>(i))));
    message.set_count(of_class.count);
    message.set_row_rms_p01(QuantileOf(of_class.row_rms_histogram, 0.01));
    message.set_row_rms_p50(QuantileOf(of_class.row_rms_histogram, 0.50));
    message.set_row_rms_p99(QuantileOf(of_class.row_rms_histogram, 0.99));
    message.set_cosine(of_class.MeanCosine());
    message.set_cosine_std(of_class.CosineStd());
    message.set_cosine_rows(of_class.compared);
  }
}

// The channels that hold most of the energy, most first.
void AddOutliers(const BoundaryStatistics& from, v1::BoundaryStatistics& to) {
  constexpr size_t kMost = 5;
  const auto count = static_cast<double>(from.count);
  std::vector<std::pair<double, int>> energies;
  double all = 0;
  for (size_t c = 0; c < from.mean.size(); ++c) {
    const double energy = from.m2[c] + count * from.mean[c] * from.mean[c];
    energies.emplace_back(energy, static_cast<int>(c));
    all += energy;
  }
  if (!(all > 0)) return;
  const size_t shown = std::min(kMost, energies.size());
  std::partial_sort(energies.begin(), energies.begin() + static_cast<ptrdiff_t>(shown),
                    energies.end(), std::greater<>());
  for (size_t i = 0; i < shown; ++i) {
    const auto [energy, channel] = energies[i];
    v1::OutlierChannel& outlier = *to.add_outliers();
    outlier.set_channel(channel);
    outlier.set_energy_share(energy / all);
    outlier.set_mean(from.mean[static_cast<size_t>(channel)]);
    outlier.set_abs_max(from.abs_max[static_cast<size_t>(channel)]);
  }
}

void Fill(const std::string& source, const SourceReport& from, v1::SourceReport& to) {
  const auto scored = static_cast<double>(from.scored);
  to.set_source(source);
  to.set_samples(from.samples);
  to.set_tokens(from.tokens);
  to.set_supervised_tokens(from.supervised);
  to.set_scored_tokens(from.scored);
  to.set_surprise(from.surprise / scored);
  to.set_entropy(from.entropy / scored);
  to.set_policy_gap(from.PolicyGap());
  to.set_policy_gap_error(from.PolicyGapError());
  to.set_answers(from.generated);
  to.set_hit_limit(from.hit_limit);
  to.set_empty(from.empty);
  to.set_looping(from.looping);
  to.set_thinking(from.thinking);
  to.set_unclosed(from.unclosed);
  to.set_prompt_tokens(from.prompt_tokens);
  to.mutable_prompt_length_bins()->Assign(from.prompt_lengths.begin(), from.prompt_lengths.end());
  to.mutable_answer_length_bins()->Assign(from.answer_lengths.begin(), from.answer_lengths.end());
}

}  // namespace

v1::Statistics StatisticsMessage(const JoinedStatistics& joined, Channels channels) {
  v1::Statistics message;
  message.set_samples(joined.samples);
  message.set_rows(joined.rows);
  for (size_t i = 0; i < joined.statistics.size(); ++i) {
    v1::BoundaryStatistics& to = *message.add_boundaries();
    Fill(joined.boundaries[i], joined.statistics[i], to);
    AddOutliers(joined.statistics[i], to);
    AddClasses(joined.statistics[i], to);
    if (channels == Channels::kYes) AddChannels(joined.statistics[i], to);
  }
  for (const auto& [source, report] : joined.tokens.sources()) {
    Fill(source, report, *message.add_sources());
  }
  for (const StatisticsAlarm& alarm : joined.Alarms()) {
    v1::Alarm& to = *message.add_alarms();
    to.set_kind(alarm.kind);
    to.set_boundary(alarm.boundary);
    to.set_message(alarm.message);
  }
  return message;
}

}  // namespace statetap
