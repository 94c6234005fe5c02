#include "extractor/engine/shared_gpus.h"

#include <gmock/gmock.h>

namespace statetap {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

bool PowersOfTwo(int ranks) { return (ranks & (ranks - 1)) == 0; }

TEST(SharedGpusTest, IsSaidWithFlagValueAndRemedy) {
  EXPECT_THAT(SharedGpus(8, 7, PowersOfTwo),
              AllOf(HasSubstr("--tp 8"), HasSubstr("7 GPUs"), HasSubstr("2 ranks share"),
                    HasSubstr("--tp 4 gives each rank a GPU")));
  EXPECT_THAT(SharedGpus(8, 3, PowersOfTwo),
              AllOf(HasSubstr("3 ranks share"), HasSubstr("--tp 2 ")));
  EXPECT_THAT(SharedGpus(2, 1, PowersOfTwo),
              AllOf(HasSubstr("one GPU"), HasSubstr("--tp 1 gives")));
}

TEST(SharedGpusTest, IsNotSaidWhereEachRankHasItsOwn) {
  for (const int ranks : {1, 2, 7, 8}) EXPECT_EQ(SharedGpus(ranks, 8, PowersOfTwo), "");
}

}  // namespace
}  // namespace statetap
