// Which samples a stream sends: several jobs, order, split, expression; and random access.
#include <algorithm>
#include <fstream>
#include <future>
#include <set>

#include "server/features/feature_stream.h"
#include "server/features/sample_fetch.h"
#include "tests/support/job_harness.h"

namespace statetap {
namespace {

using testing::IdsSample;
using testing::JobHarness;
using testing::StatusIs;

using Ids = std::vector<std::string>;

class StreamOrderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    harness_.Run();
    first_ = Store("a", 10, {});
    second_ = Store("b", 7, {});
    shards_.emplace(*harness_.store, harness_.folders());
  }
  JobRecord Store(const std::string& name, int count, const v1::JobOptions& base) {
    v1::JobOptions options = base;
    options.set_name(name);
    std::vector<v1::SampleInput> samples;
    for (int i = 0; i < count; ++i) {
      samples.push_back(IdsSample(name + std::to_string(i), std::vector<int32_t>(4 + i, i + 1)));
      samples.back().set_source(i % 2 == 0 ? "even" : "odd");
    }
    const auto job = harness_.Submit(options, samples);
    EXPECT_OK(job);
    const JobRecord ended = harness_.WaitForEnd(*job);
    EXPECT_EQ(ended.counts.stored, count);
    return ended;
  }
  v1::StreamStart Start(const std::vector<std::string>& jobs = {"a", "b"}) {
    v1::StreamStart start;
    start.mutable_jobs()->Assign(jobs.begin(), jobs.end());
    return start;
  }
  struct Received {
    std::vector<v1::StreamHeader> headers;
    Ids ids;
    std::vector<int> jobs;
    std::vector<uint64_t> deliveries;
    v1::StreamEnd end;
    size_t bytes = 0;
  };
  static FeatureOutlet Into(Received& received) {
    return [&received](const v1::StreamFeaturesResponse& message, const StatesView& states) {
      if (message.has_header()) received.headers.push_back(message.header());
      if (message.has_sample()) {
        received.ids.push_back(message.sample().id());
        received.jobs.push_back(message.sample().job_index());
        received.deliveries.push_back(message.sample().delivery());
      }
      received.bytes += states.bytes();
      if (message.has_end()) received.end = message.end();
      return true;
    };
  }
  // The client acknowledges the first `acknowledge` samples and closes at the end.
  Received Take(const v1::StreamStart& start, uint64_t acknowledge = 0) {
    Received received;
    auto stream = FeatureStream::Open(*harness_.store, *shards_, groups_, start);
    EXPECT_OK(stream);
    const FeatureOutlet outlet = Into(received);
    EXPECT_OK(
        (*stream)->Run([&](const v1::StreamFeaturesResponse& message, const StatesView& states) {
          outlet(message, states);
          if (message.has_end()) {
            if (acknowledge > 0) {
              EXPECT_OK((*stream)->Acknowledge(acknowledge));
            }
            (*stream)->Close();
          }
          return true;
        }));
    return received;
  }
  absl::Status Refused(const v1::StreamStart& start) {
    return FeatureStream::Open(*harness_.store, *shards_, groups_, start).status();
  }
  v1::StreamDescription Describe(const v1::StreamStart& start) {
    const auto order = SampleOrder::Of(*harness_.store, start);
    EXPECT_OK(order);
    const auto description = order->Describe();
    EXPECT_OK(description);
    return *description;
  }
  absl::Status Fetch(const v1::GetSamplesRequest& request, Received& received) {
    return SendSamples(*harness_.store, *shards_, request, Into(received));
  }

  JobHarness harness_;
  JobRecord first_, second_;
  ConsumerGroups groups_;
  std::optional<ShardCache> shards_;
};

TEST_F(StreamOrderTest, JobsComeOneAfterAnotherEachWithItsHeader) {
  const Received received = Take(Start({"b", first_.id}));
  ASSERT_EQ(received.ids.size(), 17u);
  ASSERT_EQ(received.headers.size(), 2u);
  EXPECT_EQ(received.headers[0].job(), second_.id);
  EXPECT_EQ(received.headers[0].samples(), 17);
  EXPECT_EQ(received.headers[0].remaining(), 17);
  EXPECT_EQ(received.headers[1].job(), first_.id);
  EXPECT_EQ(received.headers[1].job_index(), 1);
  for (size_t i = 0; i < 17; ++i) {
    EXPECT_EQ(received.jobs[i], i < 7 ? 0 : 1);
    EXPECT_EQ(received.ids[i][0], i < 7 ? 'b' : 'a');
    EXPECT_EQ(received.deliveries[i], i + 1);
  }
}

TEST_F(StreamOrderTest, AcknowledgementsOfSeveralJobsResumeInAnyStreamOfTheGroup) {
  const Ids all = Take(Start(), 12).ids;  // all of a, two of b
  EXPECT_EQ(Take(Start()).ids, Ids(all.begin() + 12, all.end()));
  v1::StreamStart alone;
  alone.set_job("a");
  EXPECT_TRUE(Take(alone).ids.empty());
  alone.set_job("b");
  EXPECT_EQ(Take(alone).ids, Ids(all.begin() + 12, all.end()));
}

TEST_F(StreamOrderTest, WhatAStreamLeftIsTheGroupsOnceItHasRun) {
  auto stream = FeatureStream::Open(*harness_.store, *shards_, groups_, Start());
  ASSERT_OK(stream);
  ASSERT_OK((*stream)->Run([&](const v1::StreamFeaturesResponse& message, const StatesView&) {
    if (message.has_end()) {
      EXPECT_OK((*stream)->Acknowledge(5));
      (*stream)->Close();
    }
    return true;
  }));
  EXPECT_EQ(Take(Start()).ids.size(), 12u) << "while the first is still there";
}

TEST_F(StreamOrderTest, AShuffledOrderIsOfTheSeedAlone) {
  v1::StreamStart start = Start();
  const Ids stored = Take(start).ids;
  start.set_order(v1::STREAM_ORDER_SHUFFLED);
  start.set_seed(7);
  const Ids shuffled = Take(start, 5).ids;
  EXPECT_NE(shuffled, stored);
  EXPECT_THAT(shuffled, ::testing::UnorderedElementsAreArray(stored));
  EXPECT_EQ(Take(start).ids, Ids(shuffled.begin() + 5, shuffled.end()));  // resumes
  start.set_group("another");
  EXPECT_EQ(Take(start).ids, shuffled);
  start.set_seed(8);
  EXPECT_NE(Take(start).ids, shuffled);
  // Leaving one out moves no other.
  ASSERT_OK(harness_.store->MarkExcluded(first_.key, std::vector<int64_t>{3},
                                         JobStore::Exclusion::kExclude));
  Ids without = shuffled;
  std::erase(without, "a3");
  start.set_seed(7);
  EXPECT_EQ(Take(start).ids, without);
}

TEST_F(StreamOrderTest, RanksSplitTheOrderAndPlacesOutliveAcknowledgements) {
  for (const v1::StreamOrder order : {v1::STREAM_ORDER_STORED, v1::STREAM_ORDER_SHUFFLED}) {
    v1::StreamStart start = Start();
    start.set_order(order);
    start.set_group(fmt::format("g{}", +order));
    const Ids all = Take(start).ids;
    start.set_world(4);
    Ids parts[4];
    for (int rank = 0; rank < 4; ++rank) {
      start.set_rank(rank);
      parts[rank] = Take(start, 2).ids;
      for (size_t i = 0; i < parts[rank].size(); ++i)
        EXPECT_EQ(parts[rank][i], all[i * 4 + static_cast<size_t>(rank)]);
    }
    EXPECT_EQ(parts[0].size(), 5u);  // 17 = 5 + 4 + 4 + 4
    EXPECT_EQ(parts[3].size(), 4u);
    EXPECT_EQ(Take(start).ids, Ids(parts[3].begin() + 2, parts[3].end()));
    const v1::StreamDescription description = Describe(start);
    EXPECT_EQ(description.samples(), 4);
    EXPECT_EQ(description.acknowledged(), 2);
  }
}

TEST_F(StreamOrderTest, EqualCountsLeaveOutTheLastOnesAndSaySo) {
  v1::StreamStart start = Start();
  start.set_world(4);
  start.set_equal_counts(true);
  std::set<std::string> ids;
  for (int rank = 0; rank < 4; ++rank) {
    start.set_rank(rank);
    const Received received = Take(start);
    EXPECT_EQ(received.ids.size(), 4u);
    EXPECT_EQ(received.headers[0].left_out(), 1);
    ids.insert(received.ids.begin(), received.ids.end());
  }
  EXPECT_EQ(ids.size(), 16u);
  EXPECT_FALSE(ids.contains("b6"));
  const v1::StreamDescription description = Describe(start);
  EXPECT_EQ(description.samples(), 4);
  EXPECT_EQ(description.left_out(), 1);
  EXPECT_TRUE(description.complete());
  EXPECT_THAT(description.jobs(), ::testing::ElementsAre(first_.id, second_.id));
}

TEST_F(StreamOrderTest, TakesWhatTheExpressionHoldsFor) {
  v1::StreamStart start = Start();
  start.set_where("source == \"odd\" and tokens > 6");
  EXPECT_THAT(Take(start).ids, ::testing::ElementsAre("a3", "a5", "a7", "a9", "b3", "b5"));
  EXPECT_EQ(Describe(start).tokens(), 7 + 9 + 11 + 13 + 7 + 9);
  start.set_where("source = 1");
  EXPECT_THAT(Refused(start), StatusIs(absl::StatusCode::kInvalidArgument, "where: "));
}

TEST_F(StreamOrderTest, WhatCannotBeIsRefusedByField) {
  const auto refused = [&](const auto& change) {
    v1::StreamStart start = Start();
    change(start);
    return Refused(start);
  };
  using Start = v1::StreamStart;
  EXPECT_THAT(refused([](Start& start) { start.set_job("a"); }),
              StatusIs(absl::StatusCode::kInvalidArgument, "jobs: give either"));
  EXPECT_THAT(refused([&](Start& start) { start.add_jobs(first_.id); }),
              StatusIs(absl::StatusCode::kInvalidArgument, "is named twice"));
  EXPECT_THAT(refused([](Start& start) { start.add_jobs("c"); }),
              StatusIs(absl::StatusCode::kNotFound, "\"c\""));
  EXPECT_THAT(refused([](Start& start) { start.set_rank(1); }),
              StatusIs(absl::StatusCode::kInvalidArgument, "rank: 1"));
  EXPECT_THAT(refused([](Start& start) {
                start.set_world(2);
                start.set_rank(2);
              }),
              StatusIs(absl::StatusCode::kInvalidArgument, "rank: 2 is not in 0 to 1"));
  EXPECT_THAT(refused([](Start& start) { start.set_world(-1); }),
              StatusIs(absl::StatusCode::kInvalidArgument, "world: -1"));
  EXPECT_THAT(refused([](Start& start) { start.set_order(static_cast<v1::StreamOrder>(9)); }),
              StatusIs(absl::StatusCode::kInvalidArgument, "order: 9"));
}

TEST_F(StreamOrderTest, JobsWithOtherTapsNeedBoundariesThatAllHave) {
  v1::JobOptions other;
  for (const int tap : {1, 4, 6}) other.add_taps(tap);
  Store("c", 3, other);
  v1::StreamStart start = Start({"a", "c"});
  Received received;
  const auto run = [&] {
    auto stream = FeatureStream::Open(*harness_.store, *shards_, groups_, start);
    (*stream)->Close();
    return (*stream)->Run(Into(received));
  };
  EXPECT_THAT(run(),
              StatusIs(absl::StatusCode::kInvalidArgument, "choose of those they share (4,8)"));
  EXPECT_TRUE(received.headers.empty());
  start.add_boundaries(5);
  EXPECT_THAT(run(), StatusIs(absl::StatusCode::kInvalidArgument, "boundaries: 5 is not stored"));
  start.mutable_boundaries()->Clear();
  start.add_boundaries(4);
  ASSERT_OK(run());
  ASSERT_EQ(received.headers.size(), 2u);
  EXPECT_THAT(received.headers[0].boundaries(), ::testing::ElementsAre(4));
  EXPECT_THAT(received.headers[1].boundaries(), ::testing::ElementsAre(4));
  EXPECT_EQ(received.ids.size(), 13u);
}

TEST_F(StreamOrderTest, AShuffledStreamThatFollowsWaitsForTheEnd) {
  harness_.engine->faults.step = std::chrono::milliseconds(2);
  v1::JobOptions options;
  options.set_name("long");
  std::vector<v1::SampleInput> samples;
  for (int i = 0; i < 30; ++i)
    samples.push_back(IdsSample(fmt::format("f{}", i), std::vector<int32_t>(40, i + 1)));
  ASSERT_OK(harness_.Submit(options, samples));
  v1::StreamStart start = Start({"long", "a"});
  start.set_order(v1::STREAM_ORDER_SHUFFLED);
  EXPECT_FALSE(Describe(start).complete());
  start.set_follow(true);
  const Ids followed = Take(start).ids;
  EXPECT_EQ(followed.size(), 40u);
  EXPECT_EQ(Take(start).ids, followed);
}

TEST_F(StreamOrderTest, AVanishedStreamGivesBackInAShuffledOrderToo) {
  v1::StreamStart start = Start();
  start.set_order(v1::STREAM_ORDER_SHUFFLED);
  const Ids all = Take(start).ids;
  start.set_credit_bytes(1);
  Received first;
  auto vanishing = FeatureStream::Open(*harness_.store, *shards_, groups_, start);
  ASSERT_OK(vanishing);
  std::atomic<int> sent = 0;
  auto run = std::async(std::launch::async, [&] {
    return (*vanishing)->Run([&](const v1::StreamFeaturesResponse& message, const StatesView&) {
      sent += message.has_sample() ? 1 : 0;
      return true;
    });
  });
  while (sent < 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  start.set_credit_bytes(0);
  Ids taken = Take(start, 15).ids;  // it holds one and has leased another
  EXPECT_EQ(taken.size(), 15u);
  (*vanishing)->Stop(absl::CancelledError("the client has gone"));
  EXPECT_THAT(run.get(), StatusIs(absl::StatusCode::kCancelled, "gone"));
  vanishing->reset();
  const Ids rest = Take(start, 2).ids;
  taken.insert(taken.end(), rest.begin(), rest.end());
  EXPECT_THAT(taken, ::testing::UnorderedElementsAreArray(all));
}

TEST_F(StreamOrderTest, RowsAndIdsAreFetchedInTheOrderAsked) {
  v1::StreamStart alone;
  alone.set_job("a");
  const Ids stored = Take(alone).ids;
  v1::GetSamplesRequest request;
  request.set_job("a");
  for (const int64_t row : {9, 0, 4, 0}) request.add_rows(row);
  Received received;
  ASSERT_OK(Fetch(request, received));
  EXPECT_EQ(received.ids, (Ids{stored[9], stored[0], stored[4], stored[0]}));
  EXPECT_THAT(received.deliveries, ::testing::ElementsAre(1, 2, 3, 4));
  ASSERT_EQ(received.headers.size(), 1u);
  EXPECT_EQ(received.headers[0].samples(), 4);
  EXPECT_EQ(received.end.samples(), 4);

  request.clear_rows();
  request.add_ids("a7");
  request.add_ids("a2");
  request.add_boundaries(8);
  Received by_id;
  ASSERT_OK(Fetch(request, by_id));
  EXPECT_EQ(by_id.ids, (Ids{"a7", "a2"}));
  EXPECT_EQ(by_id.bytes, (11u + 6u) * testing::kHidden * 2);
}

TEST_F(StreamOrderTest, SamplesThatWereFetchedAreAcknowledgedByIdAllOrNone) {
  v1::AcknowledgeRequest request;
  request.set_job("a");
  request.set_group("g");
  const auto acknowledge = [&] { return AcknowledgeSamples(*harness_.store, request).status(); };
  EXPECT_THAT(acknowledge(), StatusIs(absl::StatusCode::kInvalidArgument, "ids: 0 were given"));
  request.add_ids("a7");
  request.add_ids("b1");
  EXPECT_THAT(acknowledge(), StatusIs(absl::StatusCode::kNotFound, "\"b1\""));
  v1::StreamStart start = Start({"a"});
  start.set_group("g");
  EXPECT_EQ(Take(start).ids.size(), 10u);
  request.set_ids(1, "a2");
  ASSERT_OK(acknowledge());
  ASSERT_OK(acknowledge());
  const Ids rest = Take(start).ids;
  EXPECT_EQ(rest.size(), 8u);
  EXPECT_EQ(std::ranges::count(rest, "a7") + std::ranges::count(rest, "a2"), 0);
  EXPECT_EQ(Take(Start({"a"})).ids.size(), 10u) << "another group's";
}

TEST_F(StreamOrderTest, WhatCannotBeFetchedIsNamed) {
  v1::GetSamplesRequest request;
  request.set_job("a");
  Received received;
  EXPECT_THAT(Fetch(request, received), StatusIs(absl::StatusCode::kInvalidArgument, "rows: 0"));
  request.add_rows(10);
  EXPECT_THAT(Fetch(request, received),
              StatusIs(absl::StatusCode::kOutOfRange, "rows: 10 is not there; the job has 10"));
  request.set_rows(0, -1);
  EXPECT_THAT(Fetch(request, received), StatusIs(absl::StatusCode::kOutOfRange, "rows: -1"));
  request.add_ids("a1");
  EXPECT_THAT(Fetch(request, received),
              StatusIs(absl::StatusCode::kInvalidArgument, "either rows or ids"));
  request.clear_rows();
  request.add_ids("b1");
  EXPECT_THAT(Fetch(request, received), StatusIs(absl::StatusCode::kNotFound, "\"b1\""));
  EXPECT_TRUE(received.headers.empty());
  // A file that was cut: the end names it.
  ASSERT_OK_AND_ASSIGN(const auto shards, harness_.store->Shards(first_.key));
  const auto path = harness_.folders().FromStored(shards[0].path);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  request.clear_ids();
  request.add_rows(1);
  EXPECT_THAT(Fetch(request, received), StatusIs(absl::StatusCode::kDataLoss, "shard-000001.h5"));
  EXPECT_EQ(received.end.samples(), 0);
  EXPECT_EQ(received.end.damaged_size(), 1);
}

}  // namespace
}  // namespace statetap
