// The axis that pictures of rows by rms share.
#pragma once

#include "statetap/v1/features.pb.h"

namespace statetap {

// log2 of the rms at the lower edge of a bin of BoundaryStatistics.row_rms_bins.
inline double RmsEdge(int bin) { return bin / 8.0 - 16; }

// From the lowest to the highest bin that any boundary uses, log2 of the rms; 0 to 1 where none is.
struct RmsRange {
  double low = 0, high = 1;
};
RmsRange RmsRangeOf(const v1::Statistics& statistics);

}  // namespace statetap
