#include "client/lib/feature_receiver.h"

#include "client/lib/stream_config.h"
#include "tests/client/fake_server.h"
#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

using testing::FakeFeatures;
using testing::FakeServer;
using testing::StatusIs;

class FeatureReceiverTest : public ::testing::Test {
 protected:
  FeatureReceiverTest() {
    client_ = *Client::Create(server_.address(), {.first_backoff = std::chrono::milliseconds(1)});
    start_.set_job("job-1");
  }
  // Ids in the order they were handed out; acknowledges each at once.
  std::vector<std::string> Drain(FeatureReceiver& receiver) {
    std::vector<std::string> ids;
    while (true) {
      const auto sample = receiver.Next();
      EXPECT_OK(sample);
      if (!sample.ok() || !sample->has_value()) return ids;
      ids.push_back((*sample)->record.id);
      receiver.Ack((*sample)->sequence);
    }
  }
  FakeServer server_;
  std::unique_ptr<Client> client_;
  v1::StreamStart start_;
};

TEST_F(FeatureReceiverTest, SamplesArriveWhole) {
  ASSERT_OK_AND_ASSIGN(const auto receiver, FeatureReceiver::Open(*client_, start_, {}));
  EXPECT_EQ(receiver->header().remaining(), 5);
  for (int i = 0; i < 5; ++i) {
    ASSERT_OK_AND_ASSIGN(const auto sample, receiver->Next());
    ASSERT_TRUE(sample.has_value());
    EXPECT_EQ(sample->record.id, FakeFeatures::RecordOf(i).id);
    EXPECT_EQ(sample->record.input_ids, FakeFeatures::RecordOf(i).input_ids);
    EXPECT_EQ(sample->states[0], FakeFeatures::StatesOf(i, 1));
    EXPECT_EQ(sample->states[1], FakeFeatures::StatesOf(i, 2));
    receiver->Ack(sample->sequence);
  }
  ASSERT_OK_AND_ASSIGN(const auto end, receiver->Next());
  EXPECT_FALSE(end.has_value());
  ASSERT_OK(receiver->Close());
  EXPECT_EQ(server_.features.acked, 5u);
  EXPECT_EQ(server_.features.credit, uint64_t{(3 + 4 + 5 + 6 + 7) * 16 * 2 * 2});
}

TEST_F(FeatureReceiverTest, ABreakRepeatsNothingAndLosesNothing) {
  server_.features.break_after = 3;
  ASSERT_OK_AND_ASSIGN(const auto receiver, FeatureReceiver::Open(*client_, start_, {}));
  // The first three are handed out, none acknowledged when the connection breaks.
  std::vector<std::string> ids;
  uint64_t last = 0;
  while (true) {
    ASSERT_OK_AND_ASSIGN(const auto sample, receiver->Next());
    if (!sample.has_value()) break;
    ids.push_back(sample->record.id);
    last = sample->sequence;
  }
  EXPECT_EQ(ids, (std::vector<std::string>{"s0", "s1", "s2", "s3", "s4"}));
  EXPECT_EQ(receiver->reconnects(), 1);
  EXPECT_EQ(server_.features.acked, 0u);
  receiver->Ack(last);
  ASSERT_OK(receiver->Close());
  EXPECT_EQ(server_.features.acked, 5u);
}

TEST_F(FeatureReceiverTest, PatienceBeginsWithTheBreak) {
  server_.features.break_after = 3;
  server_.features.silence = std::chrono::milliseconds(100);
  client_ = *Client::Create(server_.address(), {.first_backoff = std::chrono::milliseconds(1),
                                                .patience = std::chrono::milliseconds(1)});
  ASSERT_OK_AND_ASSIGN(const auto receiver, FeatureReceiver::Open(*client_, start_, {}));
  EXPECT_EQ(Drain(*receiver).size(), 5u);
  EXPECT_EQ(receiver->reconnects(), 1);
}

// The header comes with the first stored sample, perhaps hours later.
TEST_F(FeatureReceiverTest, ABreakBeforeTheHeaderIsMendedToo) {
  server_.features.break_at_once = 6;  // more than the attempts at a server that never answered
  server_.features.break_after = 3;
  int lost = 0;
  ASSERT_OK_AND_ASSIGN(const auto receiver,
                       FeatureReceiver::Open(*client_, start_, {}, [&] { ++lost; }));
  EXPECT_EQ(lost, 1);
  EXPECT_EQ(Drain(*receiver).size(), 5u);
  EXPECT_EQ(lost, 2);
}

TEST_F(FeatureReceiverTest, AServerThatNeverAnsweredIsNotWaitedFor) {
  const std::string gone = FakeServer().address();
  client_ = *Client::Create(gone, {.first_backoff = std::chrono::milliseconds(1)});
  const auto on_lost = [] { ADD_FAILURE() << "there was none"; };
  EXPECT_THAT(FeatureReceiver::Open(*client_, start_, {}, on_lost),
              StatusIs(absl::StatusCode::kUnavailable, "cannot reach a server at " + gone));
}

TEST_F(FeatureReceiverTest, AnotherOrderAfterABreakAcknowledgesNothingTooEarly) {
  server_.features.break_after = 3;
  server_.features.rotate = 3;  // then s3, s4, s0, s1, s2
  ASSERT_OK_AND_ASSIGN(const auto receiver, FeatureReceiver::Open(*client_, start_, {}));
  std::vector<std::string> ids;
  for (auto sample = receiver->Next(); sample.ok() && sample->has_value();
       sample = receiver->Next())
    ids.push_back((*sample)->record.id);
  EXPECT_EQ(ids, (std::vector<std::string>{"s0", "s1", "s2", "s3", "s4"}));
  receiver->Ack(3);  // s0 to s2, which were delivered behind s3 and s4
  receiver->Ack(4);  // s3: the first delivery of this connection
  receiver->Ack(5);
  ASSERT_OK(receiver->Close());
  EXPECT_EQ(server_.features.acks, (std::vector<uint64_t>{1, 5}));
}

TEST_F(FeatureReceiverTest, ComesBackBehindWhatWasAcknowledged) {
  {
    ASSERT_OK_AND_ASSIGN(const auto receiver, FeatureReceiver::Open(*client_, start_, {}));
    uint64_t last = 0;
    for (auto sample = receiver->Next(); sample.ok() && sample->has_value();
         sample = receiver->Next())
      last = (*sample)->sequence;
    ASSERT_EQ(last, 5u);
    receiver->Ack(1);
    ASSERT_OK(receiver->Close());
  }
  ASSERT_OK_AND_ASSIGN(const auto receiver, FeatureReceiver::Open(*client_, start_, {}));
  EXPECT_EQ(Drain(*receiver), (std::vector<std::string>{"s1", "s2", "s3", "s4"}));
}

TEST_F(FeatureReceiverTest, KnownSamplesAreAcknowledgedAndNotHandedOut) {
  ASSERT_OK_AND_ASSIGN(const auto receiver,
                       FeatureReceiver::Open(*client_, start_, {{"job-1", {"s0", "s1"}}}));
  EXPECT_EQ(Drain(*receiver), (std::vector<std::string>{"s2", "s3", "s4"}));
  EXPECT_EQ(receiver->skipped(), 2);
  ASSERT_OK(receiver->Close());
  EXPECT_EQ(server_.features.acked, 5u);
}

TEST_F(FeatureReceiverTest, DamageOnTheWayIsAnError) {
  server_.features.damage = true;
  ASSERT_OK_AND_ASSIGN(const auto receiver, FeatureReceiver::Open(*client_, start_, {}));
  EXPECT_THAT(receiver->Next(), StatusIs(absl::StatusCode::kDataLoss, "\"s0\""));
}

TEST_F(FeatureReceiverTest, FetchOneSample) {
  ASSERT_OK_AND_ASSIGN(const FetchedSample fetched, FetchSample(*client_, "job-1", "s2"));
  EXPECT_EQ(fetched.sample.states[1], FakeFeatures::StatesOf(2, 2));
  EXPECT_THAT(FetchSample(*client_, "job-1", "none"),
              StatusIs(absl::StatusCode::kNotFound, "none"));
}

TEST_F(FeatureReceiverTest, HeaderBecomesShardConfig) {
  ASSERT_OK_AND_ASSIGN(const auto receiver, FeatureReceiver::Open(*client_, start_, {}));
  ASSERT_OK_AND_ASSIGN(const ShardConfig config, ShardConfigOf(receiver->header()));
  EXPECT_EQ(config.hidden, 16);
  EXPECT_EQ(config.boundaries, (std::vector<int>{1, 2}));
  EXPECT_EQ(config.rope_json, "{\"theta\":10000}");
  EXPECT_FALSE(config.thinking);
  EXPECT_THAT(ShardConfigOf(v1::StreamHeader()), StatusIs(absl::StatusCode::kDataLoss, "header"));
}

v1::StreamHeader SmallHeader() {
  v1::StreamHeader header;
  header.set_hidden(2);
  header.add_boundaries(1);
  return header;
}

v1::SampleHeader TwoTokens() {
  v1::SampleHeader sample;
  sample.set_delivery(1);
  sample.set_id("s");
  sample.add_input_ids(1);
  sample.add_input_ids(2);
  sample.set_loss_mask(std::string("\0\1", 2));
  return sample;
}

v1::SampleData Rows(int64_t first_row, size_t values) {
  v1::SampleData data;
  data.set_delivery(1);
  data.set_boundary(1);
  data.set_first_row(first_row);
  data.set_states(std::string(values * 2, '\1'));
  return data;
}

TEST(SampleAssemblerTest, PiecesMustFit) {
  ReceivedAssembler assembler(SmallHeader());
  EXPECT_THAT(assembler.Add(Rows(0, 2)), StatusIs(absl::StatusCode::kDataLoss, "without"));
  ASSERT_OK(assembler.Begin(TwoTokens()));
  EXPECT_THAT(assembler.Add(Rows(1, 2)), StatusIs(absl::StatusCode::kDataLoss, "row 1"));
  ASSERT_OK(assembler.Add(Rows(0, 2)));
  EXPECT_THAT(assembler.Add(Rows(0, 2)), StatusIs(absl::StatusCode::kDataLoss, "row 0"));
  EXPECT_THAT(assembler.Add(Rows(1, 4)), StatusIs(absl::StatusCode::kDataLoss, "row 1"));
  EXPECT_THAT(assembler.Begin(TwoTokens()), StatusIs(absl::StatusCode::kDataLoss, "not finished"));
  EXPECT_FALSE(assembler.complete());
  ASSERT_OK(assembler.Add(Rows(1, 2)));
  EXPECT_TRUE(assembler.complete());
}

}  // namespace
}  // namespace statetap
