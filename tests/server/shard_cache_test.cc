#include "server/features/shard_cache.h"

#include <atomic>
#include <future>

#include "tests/support/job_harness.h"

namespace statetap {
namespace {

using testing::ChatSample;
using testing::JobHarness;

// Would never end if it did: the head of the first is read until the second has been told.
TEST(ShardCacheTest, StatisticsDoNotWaitForTheHeadOfAnotherJob) {
  JobHarness harness;
  harness.Run();
  const auto store = [&](const std::string& name) {
    v1::JobOptions options;
    options.set_name(name);
    options.set_max_length(256);
    const auto job = harness.Submit(options, {ChatSample("chat", "Say a word.")});
    EXPECT_OK(job);
    return harness.WaitForEnd(*job);
  };
  const JobRecord first = store("first"), second = store("second");
  std::promise<void> reading, told;
  std::atomic<int> read = 0;
  ShardCache shards(*harness.store, harness.folders(), ShardCache::kMaxOpen,
                    [&](auto, std::span<const int32_t> tokens) {
                      if (read++ == 0) {
                        reading.set_value();
                        told.get_future().wait();
                      }
                      return std::vector<double>(tokens.size(), -0.5);
                    });
  auto waits = std::async(std::launch::async, [&] { return shards.Statistics(first); });
  reading.get_future().wait();
  ASSERT_OK(shards.Statistics(second));
  told.set_value();
  ASSERT_OK(waits.get());
  ASSERT_OK(shards.Statistics(first));
  EXPECT_EQ(read, 2) << "once a job";
}

}  // namespace
}  // namespace statetap
