#include "extractor/model/rotary.h"

#include <cmath>

#include "tests/support/status_matchers.h"

namespace statetap {
namespace {

ModelConfig KimiConfig(double factor, double beta_fast) {
  ModelConfig config;
  config.nope_dim = 128;
  config.rope_dim = 64;
  config.rope = {50000, true, factor, 4096, beta_fast, 1, 1, 1};
  return config;
}

// Published check values of the vendor's models, double precision.
TEST(InverseFrequenciesTest, KimiK25) {
  const auto f = InverseFrequencies(KimiConfig(64, 32));
  ASSERT_EQ(f.size(), 32u);
  EXPECT_FLOAT_EQ(f[0], 1.0f);
  EXPECT_FLOAT_EQ(f[1], 0.7131110849f);
  EXPECT_FLOAT_EQ(f[8], 6.687403050e-2f);
  EXPECT_FLOAT_EQ(f[9], 4.377665595e-2f);
  EXPECT_FLOAT_EQ(f[15], 2.670203391e-3f);
  EXPECT_FLOAT_EQ(f[19], 1.583749910e-4f);
  EXPECT_FLOAT_EQ(f[20], 1.807023387e-5f);
  EXPECT_FLOAT_EQ(f[31], 4.382206456e-7f);
  EXPECT_FLOAT_EQ(SoftmaxScale(KimiConfig(64, 32)), 0.1446796258f);
}

TEST(InverseFrequenciesTest, KimiK2InstructStepsAtOnePair) {
  const auto f = InverseFrequencies(KimiConfig(32, 1));
  EXPECT_FLOAT_EQ(f[19], 1.621759908e-3f);
  EXPECT_FLOAT_EQ(f[20], 3.614046774e-5f);
  EXPECT_FLOAT_EQ(f[31], 8.764412912e-7f);
  EXPECT_FLOAT_EQ(SoftmaxScale(KimiConfig(32, 1)), 0.1308608000f);
}

TEST(InverseFrequenciesTest, WithoutYarn) {
  ModelConfig config = KimiConfig(64, 32);
  config.rope.yarn = false;
  EXPECT_FLOAT_EQ(InverseFrequencies(config)[31],
                  static_cast<float>(std::pow(50000.0, -62.0 / 64)));
  EXPECT_FLOAT_EQ(SoftmaxScale(config), 0.0721687836f);
}

}  // namespace
}  // namespace statetap
