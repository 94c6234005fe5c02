#include "client/cli/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <vector>

#include "client/cli/text_width.h"
#include "proto/messages/bin_range.h"

namespace statetap {
namespace {

constexpr int kLabelWidth = 10;
constexpr int kMinPlot = 20, kMaxPlot = 100;

using Bins = google::protobuf::RepeatedField<int64_t>;

struct Axis {
  double low = 0, high = 1;  // log2
  int width = kMinPlot;
  int Column(double log2_value) const {
    const double share = (log2_value - low) / (high - low);
    return std::clamp(static_cast<int>(share * width), 0, width - 1);
  }
};

Axis AxisFor(const BinRange& range, int width) {
  return {range.low, range.high, std::clamp(width - kLabelWidth - 1, kMinPlot, kMaxPlot)};
}

std::string Label(const v1::BoundaryStatistics& boundary) {
  return fmt::format("{:>{}} ", boundary.boundary(), kLabelWidth);
}

std::string Scale(const Axis& axis, std::string_view unit) {
  const std::string low = fmt::format("{:.3g}", std::exp2(axis.low));
  const std::string high = fmt::format("{:.3g}", std::exp2(axis.high));
  return fmt::format("{:>{}} {}{:>{}}\n", unit, kLabelWidth, low, high,
                     axis.width - static_cast<int>(low.size()));
}

std::string RangeLine(const v1::BoundaryStatistics& boundary, const Axis& axis) {
  std::vector<std::string_view> cells(static_cast<size_t>(axis.width), " ");
  if (boundary.zero_rows() > 0 && boundary.zero_rows() == boundary.count())
    return "every row is zero";
  if (boundary.row_rms_p50() > 0) {
    const auto low = static_cast<size_t>(axis.Column(std::log2(boundary.row_rms_p01())));
    const auto high = static_cast<size_t>(axis.Column(std::log2(boundary.row_rms_p99())));
    for (size_t i = low; i <= high; ++i) cells[i] = "─";
    cells[low] = "├";
    cells[high] = "┤";
    cells[static_cast<size_t>(axis.Column(std::log2(boundary.row_rms_p50())))] = "█";
  }
  return fmt::format("{}", fmt::join(cells, ""));
}

// `edge` gives log2 of a bin's lower edge.
std::string BinsLine(const Bins& bins, double (*edge)(int), const Axis& axis) {
  constexpr std::array<std::string_view, 9> kLevels = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  // A bin may be wider than a column: its count is spread over the columns it covers.
  std::vector<double> columns(static_cast<size_t>(axis.width));
  for (int bin = 0; bin < bins.size(); ++bin) {
    const auto count = static_cast<double>(bins[bin]);
    if (count == 0) continue;
    const int first = axis.Column(edge(bin));
    const int last = std::max(first, axis.Column(edge(bin + 1) - 1e-9));
    for (int c = first; c <= last; ++c)
      columns[static_cast<size_t>(c)] += count / (last - first + 1);
  }
  const double most = *std::max_element(columns.begin(), columns.end());
  std::string line;
  for (const double count : columns) {
    // What is there is seen, however little.
    const int level = count == 0 ? 0 : std::max(1, static_cast<int>(std::lround(8 * count / most)));
    line += kLevels[static_cast<size_t>(level)];
  }
  return line;
}

std::string HistogramLine(const v1::BoundaryStatistics& boundary, const Axis& axis) {
  return BinsLine(boundary.row_rms_bins(), RmsEdge, axis);
}

std::string WithoutEnd(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

std::string Plot(const v1::Statistics& statistics, int width, std::string_view title,
                 std::string (*line)(const v1::BoundaryStatistics&, const Axis&)) {
  const Axis axis = AxisFor(RmsRangeOf(statistics), width);
  std::string text = fmt::format("{}\n", title);
  for (const v1::BoundaryStatistics& boundary : statistics.boundaries())
    text += Label(boundary) + WithoutEnd(line(boundary, axis)) + "\n";
  return text + Scale(axis, "rms");
}

}  // namespace

std::string PlotRms(const v1::Statistics& statistics, int width) {
  return Plot(statistics, width, "rms of rows by boundary, p01 ├ █ median ┤ p99, logarithmic",
              RangeLine);
}

std::string PlotHistograms(const v1::Statistics& statistics, int width) {
  return Plot(statistics, width, "rows by rms, each boundary to its own peak, logarithmic",
              HistogramLine);
}

std::string PlotLengths(const v1::Statistics& statistics, int width) {
  const Axis axis = AxisFor(LengthRangeOf(statistics), width);
  std::string text = "samples by length of prompt and answer, by source, logarithmic\n";
  for (const v1::SourceReport& source : statistics.sources()) {
    text += fmt::format("{}\n", Shorten(Printable(source.source()), width));
    const auto add = [&](std::string_view label, const Bins& bins) {
      text += fmt::format("{:>{}} {}\n", label, kLabelWidth,
                          WithoutEnd(BinsLine(bins, LengthEdge, axis)));
    };
    add("prompt", source.prompt_length_bins());
    add("answer", source.answer_length_bins());
  }
  return text + Scale(axis, "tokens");
}

}  // namespace statetap
