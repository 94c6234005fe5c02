#include "client/lib/proto_json.h"

#include <limits>

#include "extractor/base/json.h"
#include "statetap/v1/features.pb.h"
#include "statetap/v1/jobs.pb.h"
#include "statetap/v1/model.pb.h"
#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

TEST(ProtoJsonTest, NamesDefaultsEnumsAndBigNumbers) {
  v1::Job job;
  job.set_state(v1::JOB_STATE_SUCCEEDED);
  job.set_tokens(int64_t{1} << 60);
  job.add_boundaries(2);
  job.mutable_counts()->set_to_do(3);
  const Json json = JsonOf(job);
  EXPECT_EQ(json["state"], "succeeded");
  EXPECT_TRUE(json["tokens"].is_number_integer());
  EXPECT_EQ(json["tokens"], int64_t{1} << 60);
  EXPECT_EQ(json["counts"]["to_do"], 3);
  EXPECT_EQ(json["counts"]["stored"], 0);
  EXPECT_EQ(json["message"], "");
  EXPECT_EQ(json["boundaries"], Json::array({2}));
  EXPECT_EQ(json["layer_outputs"], Json::array());
  EXPECT_TRUE(json["options"].is_null()) << "a message that is not set";
}

TEST(ProtoJsonTest, OptionalFieldsAreNullAndZeroIsZero) {
  v1::Rejected rejected;
  EXPECT_TRUE(JsonOf(rejected)["layer"].is_null());
  rejected.set_layer(0);
  EXPECT_EQ(JsonOf(rejected)["layer"], 0);
}

TEST(ProtoJsonTest, WhatJsonCannotSayIsNull) {
  v1::BoundaryStatistics statistics;
  statistics.set_mean(std::numeric_limits<double>::quiet_NaN());
  statistics.set_max(std::numeric_limits<double>::infinity());
  statistics.set_std(0.1);
  const Json json = JsonOf(statistics);
  EXPECT_TRUE(json["mean"].is_null());
  EXPECT_TRUE(json["max"].is_null());
  EXPECT_EQ(DumpJson(json["std"]), "0.1");
}

TEST(ProtoJsonTest, FloatsAreShortBytesAreNumbersOneofsAreSparse) {
  v1::SampleHeader header;
  header.add_logprobs(0.1f);
  header.add_logprobs(std::numeric_limits<float>::quiet_NaN());
  header.set_loss_mask(std::string("\0\1\xff", 3));
  EXPECT_EQ(DumpJson(JsonOf(header)["logprobs"]), "[0.1,null]");
  EXPECT_EQ(DumpJson(JsonOf(header)["loss_mask"]), "[0,1,255]");
  v1::SampleInput input;
  input.set_prompt("p");
  EXPECT_TRUE(JsonOf(input).contains("prompt"));
  EXPECT_FALSE(JsonOf(input).contains("chat"));
}

}  // namespace
}  // namespace statetap
