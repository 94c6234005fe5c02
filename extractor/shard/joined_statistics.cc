#include "extractor/shard/joined_statistics.h"

#include <limits>

#include "extractor/shard/statistics_check.h"

namespace statetap {
namespace {

ShardLevel LevelOf(const ShardReader& shard, std::span<const BoundaryStatistics> statistics) {
  ShardLevel level{.shard = shard.path().filename(), .rows = shard.rows(), .median_rms = {}};
  for (const BoundaryStatistics& boundary : statistics) {
    level.median_rms.push_back(boundary.RmsQuantile(0.5));
  }
  return level;
}

}  // namespace

absl::Status JoinedStatistics::Add(const ShardReader& shard, const SampleFilter& filter) {
  const ShardConfig& config = shard.config();
  if (statistics.empty()) {
    boundaries = config.boundaries;
    statistics.assign(boundaries.size(), BoundaryStatistics(config.hidden));
  } else if (config.boundaries != boundaries || config.hidden != statistics[0].hidden()) {
    return absl::FailedPreconditionError(
        fmt::format("{} has boundaries {} of {} values, others {} of {}; look at them apart",
                    shard.path().string(), fmt::join(config.boundaries, ","), config.hidden,
                    fmt::join(boundaries, ","), statistics[0].hidden()));
  }
  if (!filter.holds_for_all()) return AddSamples(shard, filter);
  STATETAP_ASSIGN_OR_RETURN(const std::vector<BoundaryStatistics> more, shard.ReadStatistics());
  for (size_t b = 0; b < statistics.size(); ++b) statistics[b].Merge(more[b]);
  samples += static_cast<int64_t>(shard.samples().size());
  rows += shard.rows();
  levels.push_back(LevelOf(shard, more));
  STATETAP_ASSIGN_OR_RETURN(const std::vector<SampleRecord> records, shard.ReadRecords());
  for (const SampleRecord& record : records) tokens.Add(record, shard.config());
  return finals.Take(shard, records);
}

absl::Status JoinedStatistics::AddSamples(const ShardReader& shard, const SampleFilter& filter) {
  for (size_t i = 0; i < shard.samples().size(); ++i) {
    const auto sample = static_cast<int64_t>(i);
    STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard.ReadRecord(sample));
    if (!filter.Holds(FactsOf(record))) continue;
    tokens.Add(record, shard.config());
    STATETAP_RETURN_IF_ERROR(AddStoredStates(shard, sample, record, statistics));
    if (shard.config().dtype == StatesDtype::kFp8) {
      for (BoundaryStatistics& boundary : statistics)
        boundary.squared_error = std::numeric_limits<double>::quiet_NaN();
    }
    ++samples;
    rows += shard.samples()[i].rows;
  }
  return absl::OkStatus();
}

std::vector<StatisticsAlarm> JoinedStatistics::Alarms() const {
  std::vector<StatisticsAlarm> alarms = FindAlarms(boundaries, statistics);
  const int last = boundaries.empty() ? -1 : boundaries.back();
  for (auto& more :
       {FindDrift(boundaries, levels), FindFinalMismatch(last, finals), FindPolicyGaps(tokens)}) {
    alarms.insert(alarms.end(), more.begin(), more.end());
  }
  return alarms;
}

}  // namespace statetap
