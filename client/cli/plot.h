// Statistics drawn with characters: row norms by boundary, lengths by source.
#pragma once

#include <string>

#include "statetap/v1/features.pb.h"

namespace statetap {

// A line a boundary: p01 to p99 of the rows' rms, the median marked, on a logarithmic axis shared
// by all. At most `width` columns.
std::string PlotRms(const v1::Statistics& statistics, int width);

// A line a boundary: how many rows have which rms, on the same axis.
std::string PlotHistograms(const v1::Statistics& statistics, int width);

// Two lines a source: how many samples have prompts and answers of which length, each to its own
// peak.
std::string PlotLengths(const v1::Statistics& statistics, int width);

}  // namespace statetap
