#include "extractor/shard/joined_statistics.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace statetap {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;

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
  return AddTokens(shard);
}

absl::Status JoinedStatistics::AddTokens(const ShardReader& shard) {
  for (size_t i = 0; i < shard.samples().size(); ++i) {
    STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard.ReadRecord(static_cast<int64_t>(i)));
    tokens.Add(record);
  }
  return absl::OkStatus();
}

absl::Status JoinedStatistics::AddSamples(const ShardReader& shard, const SampleFilter& filter) {
  const int64_t hidden = shard.config().hidden;
  const int64_t piece_rows = std::max<int64_t>(1, kPieceBytes / (2 * hidden));
  std::vector<uint16_t> states;
  for (size_t i = 0; i < shard.samples().size(); ++i) {
    STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard.ReadRecord(static_cast<int64_t>(i)));
    if (!filter.Holds(FactsOf(record))) continue;
    tokens.Add(record);
    const SampleEntry& entry = shard.samples()[i];
    for (size_t b = 0; b < statistics.size(); ++b) {
      for (int64_t row = 0; row < entry.rows; row += piece_rows) {
        states.resize(static_cast<size_t>(std::min(piece_rows, entry.rows - row) * hidden));
        STATETAP_RETURN_IF_ERROR(
            shard.ReadStates(static_cast<int>(b), entry.first_row + row, states));
        statistics[b].Add(states);
      }
      if (shard.config().dtype == StatesDtype::kFp8)
        statistics[b].squared_error = std::numeric_limits<double>::quiet_NaN();
    }
    ++samples;
    rows += entry.rows;
  }
  return absl::OkStatus();
}

std::vector<StatisticsAlarm> JoinedStatistics::Alarms() const {
  std::vector<StatisticsAlarm> alarms = FindAlarms(boundaries, statistics);
  for (auto& more : {FindDrift(boundaries, levels), FindPolicyGaps(tokens)}) {
    alarms.insert(alarms.end(), more.begin(), more.end());
  }
  return alarms;
}

}  // namespace statetap
