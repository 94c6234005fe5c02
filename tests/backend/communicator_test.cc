#include <atomic>
#include <random>
#include <thread>

#include "extractor/backend/cpu/shared_communicator.h"
#include "tests/support/status_matchers.h"

namespace statetap::cpu {
namespace {

// Runs body(communicator) on every rank's thread.
template <typename Body>
void OnRanks(int world, const Body& body) {
  const auto group = std::make_shared<SharedGroup>(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      SharedCommunicator communicator(rank, group);
      body(communicator);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(ShardOfRowsTest, CoversEveryRowOnce) {
  for (const int world : {1, 2, 3, 8}) {
    for (const int tokens : {0, 1, 2, 7, 8, 9, 63, 64, 65}) {
      int next = 0;
      for (int rank = 0; rank < world; ++rank) {
        const RowRange rows = ShardOfRows(tokens, rank, world);
        EXPECT_EQ(rows.begin, next);
        next += rows.count;
      }
      EXPECT_EQ(next, tokens);
    }
  }
}

TEST(SharedCommunicatorTest, SumsInRankOrderAndGathersRows) {
  std::mt19937 random(3);
  for (const int world : {1, 2, 4, 8}) {
    for (const int tokens : {1, 5, 8, 17}) {
      constexpr int kWidth = 3;
      std::vector<std::vector<float>> partial(static_cast<size_t>(world));
      std::vector<float> expected(static_cast<size_t>(tokens) * kWidth);
      for (auto& rows : partial) {
        for (size_t i = 0; i < expected.size(); ++i)
          rows.push_back(std::uniform_real_distribution<float>(-1, 1)(random) *
                         (i % 5 == 0 ? 1e6f : 1));
      }
      for (size_t i = 0; i < expected.size(); ++i) {
        float sum = partial[0][i];
        for (size_t rank = 1; rank < partial.size(); ++rank) sum += partial[rank][i];
        expected[i] = sum;
      }
      OnRanks(world, [&](SharedCommunicator& communicator) {
        const auto& mine = partial[static_cast<size_t>(communicator.rank())];
        std::vector<float> whole(expected.size(), NAN), all(expected.size(), NAN);
        communicator.SumRows(mine.data(), {0, tokens}, kWidth, whole.data());
        EXPECT_EQ(whole, expected);
        const RowRange rows = ShardOfRows(tokens, communicator.rank(), world);
        float* own = all.data() + rows.begin * kWidth;
        communicator.SumRows(mine.data(), rows, kWidth, own);
        communicator.GatherRows(own, tokens, kWidth * sizeof(float), all.data());
        EXPECT_EQ(all, expected);
        const int32_t rank = communicator.rank();
        std::vector<int32_t> ranks(static_cast<size_t>(world));
        communicator.GatherBlocks(&rank, sizeof(rank), ranks.data());
        for (int32_t r = 0; r < world; ++r) EXPECT_EQ(ranks[static_cast<size_t>(r)], r);
      });
    }
  }
}

TEST(SharedCommunicatorTest, AbortWakesEveryRank) {
  std::atomic<int> thrown = 0;
  OnRanks(4, [&](SharedCommunicator& communicator) {
    float value = 0, sum;
    if (communicator.rank() == 2) return communicator.Abort();
    try {
      communicator.SumRows(&value, {0, 1}, 1, &sum);
    } catch (const RankAborted&) {
      ++thrown;
    }
  });
  EXPECT_EQ(thrown, 3);
}

}  // namespace
}  // namespace statetap::cpu
