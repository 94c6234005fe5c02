#include "extractor/shard/joined_statistics.h"

#include <utility>

namespace statetap {

absl::Status JoinedStatistics::Add(const ShardReader& shard) {
  STATETAP_ASSIGN_OR_RETURN(std::vector<BoundaryStatistics> more, shard.ReadStatistics());
  const ShardConfig& config = shard.config();
  if (statistics.empty()) {
    boundaries = config.boundaries;
    statistics = std::move(more);
  } else if (config.boundaries != boundaries || config.hidden != statistics[0].hidden()) {
    return absl::FailedPreconditionError(
        fmt::format("{} has boundaries {} of {} values, others {} of {}; look at them apart",
                    shard.path().string(), fmt::join(config.boundaries, ","), config.hidden,
                    fmt::join(boundaries, ","), statistics[0].hidden()));
  } else {
    for (size_t b = 0; b < statistics.size(); ++b) statistics[b].Merge(more[b]);
  }
  samples += static_cast<int64_t>(shard.samples().size());
  rows += shard.rows();
  return absl::OkStatus();
}

}  // namespace statetap
