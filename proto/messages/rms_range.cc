#include "proto/messages/rms_range.h"

#include <algorithm>

namespace statetap {

RmsRange RmsRangeOf(const v1::Statistics& statistics) {
  int first = 1 << 20, last = -1;
  for (const v1::BoundaryStatistics& boundary : statistics.boundaries()) {
    for (int bin = 0; bin < boundary.row_rms_bins_size(); ++bin) {
      if (boundary.row_rms_bins(bin) == 0) continue;
      first = std::min(first, bin);
      last = std::max(last, bin);
    }
  }
  if (last < 0) return {};
  return {RmsEdge(first), RmsEdge(last + 1)};
}

}  // namespace statetap
