#include "extractor/base/once_map.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace statetap {
namespace {

TEST(OnceMapTest, AValueIsMadeOnceForAllThreads) {
  OnceMap<int, int> values;
  std::atomic<int> made = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      for (int key = 0; key < 100; ++key)
        EXPECT_EQ(values.Get(key, [&] { return ++made, key * key; }), key * key);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(made, 100);
}

TEST(OnceMapTest, OtherKeysDoNotWait) {
  OnceMap<int, int> values;
  const int sum = values.Get(1, [&] {
    int other = 0;
    std::thread([&] { other = values.Get(2, [] { return 20; }); }).join();
    return 1 + other;
  });
  EXPECT_EQ(sum, 21);
}

TEST(OnceMapTest, WhoeverAsksAfterAFailureMakesTheValue) {
  OnceMap<std::string, int> values;
  const auto fail = []() -> int { throw std::runtime_error("no"); };
  EXPECT_THROW(values.Get("a", fail), std::runtime_error);
  EXPECT_THROW(values.Get("a", fail), std::runtime_error);
  EXPECT_EQ(values.Get("a", [] { return 5; }), 5);
  EXPECT_EQ(values.Get("a", fail), 5);
}

// A thread that asks while the value is made waits and gets the failure; one that is late makes its
// own. Tried until one was not late.
TEST(OnceMapTest, AFailureReachesThoseThatWait) {
  OnceMap<int, int> values;
  bool reached = false;
  for (int key = 0; !reached; ++key) {
    std::atomic<bool> asks = false;
    std::thread waits;
    EXPECT_THROW(values.Get(key,
                            [&]() -> int {
                              waits = std::thread([&] {
                                asks = true;
                                try {
                                  EXPECT_EQ(values.Get(key, [] { return 7; }), 7);
                                } catch (const std::runtime_error&) {
                                  reached = true;
                                }
                              });
                              while (!asks) std::this_thread::yield();
                              std::this_thread::sleep_for(std::chrono::milliseconds(10));
                              throw std::runtime_error("no");
                            }),
                 std::runtime_error);
    waits.join();
  }
}

}  // namespace
}  // namespace statetap
