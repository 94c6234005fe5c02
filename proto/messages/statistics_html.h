// Statistics as tables and pictures (SVG inside the page), for the report and the web page.
#pragma once

#include <string>

#include "statetap/v1/features.pb.h"

namespace statetap {

// Alarms, rms by boundary, histograms, outlier channels, sources with their policy gap.
std::string StatisticsHtml(const v1::Statistics& statistics);

}  // namespace statetap
