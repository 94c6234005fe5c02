#include "proto/messages/statistics_html.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "extractor/base/text.h"
#include "proto/messages/bin_range.h"
#include "proto/messages/html.h"

namespace statetap {
namespace {

constexpr double kWidth = 720, kLeft = 90, kRight = 20;

std::string Number(double value) { return std::isnan(value) ? "–" : fmt::format("{:.4g}", value); }

std::string Cosine(double value) { return std::isnan(value) ? "–" : fmt::format("{:.4f}", value); }

std::string Percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

using Bins = google::protobuf::RepeatedField<int64_t>;

// A logarithmic axis.
class Axis {
 public:
  explicit Axis(const BinRange& range) : range_(range) {}
  double X(double log2_value) const {
    return kLeft + (kWidth - kLeft - kRight) *
                       (std::clamp(log2_value, range_.low, range_.high) - range_.low) /
                       (range_.high - range_.low);
  }
  // Ticks at powers of two, with room for their numbers.
  std::string Ticks(double height) const {
    std::string svg;
    const double step = std::max(1.0, std::ceil((range_.high - range_.low) / 10));
    for (double tick = std::ceil(range_.low); tick <= range_.high; tick += step) {
      svg += fmt::format(
          "<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"0\" y2=\"{1}\"/>"
          "<text x=\"{0:.1f}\" y=\"{2}\" text-anchor=\"middle\">{3:.3g}</text>\n",
          X(tick), height, height + 14, std::exp2(tick));
    }
    return svg;
  }

 private:
  const BinRange range_;
};

std::string Label(std::string_view text, double y) {
  return fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", kLeft - 10, y,
                     text);
}

std::string NameOf(const v1::BoundaryStatistics& boundary) {
  return fmt::format("boundary {}", boundary.boundary());
}

std::string Svg(std::string_view name, double height, std::string_view content) {
  return fmt::format(
      "<div class=\"scroll\" tabindex=\"0\">\n<svg viewBox=\"0 0 {} {}\" width=\"{}\" role=\"img\" "
      "aria-label=\"{}\">\n{}</svg></div>\n",
      kWidth, height, kWidth, name, content);
}

std::string RangesSvg(const v1::Statistics& statistics) {
  constexpr double kRow = 26;
  const Axis axis(RmsRangeOf(statistics));
  const double height = kRow * statistics.boundaries_size();
  std::string svg = axis.Ticks(height);
  double y = kRow / 2;
  for (const v1::BoundaryStatistics& boundary : statistics.boundaries()) {
    svg += Label(NameOf(boundary), y + 4);
    if (boundary.zero_rows() > 0 && boundary.zero_rows() == boundary.count()) {
      svg += fmt::format("<text class=\"bad\" x=\"{}\" y=\"{}\">every row is zero</text>\n",
                         kLeft + 4, y + 4);
    } else if (boundary.row_rms_p50() > 0) {
      svg += fmt::format(
          "<line class=\"line\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{}\" y2=\"{}\"/>"
          "<circle class=\"dot\" cx=\"{:.1f}\" cy=\"{}\" r=\"5\"/>\n",
          axis.X(std::log2(boundary.row_rms_p01())), axis.X(std::log2(boundary.row_rms_p99())), y,
          y, axis.X(std::log2(boundary.row_rms_p50())), y);
    }
    y += kRow;
  }
  return Svg("rms of rows by boundary: median and 1 to 99 percent", height + 20, svg);
}

// Bars of one histogram that stands on `base`. `edge` gives log2 of a bin's lower edge.
std::string Bars(const Bins& bins, double (*edge)(int), const Axis& axis, double base,
                 double height) {
  const auto most =
      static_cast<double>(bins.empty() ? 0 : *std::max_element(bins.begin(), bins.end()));
  std::string svg;
  for (int bin = 0; bin < bins.size(); ++bin) {
    if (bins[bin] == 0) continue;
    // Rows of zeros, below the axis, stand at its edge.
    const double x = axis.X(edge(bin)), end = std::max(x + 2, axis.X(edge(bin + 1)));
    // What is there is seen, however little.
    const double bar = std::max(1.0, height * static_cast<double>(bins[bin]) / most);
    svg += fmt::format(
        "<rect class=\"bar\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>\n", x,
        base - bar, end - x, bar);
  }
  return svg;
}

std::string HistogramsSvg(const v1::Statistics& statistics) {
  constexpr double kRow = 54, kBar = 44;
  const Axis axis(RmsRangeOf(statistics));
  const double height = kRow * statistics.boundaries_size();
  std::string svg = axis.Ticks(height);
  double base = kRow;
  for (const v1::BoundaryStatistics& boundary : statistics.boundaries()) {
    svg += Label(NameOf(boundary), base - 4) +
           Bars(boundary.row_rms_bins(), RmsEdge, axis, base, kBar);
    base += kRow;
  }
  return Svg("rows by rms, each boundary to its own peak", height + 20, svg);
}

std::string LengthsSvg(const v1::Statistics& statistics) {
  constexpr double kName = 18, kRow = 38, kBar = 32;
  const Axis axis(LengthRangeOf(statistics));
  const double height = (kName + 2 * kRow) * statistics.sources_size();
  std::string svg = axis.Ticks(height);
  double base = 0;
  for (const v1::SourceReport& source : statistics.sources()) {
    svg += fmt::format("<text x=\"0\" y=\"{}\">{}</text>\n", base + 13,
                       EscapeHtml(CutMiddle(source.source(), 60)));
    base += kName + kRow;
    svg +=
        Label("prompt", base - 4) + Bars(source.prompt_length_bins(), LengthEdge, axis, base, kBar);
    base += kRow;
    svg +=
        Label("answer", base - 4) + Bars(source.answer_length_bins(), LengthEdge, axis, base, kBar);
  }
  return Svg("samples by tokens of prompt and answer, by source", height + 20, svg);
}

std::string BoundariesTable(const v1::Statistics& statistics) {
  std::vector<std::vector<std::string>> rows;
  for (const v1::BoundaryStatistics& b : statistics.boundaries()) {
    rows.push_back({std::to_string(b.boundary()), std::to_string(b.layer_output()),
                    fmt::format("{}", b.count()), Number(b.mean()), Number(b.std()),
                    Number(b.row_rms_p01()), Number(b.row_rms_p50()), Number(b.row_rms_p99()),
                    Number(b.abs_max()), b.cosine_rows() == 0 ? "–" : Cosine(b.cosine()),
                    fmt::format("{}", b.zero_rows()), fmt::format("{}", b.nonfinite())});
  }
  return HtmlTable({"#boundary", "#layer out", "#rows", "#mean", "#std", "#rms p01", "#p50", "#p99",
                    "#abs max", "#cosine", "#zero rows", "#non-finite"},
                   rows);
}

std::string ClassesTable(const v1::Statistics& statistics) {
  std::vector<std::vector<std::string>> rows;
  for (const v1::BoundaryStatistics& boundary : statistics.boundaries()) {
    for (const v1::TokenClassStatistics& c : boundary.token_classes()) {
      rows.push_back({std::to_string(boundary.boundary()), EscapeHtml(c.token_class()),
                      fmt::format("{}", c.count()), Number(c.row_rms_p01()),
                      Number(c.row_rms_p50()), Number(c.row_rms_p99()), Cosine(c.cosine()),
                      Cosine(c.cosine_std())});
    }
  }
  if (rows.empty()) return "<p>Not recorded in these shards: an older version wrote them.</p>\n";
  return HtmlTable({"#boundary", "tokens", "#rows", "#rms p01", "#p50", "#p99", "#cosine", "#±"},
                   rows);
}

std::string OutliersTable(const v1::Statistics& statistics) {
  std::vector<std::vector<std::string>> rows;
  for (const v1::BoundaryStatistics& boundary : statistics.boundaries()) {
    for (const v1::OutlierChannel& outlier : boundary.outliers()) {
      rows.push_back({std::to_string(boundary.boundary()), std::to_string(outlier.channel()),
                      Percent(outlier.energy_share()), Number(outlier.mean()),
                      Number(outlier.abs_max())});
    }
  }
  return HtmlTable({"#boundary", "#channel", "#share of energy", "#mean", "#abs max"}, rows);
}

std::string GapsSvg(const v1::Statistics& statistics) {
  constexpr double kRow = 24;
  double most = 1;
  for (const v1::SourceReport& source : statistics.sources()) {
    if (!std::isnan(source.policy_gap())) most = std::max(most, std::abs(source.policy_gap()));
  }
  const double middle = (kLeft + kWidth) / 2, scale = (kWidth - kLeft) / 2 * 0.8 / most;
  const double height = kRow * statistics.sources_size();
  std::string svg = fmt::format(
      "<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"0\" y2=\"{1}\"/>\n", middle, height);
  double y = 3;
  for (const v1::SourceReport& source : statistics.sources()) {
    svg += fmt::format("<text x=\"0\" y=\"{}\">{}</text>\n", y + 13,
                       EscapeHtml(CutMiddle(source.source(), 40)));
    if (!std::isnan(source.policy_gap())) {
      const double length = source.policy_gap() * scale;
      svg += fmt::format(
          "<rect class=\"bar\" x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\"/>"
          "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"{}\">{:+.3f}</text>\n",
          std::min(middle, middle + length), y, std::max(1.0, std::abs(length)), kRow - 6,
          middle + length + (length < 0 ? -6 : 6), y + 13, length < 0 ? "end" : "start",
          source.policy_gap());
    }
    y += kRow;
  }
  return Svg("policy gap by source, nats", height, svg);
}

std::string SourcesTable(const v1::Statistics& statistics) {
  std::vector<std::vector<std::string>> rows;
  for (const v1::SourceReport& s : statistics.sources()) {
    rows.push_back({EscapeHtml(s.source()), fmt::format("{}", s.samples()),
                    fmt::format("{}", s.tokens()), fmt::format("{}", s.supervised_tokens()),
                    Number(s.surprise()), Number(s.entropy()),
                    std::isnan(s.policy_gap())
                        ? "–"
                        : fmt::format("{:+.3f} ± {:.3f}", s.policy_gap(), s.policy_gap_error()),
                    fmt::format("{}", s.answers()), fmt::format("{}", s.hit_limit()),
                    fmt::format("{}", s.empty()), fmt::format("{}", s.looping()),
                    s.thinking() == 0 ? "–" : fmt::format("{}", s.unclosed())});
  }
  return HtmlTable(
      {"source", "#samples", "#tokens", "#supervised", "#−log p", "#entropy", "#policy gap",
       "#answers", "#hit limit", "#empty", "#looping", "#no &lt;/think&gt;"},
      rows);
}

std::string AlarmsList(const v1::Statistics& statistics) {
  if (statistics.alarms().empty()) return "<p>No alarms.</p>\n";
  std::string html = "<ul>\n";
  for (const v1::Alarm& alarm : statistics.alarms()) {
    html += fmt::format("<li class=\"bad\"><b>{}</b>: {}</li>\n", EscapeHtml(alarm.kind()),
                        EscapeHtml(alarm.message()));
  }
  return html + "</ul>\n";
}

}  // namespace

std::string StatisticsHtml(const v1::Statistics& statistics) {
  std::string html = fmt::format("<h2>Alarms</h2>\n{}", AlarmsList(statistics));
  html += fmt::format(
      "<h2>Rms of rows by boundary</h2>\n<p class=\"dim\">{} rows of {} samples. Boundary k is the "
      "residual stream after k layers. Median, and 1 to 99 % of the rows; logarithmic. Cosine: of "
      "rows with the same rows at the boundary captured before, the mean.</p>\n{}{}",
      statistics.rows(), statistics.samples(), RangesSvg(statistics), BoundariesTable(statistics));
  html += fmt::format("<h2>Rows by rms</h2>\n{}", HistogramsSvg(statistics));
  html += fmt::format(
      "<h2>By kind of token</h2>\n<p class=\"dim\">A token counts in the first of these that it "
      "is: "
      "first of its sample, special, supervised, prompt.</p>\n{}",
      ClassesTable(statistics));
  html += fmt::format(
      "<h2>Channels with most energy</h2>\n<p class=\"dim\">A few channels that hold most of it "
      "are "
      "normal in this family of models.</p>\n{}",
      OutliersTable(statistics));
  html += fmt::format(
      "<h2>Sources</h2>\n<p class=\"dim\">Policy gap: mean −log p of the supervised tokens less "
      "the "
      "mean entropy there, in nats. About 0 for the model's own text at temperature 1, below for "
      "lower temperatures, far above for text of another model, template or thinking mode.</p>\n"
      "{}{}",
      GapsSvg(statistics), SourcesTable(statistics));
  html += fmt::format(
      "<h2>Lengths</h2>\n<p class=\"dim\">Samples by tokens of prompt and answer, "
      "each to its own peak; logarithmic.</p>\n{}",
      LengthsSvg(statistics));
  return html;
}

}  // namespace statetap
