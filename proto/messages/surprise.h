// How much a token surprised the model, in the levels that text is coloured by.
#pragma once

#include <cmath>

namespace statetap {

// 0: its probability was half or more, or is not known (NaN); 1: below 50 %, 2: below 10 %, 3:
// below 1 %.
inline int SurpriseOf(float logprob) {
  const double probability = std::exp(double{logprob});
  return (probability < 0.5) + (probability < 0.1) + (probability < 0.01);
}

}  // namespace statetap
