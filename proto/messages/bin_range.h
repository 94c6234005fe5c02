// The logarithmic axes that pictures of one report share.
#pragma once

#include "statetap/v1/features.pb.h"

namespace statetap {

// log2 of the lower edge of a bin: of BoundaryStatistics.row_rms_bins, and of the bins of lengths
// in SourceReport.
inline double RmsEdge(int bin) { return bin / 8.0 - 16; }
inline double LengthEdge(int bin) { return bin / 2.0; }

// From the lowest to the highest bin that is used, log2; 0 to 1 where none is. Rows of zeros, in
// the first bin, do not count: they would leave the others no room.
struct BinRange {
  double low = 0, high = 1;
};
BinRange RmsRangeOf(const v1::Statistics& statistics);
BinRange LengthRangeOf(const v1::Statistics& statistics);

}  // namespace statetap
