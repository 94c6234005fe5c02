// Pages that the server serves and the command line writes: one look, no files beside them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace statetap {

// & < > " ' as entities, control characters as spaces. REQUIRES: UTF-8, as messages hold it.
std::string EscapeHtml(std::string_view text);

// A whole document: the style inside, `body` between header and end as it is. `head`: more for
// <head>, as it is. Readable in print, in dark mode and 400 pixels wide.
std::string HtmlPage(std::string_view title, std::string_view head, std::string_view body);

// Cells are HTML already. Columns whose title starts with "#" are numbers, those with "~" text of
// several lines where it must; the sign is not shown.
std::string HtmlTable(const std::vector<std::string>& titles,
                      const std::vector<std::vector<std::string>>& rows);

}  // namespace statetap
