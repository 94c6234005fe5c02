// Rows between ranks: whatever carries them, all ranks get the same bits, those of a sum on the
// CPU in rank order.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/rank.h"
#include "extractor/engine/rank_group.h"
#include "tests/support/gpu.h"
#include "tests/support/status_matchers.h"

namespace statetap::cuda {
namespace {

using testing::DeviceArray;

std::vector<int> Devices(int world) {
  std::vector<int> devices;
  for (int rank = 0; rank < world; ++rank) devices.push_back(rank % NumGpus());
  return devices;
}

// Runs body(rank, stream) on a thread a rank. All have joined before the first begins.
template <typename Body>
void OnRanks(DeviceGroup& group, const std::vector<int>& devices, const Body& body) {
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    Check(cudaSetDevice(devices[rank]));
    group.Join(static_cast<int>(rank));
  }
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    threads.emplace_back([&, rank] {
      Check(cudaSetDevice(devices[rank]));
      const Stream stream;
      body(static_cast<int>(rank), stream.get());
      Check(cudaStreamSynchronize(stream.get()));
    });
  }
  for (auto& thread : threads) thread.join();
}

// bf16 numbers of all sizes, none of them special; the same for the same seed.
std::vector<uint16_t> SomeRows(size_t count, uint32_t seed) {
  std::vector<uint16_t> bits(count);
  std::mt19937 random(seed);
  for (uint16_t& value : bits) {
    const uint32_t draw = random();
    value = static_cast<uint16_t>((draw & 0x80ff) | ((120 + (draw >> 16) % 14) << 7));
  }
  return bits;
}

class CudaGroupTest : public ::testing::TestWithParam<std::tuple<CudaOptions::Comm, int>> {
 protected:
  // Empty, or why these ranks cannot be had here.
  std::string Missing() const {
    if (comm() != CudaOptions::Comm::kNccl) return "";
    if (!HasNccl()) return "this build has no NCCL";
    return world() > NumGpus() ? "NCCL wants a GPU a rank" : "";
  }
  static CudaOptions::Comm comm() { return std::get<0>(GetParam()); }
  static int world() { return std::get<1>(GetParam()); }
};

// One exchange of rows × width, sharded or not, or of a half of a step, and the gathering of what
// came out.
void Exchange(DeviceGroup& group, const std::vector<int>& devices,
              const std::vector<std::vector<uint16_t>>& pool, size_t offset, int rows, int width,
              bool sharded, int half = -1) {
  const auto world = static_cast<int>(devices.size());
  const auto count = static_cast<size_t>(rows) * static_cast<size_t>(width);
  std::vector<std::vector<uint16_t>> sums(devices.size()), gathered(devices.size());
  OnRanks(group, devices, [&](int rank, cudaStream_t stream) {
    const RowRange own = sharded ? ShardOfRows(rows, rank, world) : RowRange{0, rows};
    const auto own_count = static_cast<size_t>(own.count) * static_cast<size_t>(width);
    DeviceArray<uint16_t> partial(count), sum(own_count), all(count);
    const size_t row_bytes = static_cast<size_t>(width) * 2;
    const uint16_t* source = pool[static_cast<size_t>(rank)].data() + offset;
    const SharedRows shared{partial.data(), rows, row_bytes, sharded, half};
    group.Reserve(rank, shared);
    group.BeginStep(rank);
    Check(cudaMemcpyAsync(partial.data(), source, count * 2, cudaMemcpyHostToDevice, stream));
    group.Send(rank, shared, stream);
    SumAddNormParams p{};
    p.first_row = own.begin;
    p.num_rows = own.count;
    p.hidden = width;
    p.residual = reinterpret_cast<bf16*>(sum.data());
    p.replace = true;
    group.ExchangeAddNorm(rank, shared, p, stream);
    if (half >= 0) {
      const GatherParams gathered{sum.data(), all.data(), row_bytes};
      group.GatherBeside(rank, half, {&gathered, 1}, rows, stream);
      group.Arrive(rank, half, stream);
    } else if (sharded) {
      group.GatherRows(rank, sum.data(), rows, row_bytes, all.data(), stream);
    }
    Check(cudaStreamSynchronize(stream));  // the others have read, too
    sums[static_cast<size_t>(rank)] = sharded ? all.Get() : sum.Get();
  });
  for (size_t rank = 1; rank < devices.size(); ++rank)
    ASSERT_TRUE(sums[rank] == sums[0]) << "rank " << rank << ", " << rows << " x " << width;
  for (size_t i = 0; i < count; ++i) {
    float sum = Bf16ToFloat(pool[0][offset + i]);
    for (size_t rank = 1; rank < devices.size(); ++rank) sum += Bf16ToFloat(pool[rank][offset + i]);
    if (sums[0][i] != FloatToBf16(sum))
      FAIL() << "value " << i << " of " << rows << " x " << width << (sharded ? " sharded" : "");
  }
}

TEST_P(CudaGroupTest, SumsAreTheSameBitsOnEveryRankAndOnTheCpu) {
  SKIP_WITHOUT_GPU();
  if (const std::string missing = Missing(); !missing.empty()) GTEST_SKIP() << missing;
  const std::vector<int> devices = Devices(world());
  const auto group = MakeGroup(devices, comm());
  std::vector<std::vector<uint16_t>> pool;
  for (int rank = 0; rank < world(); ++rank)
    pool.push_back(SomeRows(300 * 7168, static_cast<uint32_t>(rank)));
  for (const auto& [rows, width] : std::vector<std::pair<int, int>>{{1, 1},
                                                                    {1, 7168},
                                                                    {3, 7},
                                                                    {7, 128},
                                                                    {64, 7168},
                                                                    {257, 64},
                                                                    {300, 7168},
                                                                    {5, 8},
                                                                    {6145, 64},
                                                                    {16390, 64}}) {
    for (const bool sharded : {false, true})
      Exchange(*group, devices, pool, 0, rows, width, sharded);
    if (!group->Overlaps()) continue;
    for (const int half : {0, 1})
      Exchange(*group, devices, pool, 0, rows, width, /*sharded=*/true, half);
  }
}

// Two halves in turns, as in a layer: whatever one exchanges while the other goes on, and however
// the ranks' streams lag, each gets its own sums and rows.
TEST_P(CudaGroupTest, HalvesInTurnsDoNotMix) {
  SKIP_WITHOUT_GPU();
  if (const std::string missing = Missing(); !missing.empty()) GTEST_SKIP() << missing;
  constexpr int kWidth = 128, kRounds = 60;
  const std::vector<int> devices = Devices(world());
  const auto group = MakeGroup(devices, comm());
  if (!group->Overlaps()) GTEST_SKIP() << "one after the other";
  const std::array<int, 2> rows = {1000, 777};
  const auto value = [](int rank, int half, int round, int row) {
    return static_cast<float>((rank + 2 * half + 3 * round + row) % 16);  // sums are exact in bf16
  };
  const auto bits = [&](int rank, int half, int round, int rows_of) {
    std::vector<uint16_t> of(static_cast<size_t>(rows_of) * kWidth);
    for (size_t i = 0; i < of.size(); ++i)
      of[i] = FloatToBf16(value(rank, half, round, static_cast<int>(i / kWidth)));
    return of;
  };
  std::vector<std::string> wrong(devices.size());
  OnRanks(*group, devices, [&](int rank, cudaStream_t stream) {
    std::vector<std::unique_ptr<DeviceArray<uint16_t>>> partial, sum, all;
    std::array<std::vector<std::unique_ptr<DeviceArray<uint16_t>>>, 2> inputs, results;
    for (const int half : {0, 1}) {
      const auto count = static_cast<size_t>(rows[static_cast<size_t>(half)]) * kWidth;
      for (auto* buffers : {&partial, &sum, &all})
        buffers->push_back(std::make_unique<DeviceArray<uint16_t>>(count));
      for (int round = 0; round < kRounds; ++round) {
        inputs[static_cast<size_t>(half)].push_back(std::make_unique<DeviceArray<uint16_t>>(
            bits(rank, half, round, rows[static_cast<size_t>(half)])));
        results[static_cast<size_t>(half)].push_back(
            std::make_unique<DeviceArray<uint16_t>>(count));
      }
      group->Reserve(rank, {nullptr, rows[static_cast<size_t>(half)], kWidth * 2, true, half});
    }
    group->BeginStep(rank);
    const auto copy = [&](void* to, const void* from, size_t half) {
      Check(cudaMemcpyAsync(to, from, static_cast<size_t>(rows[half]) * kWidth * 2,
                            cudaMemcpyDeviceToDevice, stream));
    };
    const auto shared = [&](size_t half) {
      return SharedRows{partial[half]->data(), rows[half], kWidth * 2, true,
                        static_cast<int>(half)};
    };
    const auto make = [&](size_t half, int round) {
      copy(partial[half]->data(), inputs[half][static_cast<size_t>(round)]->data(), half);
      group->Send(rank, shared(half), stream);
    };
    const auto add = [&](size_t half) {
      const RowRange own = ShardOfRows(rows[half], rank, world());
      SumAddNormParams p{};
      p.first_row = own.begin;
      p.num_rows = own.count;
      p.hidden = kWidth;
      p.residual = reinterpret_cast<bf16*>(sum[half]->data());
      p.replace = true;
      group->ExchangeAddNorm(rank, shared(half), p, stream);
      const GatherParams gathered{sum[half]->data(), all[half]->data(), kWidth * 2};
      group->GatherBeside(rank, static_cast<int>(half), {&gathered, 1}, rows[half], stream);
    };
    const auto read = [&](size_t half, int round) {
      group->Arrive(rank, static_cast<int>(half), stream);
      copy(results[half][static_cast<size_t>(round)]->data(), all[half]->data(), half);
    };
    make(0, 0);
    for (int round = 0; round < kRounds; ++round) {
      add(0);
      make(1, round);
      read(0, round);
      add(1);
      if (round + 1 < kRounds) make(0, round + 1);
      read(1, round);
    }
    Check(cudaStreamSynchronize(stream));
    for (size_t half = 0; half < 2; ++half) {
      for (int round = 0; round < kRounds; ++round) {
        const auto got = results[half][static_cast<size_t>(round)]->Get();
        for (size_t i = 0; i < got.size(); ++i) {
          float expected = 0;
          for (int r = 0; r < world(); ++r)
            expected += value(r, static_cast<int>(half), round, static_cast<int>(i / kWidth));
          if (Bf16ToFloat(got[i]) == expected) continue;
          wrong[static_cast<size_t>(rank)] =
              fmt::format("half {}, round {}, value {}: {} and not {}", half, round, i,
                          Bf16ToFloat(got[i]), expected);
          return;
        }
      }
    }
  });
  for (const std::string& what : wrong) EXPECT_EQ(what, "");
}

// Hundreds in a row without a word from the host, of changing sizes: none reads what comes next.
TEST_P(CudaGroupTest, ExchangesInARowDoNotMix) {
  SKIP_WITHOUT_GPU();
  if (const std::string missing = Missing(); !missing.empty()) GTEST_SKIP() << missing;
  constexpr int kWidth = 7168, kRounds = 300;
  const std::vector<int> devices = Devices(world());
  const auto group = MakeGroup(devices, comm());
  const auto rows_of = [](int round) { return 1 + round * 7 % 40; };
  std::vector<std::vector<std::vector<uint16_t>>> got(devices.size());
  OnRanks(*group, devices, [&](int rank, cudaStream_t stream) {
    DeviceArray<uint16_t> partial(40 * kWidth), sums(size_t{kRounds} * 40 * kWidth);
    std::vector<std::vector<uint16_t>> sources;
    for (int i = 0; i < 4; ++i)
      sources.push_back(SomeRows(40 * kWidth, static_cast<uint32_t>(100 * rank + i)));
    std::vector<std::unique_ptr<DeviceArray<uint16_t>>> inputs;
    for (const auto& source : sources)
      inputs.push_back(std::make_unique<DeviceArray<uint16_t>>(source));
    group->Reserve(rank, {nullptr, 40, kWidth * 2, /*sharded=*/false});
    group->BeginStep(rank);
    for (int round = 0; round < kRounds; ++round) {
      const int rows = rows_of(round);
      // The buffer that is shared changes right behind, as a layer's does.
      Check(cudaMemcpyAsync(partial.data(), inputs[static_cast<size_t>(round % 4)]->data(),
                            static_cast<size_t>(rows) * kWidth * 2, cudaMemcpyDeviceToDevice,
                            stream));
      SumAddNormParams p{};
      p.num_rows = rows;
      p.hidden = kWidth;
      p.residual =
          reinterpret_cast<bf16*>(sums.data() + size_t{static_cast<unsigned>(round)} * 40 * kWidth);
      p.replace = true;
      group->ExchangeAddNorm(rank, {partial.data(), rows, kWidth * 2, false}, p, stream);
    }
    Check(cudaStreamSynchronize(stream));
    const auto all = sums.Get();
    for (int round = 0; round < kRounds; ++round) {
      const auto begin = all.begin() + int64_t{round} * 40 * kWidth;
      got[static_cast<size_t>(rank)].emplace_back(begin, begin + rows_of(round) * kWidth);
    }
  });
  for (size_t rank = 1; rank < devices.size(); ++rank) ASSERT_TRUE(got[rank] == got[0]);
  // Rounds of the same source and size are the same; the sources differ.
  for (int round = 160; round < kRounds; ++round)
    ASSERT_TRUE(got[0][static_cast<size_t>(round)] == got[0][static_cast<size_t>(round - 160)])
        << round;
  ASSERT_FALSE(got[0][0][0] == got[0][1][0] && got[0][0][1] == got[0][1][1]);
}

// Two ranks, 2 B to 450 MB, sizes as likely in every decade: STATETAP_EXCHANGES of them [12].
TEST_P(CudaGroupTest, RandomSizesUpToHalfAGigabyte) {
  SKIP_WITHOUT_GPU();
  if (world() != 2) GTEST_SKIP() << "two ranks only";
  if (const std::string missing = Missing(); !missing.empty()) GTEST_SKIP() << missing;
  const char* asked = std::getenv("STATETAP_EXCHANGES");
  const int exchanges = asked == nullptr ? 12 : std::atoi(asked);
  const std::vector<int> devices = Devices(2);
  const auto group = MakeGroup(devices, comm());
  constexpr size_t kMost = 225'000'000;
  std::vector<std::vector<uint16_t>> pool(2);
  for (size_t rank = 0; rank < 2; ++rank) pool[rank] = SomeRows(kMost, static_cast<uint32_t>(rank));
  std::mt19937 random(7);
  double bytes = 0;
  for (int i = 0; i < exchanges; ++i) {
    const double share = std::generate_canonical<double, 32>(random);
    auto count = static_cast<size_t>(std::exp(share * std::log(static_cast<double>(kMost))));
    if (i == 0) count = 1;
    if (i == 1) count = kMost;
    const int width = count >= 7168 ? 7168 : static_cast<int>(1 + random() % count);
    const int rows = static_cast<int>(count / static_cast<size_t>(width));
    const size_t used = static_cast<size_t>(rows) * static_cast<size_t>(width);
    Exchange(*group, devices, pool, random() % (kMost - used + 1) / 8 * 8, rows, width, i % 2 == 0);
    if (HasFatalFailure()) return;
    bytes += static_cast<double>(used) * 2;
  }
  fmt::print("2 ranks over {}: {} exchanges, {:.1f} GB in all, equal bit for bit and to the CPU\n",
             group->name(), exchanges, bytes / 1e9);
}

INSTANTIATE_TEST_SUITE_P(
    Every, CudaGroupTest,
    ::testing::Combine(::testing::Values(CudaOptions::Comm::kPeer, CudaOptions::Comm::kNccl),
                       ::testing::Values(1, 2, 3, 4, 8)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param) == CudaOptions::Comm::kPeer ? "Peer" : "Nccl") +
             std::to_string(std::get<1>(info.param));
    });

// A device that does not come to an end, its host thread awake.
TEST(CudaGroupFaultTest, AStuckDeviceIsNoticed) {
  SKIP_WITHOUT_GPU();
  const auto backends = MakeCudaBackends(2, {});
  std::atomic<bool> go_on = false;
  {
    RankGroup ranks(backends, std::chrono::milliseconds(500));
    const absl::Status status = ranks.RunAll([&](int rank) {
      auto& backend = static_cast<CudaBackend&>(*backends[static_cast<size_t>(rank)]);
      Check(cudaSetDevice(rank % NumGpus()));
      if (rank == 1) {
        Check(cudaLaunchHostFunc(
            backend.stream(),
            [](void* flag) {
              while (!*static_cast<std::atomic<bool>*>(flag)) std::this_thread::yield();
            },
            &go_on));
      }
      backend.Finish();
    });
    EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kUnavailable, "a device is stuck"));
  }
  go_on = true;
}

}  // namespace
}  // namespace statetap::cuda
