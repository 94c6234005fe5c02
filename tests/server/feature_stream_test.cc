#include "server/features/feature_stream.h"

#include <cstring>
#include <fstream>
#include <future>

#include "extractor/base/file.h"
#include "server/jobs/eviction.h"
#include "tests/support/job_harness.h"

namespace statetap {
namespace {

using testing::IdsSample;
using testing::JobHarness;
using testing::StatusIs;

constexpr uint64_t kSampleBytes = 20 * 4 * testing::kHidden * 2;  // 20 tokens, 4 boundaries

// Everything that a stream sent.
struct Received {
  std::mutex mutex;
  v1::StreamHeader header;
  std::vector<std::string> ids;
  std::map<std::string, std::map<int, std::string>> states;  // by id and boundary
  std::optional<int64_t> end;
  std::atomic<uint64_t> deliveries{0};
};

class FeatureStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    harness_.Run();
    std::vector<v1::SampleInput> samples;
    for (int i = 0; i < 12; ++i)
      samples.push_back(IdsSample(fmt::format("s{}", i), std::vector<int32_t>(20, i + 1)));
    auto job = harness_.Submit({}, samples);
    ASSERT_OK(job);
    job_ = harness_.WaitForEnd(*job);
    ASSERT_EQ(job_.counts.stored, 12);
    shards_.emplace(*harness_.store, harness_.folders());
  }
  std::unique_ptr<FeatureStream> Open(const v1::StreamStart& start) {
    auto stream = FeatureStream::Open(*harness_.store, *shards_, groups_, start);
    EXPECT_OK(stream);
    return *std::move(stream);
  }
  v1::StreamStart Start(const std::string& group = "") {
    v1::StreamStart start;
    start.set_job(job_.id);
    start.set_group(group);
    return start;
  }
  FeatureOutlet Into(Received& received) {
    return [&](const v1::StreamFeaturesResponse& message, const StatesView& states) {
      const std::lock_guard lock(received.mutex);
      if (message.has_header()) received.header = message.header();
      if (message.has_sample()) {
        received.ids.push_back(message.sample().id());
        received.deliveries = message.sample().delivery();
      }
      if (message.has_data()) {
        EXPECT_LE(states.bytes(), size_t{2} << 20);
        std::string& to = received.states[received.ids.back()][message.data().boundary()];
        for (const auto& part : states.parts)
          to.append(reinterpret_cast<const char*>(part.data()), part.size());
      }
      if (message.has_end()) received.end = message.end().samples();
      return true;
    };
  }
  // Runs a stream whose client acknowledges the first `acknowledge` samples, or all, and closes.
  std::vector<std::string> Take(const std::string& group,
                                std::optional<uint64_t> acknowledge = std::nullopt) {
    Received received;
    const auto stream = Open(Start(group));
    const FeatureOutlet outlet = Into(received);
    const absl::Status status =
        stream->Run([&](const v1::StreamFeaturesResponse& message, const StatesView& states) {
          outlet(message, states);
          if (message.has_end()) {
            const uint64_t delivered = acknowledge.value_or(received.deliveries);
            if (delivered > 0) {
              EXPECT_OK(stream->Acknowledge(delivered));
            }
            stream->Close();
          }
          return true;
        });
    EXPECT_OK(status);
    EXPECT_EQ(received.end, static_cast<int64_t>(received.ids.size()));
    return received.ids;
  }
  std::vector<std::string> StoredOrder() {
    std::vector<std::string> ids;
    const auto rows = harness_.store->Shards(job_.key);
    for (const ShardRow& shard : *rows) {
      const auto reader = shards_->Open(shard);
      for (const SampleEntry& entry : (*reader)->samples()) ids.push_back(entry.id);
    }
    return ids;
  }

  JobHarness harness_;
  JobRecord job_;
  ConsumerGroups groups_;
  std::optional<ShardCache> shards_;
};

TEST_F(FeatureStreamTest, SendsStoredBytesInStoredOrder) {
  Received received;
  const auto stream = Open(Start());
  stream->Close();
  ASSERT_OK(stream->Run(Into(received)));
  EXPECT_EQ(received.ids, StoredOrder());
  EXPECT_EQ(received.header.remaining(), 12);
  EXPECT_EQ(received.header.hidden(), testing::kHidden);
  EXPECT_THAT(received.header.boundaries(), ::testing::ElementsAre(2, 4, 5, 8));
  ASSERT_OK_AND_ASSIGN(const auto rows, harness_.store->Shards(job_.key));
  ASSERT_OK_AND_ASSIGN(const auto reader, shards_->Open(rows[0]));
  const SampleEntry& entry = reader->samples()[3];
  std::vector<uint16_t> states(static_cast<size_t>(entry.rows * testing::kHidden));
  ASSERT_OK(reader->ReadStates(/*boundary_index=*/2, entry.first_row, states));
  const std::string& sent = received.states[entry.id][5];
  ASSERT_EQ(sent.size(), states.size() * 2);
  EXPECT_EQ(std::memcmp(sent.data(), states.data(), sent.size()), 0);
}

TEST_F(FeatureStreamTest, ResumesBehindWhatWasAcknowledgedAndGroupsAreApart) {
  const std::vector<std::string> all = StoredOrder();
  EXPECT_EQ(Take("g", 5), all);
  EXPECT_EQ(Take("g", 0), std::vector<std::string>(all.begin() + 5, all.end()));
  EXPECT_EQ(Take("other", 12), all);
  EXPECT_TRUE(Take("other", 0).empty());
  harness_.Restart();  // acknowledgements survive the server
  shards_.emplace(*harness_.store, harness_.folders());
  EXPECT_EQ(Take("g", 7), std::vector<std::string>(all.begin() + 5, all.end()));
  EXPECT_TRUE(Take("g", 0).empty());
}

TEST_F(FeatureStreamTest, CreditBoundsWhatIsInFlight) {
  v1::StreamStart start = Start();
  start.set_credit_bytes(2 * kSampleBytes);
  Received received;
  const auto stream = Open(start);
  stream->Close();
  auto run = std::async(std::launch::async, [&] { return stream->Run(Into(received)); });
  const auto settle = [&](uint64_t deliveries) {
    for (int i = 0; i < 500 && received.deliveries < deliveries; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_EQ(received.deliveries, deliveries);
  };
  settle(2);
  EXPECT_OK(stream->Acknowledge(2));  // an acknowledgement is no credit
  settle(2);
  stream->AddCredit(kSampleBytes);
  settle(3);
  stream->AddCredit(100 * kSampleBytes);  // more than was sent counts as all of it
  settle(5);
  for (int i = 0; i < 12; ++i) {
    stream->AddCredit(2 * kSampleBytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_OK(run.get());
  EXPECT_EQ(received.ids.size(), 12u);
}

TEST_F(FeatureStreamTest, OneSampleIsAllowedWhateverTheCredit) {
  v1::StreamStart start = Start();
  start.set_credit_bytes(1);
  Received received;
  const auto stream = Open(start);
  stream->Close();
  auto run = std::async(std::launch::async, [&] { return stream->Run(Into(received)); });
  for (int i = 0; i < 2000 && received.deliveries < 12; ++i) {
    stream->AddCredit(kSampleBytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_OK(run.get());
  EXPECT_EQ(received.ids.size(), 12u);
}

TEST_F(FeatureStreamTest, StreamsOfAGroupShareAndAVanishedOneGivesBack) {
  v1::StreamStart start = Start("g");
  start.set_credit_bytes(3 * kSampleBytes);
  start.set_follow(true);
  Received first, second;
  auto vanishing = Open(start);
  auto run = std::async(std::launch::async, [&] { return vanishing->Run(Into(first)); });
  for (int i = 0; i < 500 && first.deliveries < 3; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_OK(vanishing->Acknowledge(1));
  // Another one of the group gets the rest while the first holds 3 unread ones (and may have leased
  // a 4th).
  const size_t taken = Take("g").size();
  EXPECT_THAT(taken, ::testing::AnyOf(8, 9));
  vanishing->Stop(absl::CancelledError("the client has gone"));
  EXPECT_THAT(run.get(), StatusIs(absl::StatusCode::kCancelled, "gone"));
  vanishing.reset();
  EXPECT_EQ(Take("g").size(), 11 - taken);
  EXPECT_TRUE(Take("g").empty());
}

TEST_F(FeatureStreamTest, SelectsBoundariesOrSaysWhichIsMissing) {
  v1::StreamStart start = Start();
  start.add_boundaries(4);
  start.add_boundaries(8);
  Received received;
  auto stream = Open(start);
  stream->Close();
  ASSERT_OK(stream->Run(Into(received)));
  EXPECT_THAT(received.header.boundaries(), ::testing::ElementsAre(4, 8));
  EXPECT_EQ(received.states["s0"].size(), 2u);
  start.clear_boundaries();
  start.add_boundaries(3);
  EXPECT_THAT(Open(start)->Run(Into(received)),
              StatusIs(absl::StatusCode::kInvalidArgument, "boundaries: 3"));
  for (const std::vector<int>& wrong :
       {std::vector<int>{-1, 2}, std::vector<int>{2, 2}, std::vector<int>{5, 2}}) {
    start.mutable_boundaries()->Assign(wrong.begin(), wrong.end());
    EXPECT_THAT(FeatureStream::Open(*harness_.store, *shards_, groups_, start).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, "boundaries: "));
  }
}

// What one stream read ahead and another one's client acknowledged meanwhile is not sent again.
TEST_F(FeatureStreamTest, StreamsOfAGroupNeverSendASampleTwice) {
  v1::StreamStart start = Start("g");
  start.set_credit_bytes(2 * kSampleBytes);
  Received first;
  const auto slow = Open(start);
  slow->Close();
  auto run = std::async(std::launch::async, [&] { return slow->Run(Into(first)); });
  for (int i = 0; i < 500 && first.deliveries < 2; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  ASSERT_EQ(first.deliveries, 2u);  // it has read all twelve, and may have leased a third
  std::vector<std::string> ids = Take("g");
  EXPECT_THAT(ids.size(), ::testing::AnyOf(9, 10));
  slow->AddCredit(100 * kSampleBytes);
  EXPECT_OK(run.get());
  ids.insert(ids.end(), first.ids.begin(), first.ids.end());
  EXPECT_THAT(ids, ::testing::UnorderedElementsAreArray(StoredOrder()));
}

TEST_F(FeatureStreamTest, HeaderNamesTheShardsAttributes) {
  Received received;
  const auto stream = Open(Start());
  stream->Close();
  ASSERT_OK(stream->Run(Into(received)));
  ASSERT_OK_AND_ASSIGN(const Json attributes, ParseJson(received.header.attributes_json()));
  EXPECT_EQ(attributes["template_mode"], "thinking");
  ASSERT_OK_AND_ASSIGN(const Json rope, ParseJson(attributes["rope"].get<std::string>()));
  EXPECT_TRUE(rope.contains("rope_theta"));
  ASSERT_OK_AND_ASSIGN(const Json options, ParseJson(attributes["options"].get<std::string>()));
  EXPECT_EQ(options["mode"], "prefill");
  EXPECT_EQ(options["too_long"], "reject");
}

TEST_F(FeatureStreamTest, AcknowledgingWhatWasNotSentIsRefused) {
  const auto stream = Open(Start());
  EXPECT_THAT(stream->Acknowledge(1), StatusIs(absl::StatusCode::kOutOfRange, "1 was not sent"));
  EXPECT_THAT(FeatureStream::Open(*harness_.store, *shards_, groups_, v1::StreamStart()).status(),
              StatusIs(absl::StatusCode::kNotFound, "job"));
}

TEST_F(FeatureStreamTest, WhatCannotBeReadIsNamedAndTheOthersAreSent) {
  // A second job with several shards of 34 samples: 1 MiB at 256 rows of 4 boundaries.
  v1::JobOptions options;
  options.set_name("several");
  options.set_shard_bytes(1 << 20);
  std::vector<v1::SampleInput> samples;
  for (int i = 0; i < 100; ++i)
    samples.push_back(IdsSample(fmt::format("m{}", i), std::vector<int32_t>(250, i + 1)));
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness_.Submit(options, samples));
  const JobRecord job = harness_.WaitForEnd(submitted);
  ASSERT_EQ(job.counts.stored, 100);
  ASSERT_OK_AND_ASSIGN(const auto rows, harness_.store->Shards(job.key));
  ASSERT_GE(rows.size(), 3u);
  // The first is cut; of the second one bit is turned in the states of one sample.
  const auto first = harness_.folders().FromStored(rows[0].path);
  std::filesystem::resize_file(first, std::filesystem::file_size(first) / 2);
  const auto second = harness_.folders().FromStored(rows[1].path);
  std::string flipped;
  {
    ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(second));
    const SampleEntry& entry = reader->samples()[5];
    flipped = entry.id;
    std::vector<uint16_t> row(testing::kHidden);
    ASSERT_OK(reader->ReadStates(1, entry.first_row + 7, row));
    ASSERT_OK_AND_ASSIGN(std::string bytes, ReadWholeFile(second));
    const size_t at = bytes.find(
        std::string_view(reinterpret_cast<const char*>(row.data()), row.size() * sizeof(uint16_t)));
    ASSERT_NE(at, std::string::npos);
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    std::ofstream(second, std::ios::binary) << bytes;
  }
  v1::StreamStart start;
  start.set_job("several");
  for (int round = 0; round < 2; ++round) {  // a second stream of the group is told again
    Received received;
    const auto stream = Open(start);
    v1::StreamEnd end;
    const FeatureOutlet outlet = Into(received);
    const absl::Status status =
        stream->Run([&](const v1::StreamFeaturesResponse& message, const StatesView& states) {
          outlet(message, states);
          if (message.has_end()) {
            end = message.end();
            if (received.deliveries > 0) {
              EXPECT_OK(stream->Acknowledge(received.deliveries));
            }
            stream->Close();
          }
          return true;
        });
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, "shard-000001.h5"));
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, flipped));
    ASSERT_TRUE(received.end);
    const int64_t lost = rows[0].samples + 1;
    EXPECT_EQ(*received.end, round == 0 ? 100 - lost : 0);
    ASSERT_EQ(end.damaged_size(), 2);
    EXPECT_EQ(end.damaged(0).shard(), "shard-000001.h5");
    EXPECT_EQ(end.damaged(0).samples(), rows[0].samples);
    EXPECT_EQ(end.damaged(1).samples(), 1);
    EXPECT_EQ(received.deliveries, static_cast<uint64_t>(*received.end));  // without a gap
    EXPECT_THAT(received.ids, ::testing::Not(::testing::Contains(flipped)));
  }
}

TEST_F(FeatureStreamTest, AShardCutWhileItIsSentEndsTheStreamAndNotTheProcess) {
  ASSERT_OK_AND_ASSIGN(const auto rows, harness_.store->Shards(job_.key));
  const auto path = harness_.folders().FromStored(rows[0].path);
  Received received;
  const auto stream = Open(Start());
  const FeatureOutlet outlet = Into(received);
  const absl::Status status =
      stream->Run([&](const v1::StreamFeaturesResponse& message, const StatesView& states) {
        if (message.has_sample()) std::filesystem::resize_file(path, 4096);
        return outlet(message, states);  // reads the states
      });
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, path.string()));
  EXPECT_EQ(received.ids.size(), 1u);
  EXPECT_FALSE(received.end.has_value());
}

TEST_F(FeatureStreamTest, AJobDeletedDuringTheStreamEndsItByName) {
  Received received;
  const auto stream = Open(Start());
  const FeatureOutlet outlet = Into(received);
  bool deleted = false;
  const absl::Status status =
      stream->Run([&](const v1::StreamFeaturesResponse& message, const StatesView& states) {
        outlet(message, states);
        if (received.ids.size() == 3 && !deleted) {
          deleted = true;
          EXPECT_OK(harness_.runner->Delete(job_));
        }
        return true;
      });
  EXPECT_THAT(status,
              StatusIs(absl::StatusCode::kNotFound, fmt::format("job {} was deleted", job_.id)));
  EXPECT_FALSE(received.end.has_value());
  EXPECT_GE(received.ids.size(), 3u);  // what is mapped or read ahead may still come
}

TEST_F(FeatureStreamTest, AJobDeletedWhileTheStreamWaitsForCreditEndsItToo) {
  v1::StreamStart start = Start();
  start.set_credit_bytes(1);
  Received received;
  const auto stream = Open(start);
  std::future<absl::Status> done =
      std::async(std::launch::async, [&] { return stream->Run(Into(received)); });
  while (received.deliveries == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_OK(harness_.runner->Delete(job_));
  EXPECT_THAT(done.get(), StatusIs(absl::StatusCode::kNotFound, "was deleted"));
}

TEST_F(FeatureStreamTest, EvictedSamplesDoNotHoldUpTheOthers) {
  // Two shards, the first one without states.
  std::vector<v1::SampleInput> more;
  for (int i = 0; i < 60; ++i)
    more.push_back(IdsSample(fmt::format("m{}", i), std::vector<int32_t>(300, i + 1)));
  v1::JobOptions options;
  options.set_name("two shards");
  options.set_shard_bytes(1 << 20);
  ASSERT_OK_AND_ASSIGN(const JobRecord submitted, harness_.Submit(options, more));
  job_ = harness_.WaitForEnd(submitted);
  ASSERT_OK_AND_ASSIGN(const auto shards, harness_.store->Shards(job_.key));
  ASSERT_GE(shards.size(), 2u);
  ASSERT_OK(EvictStates(*harness_.store, harness_.folders(), job_, std::span(shards).first(1)));
  Received received;
  auto stream = Open(Start());
  stream->Close();
  EXPECT_THAT(stream->Run(Into(received)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       fmt::format("{} samples of {} were not sent", shards[0].samples, job_.id)));
  EXPECT_EQ(static_cast<int64_t>(received.ids.size()), 60 - shards[0].samples);
  EXPECT_EQ(received.end, 60 - shards[0].samples);
  // Tokens are there of all.
  v1::StreamStart tokens = Start("tokens");
  tokens.add_boundaries(-1);
  Received all;
  stream = Open(tokens);
  stream->Close();
  EXPECT_OK(stream->Run(Into(all)));
  EXPECT_EQ(all.ids.size(), 60u);
}

TEST_F(FeatureStreamTest, ExcludedSamplesAreNotSent) {
  const std::vector<int64_t> indices = {0, 5, 11};
  ASSERT_OK(harness_.store->MarkExcluded(job_.key, indices, JobStore::Exclusion::kExclude));
  const std::vector<std::string> ids = Take("without", 9);
  EXPECT_EQ(ids.size(), 9u);
  for (const char* id : {"s0", "s5", "s11"})
    EXPECT_EQ(std::count(ids.begin(), ids.end(), id), 0) << id;
  ASSERT_OK(harness_.store->MarkExcluded(job_.key, indices, JobStore::Exclusion::kInclude));
  EXPECT_EQ(Take("without", 3).size(), 3u);
}

TEST_F(FeatureStreamTest, FollowsARunningJobToItsEnd) {
  harness_.engine->faults.step = std::chrono::milliseconds(2);
  v1::JobOptions options;
  options.set_seed(9);
  options.set_name("followed");
  std::vector<v1::SampleInput> samples;
  for (int i = 0; i < 30; ++i)
    samples.push_back(IdsSample(fmt::format("f{}", i), std::vector<int32_t>(40, i + 1)));
  ASSERT_OK_AND_ASSIGN(const JobRecord job, harness_.Submit(options, samples));
  v1::StreamStart start;
  start.set_job("followed");
  start.set_follow(true);
  Received received;
  const auto stream = Open(start);
  stream->Close();
  ASSERT_OK(stream->Run(Into(received)));
  EXPECT_EQ(received.ids.size(), 30u);
  EXPECT_TRUE(HasEnded(harness_.store->GetJob(job.key)->state));
}

TEST_F(FeatureStreamTest, JoinedStatisticsCoverEveryShard) {
  ASSERT_OK_AND_ASSIGN(const JoinedStatistics joined, shards_->Statistics(job_));
  EXPECT_EQ(joined.samples, 12);
  EXPECT_EQ(joined.rows, 12 * 20);
  ASSERT_EQ(joined.statistics.size(), 4u);
  EXPECT_EQ(joined.statistics[0].count, 12 * 20);
}

}  // namespace
}  // namespace statetap
