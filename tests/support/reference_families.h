// The small checkpoints of tests/data/reference, one a switch of the family: what the reference
// test of every backend runs over.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace statetap::testing {

inline auto ReferenceFamilies() {
  return ::testing::Values("plain", "no-q-lora", "bf16-experts", "flat", "no-yarn", "dense-first",
                           "shared-experts", "groups");
}

inline std::string FamilyName(const ::testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace statetap::testing
