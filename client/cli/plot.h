// Statistics drawn with characters: a range of row norms by boundary, and their histograms.
#pragma once

#include <string>

#include "statetap/v1/features.pb.h"

namespace statetap {

// A line a boundary: p01 to p99 of the rows' rms, the median marked, on a logarithmic axis shared
// by all. At most `width` columns.
std::string PlotRms(const v1::Statistics& statistics, int width);

// A line a boundary: how many rows have which rms, on the same axis.
std::string PlotHistograms(const v1::Statistics& statistics, int width);

}  // namespace statetap
