#include "proto/messages/html.h"

#include <fmt/format.h>

namespace statetap {
namespace {

constexpr std::string_view kStyle = R"css(
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5b6470; --paper: #fff; --line: #d5dae0;
  --mark: #2f6fb3; --soft: #dce9f6; --bad: #b3261e; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --dim: #9aa4af; --paper: #14171a;
  --line: #333a41; --mark: #7fb4e8; --soft: #1f3449; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: .2rem 0 .6rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
a { color: var(--mark); } .dim { color: var(--dim); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } thead th { border-bottom: 1px solid var(--line); }
.n { text-align: right; font-variant-numeric: tabular-nums; } td.wide { white-space: normal; min-width: 14rem; }
progress { width: 9rem; accent-color: var(--mark); } svg { max-width: 100%; min-width: 36rem; height: auto; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; } svg .bad { fill: var(--bad); } svg .axis { stroke: var(--line); }
svg .bar { fill: var(--soft); stroke: var(--mark); } svg .line { stroke: var(--mark); stroke-width: 2; }
svg .dot { fill: var(--mark); }
button, input, summary { font: inherit; color: inherit; } summary { cursor: pointer; }
button, input { padding: .25rem .7rem; background: var(--soft); border: 1px solid var(--mark);
  border-radius: .3rem; } input { max-width: 100%; background: none; }
form { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: baseline; margin: .8rem 0; }
:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
h1 { overflow-wrap: anywhere; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }
.tokens .s { background: var(--soft); border-bottom: 2px solid var(--mark); }
.tokens .p1 { background: #f5d90a40; } .tokens .p2 { background: #f76b1566; }
.tokens .p3 { background: #e5484d80; }
@media print { :root { color-scheme: light; } body { max-width: none; padding: 0; font-size: 11px; }
  th, td { padding-right: .5rem; } .scroll { overflow: visible; } .tokens span { print-color-adjust: exact; }
  h2 { break-after: avoid; } svg, tr { break-inside: avoid; } form { display: none; } }
)css";

}  // namespace

std::string EscapeHtml(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? ' ' : c;
    }
  }
  return out;
}

std::string HtmlPage(std::string_view title, std::string_view head, std::string_view body) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{}</title>\n<style>{}</style>\n{}</head>\n<body>\n{}\n</body></html>\n",
      EscapeHtml(title), kStyle, head, body);
}

std::string HtmlTable(const std::vector<std::string>& titles,
                      const std::vector<std::vector<std::string>>& rows) {
  const auto kind = [&](size_t column) {
    return titles[column].starts_with('#')   ? " class=\"n\""
           : titles[column].starts_with('~') ? " class=\"wide\""
                                             : "";
  };
  std::string html = "<div class=\"scroll\" tabindex=\"0\"><table><thead><tr>";
  for (size_t i = 0; i < titles.size(); ++i) {
    const std::string_view attribute = kind(i);
    html += fmt::format("<th{}>{}</th>", attribute, titles[i].substr(attribute.empty() ? 0 : 1));
  }
  html += "</tr></thead><tbody>\n";
  for (const std::vector<std::string>& row : rows) {
    html += "<tr>";
    for (size_t i = 0; i < row.size(); ++i) {
      html += fmt::format("<td{}>{}</td>", kind(i), row[i]);
    }
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

}  // namespace statetap
