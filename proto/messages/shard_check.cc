#include "proto/messages/shard_check.h"

#include "extractor/shard/statistics_check.h"

namespace statetap {

v1::CheckResult CheckShard(const ShardReader& shard) {
  v1::CheckResult result;
  const auto check = [&]() -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const std::vector<int64_t> damaged, shard.Verify());
    for (const int64_t sample : damaged)
      result.add_damaged(shard.samples()[static_cast<size_t>(sample)].id);
    if (!damaged.empty())
      return absl::DataLossError(fmt::format("{} of {} samples do not match their checksums",
                                             damaged.size(), shard.samples().size()));
    return CheckStatistics(shard);
  };
  const absl::Status status = check();
  result.set_ok(status.ok());
  result.set_message(std::string(MessageOf(status)));
  return result;
}

}  // namespace statetap
