// Rows of the latent cache, for the kernels of attention. Device code only.
#pragma once

#include <cstdint>

#include "extractor/backend/step_plan.h"

namespace statetap::cuda {

// The row of `position` of a sequence, whose pages are a row of the table.
__device__ inline int64_t CacheRow(const int32_t* page_table, int pages_per_seq, int sequence,
                                   int position) {
  const int page =
      page_table[static_cast<int64_t>(sequence) * pages_per_seq + position / kPageTokens];
  return static_cast<int64_t>(page) * kPageTokens + position % kPageTokens;
}

// A rotary pair, turned.
__device__ inline float2 Rotate(float a, float b, float2 cos_sin) {
  return {a * cos_sin.x - b * cos_sin.y, a * cos_sin.y + b * cos_sin.x};
}

}  // namespace statetap::cuda
