#include "client/cli/table.h"

#include <algorithm>
#include <cassert>
#include <numeric>

#include "client/cli/text_width.h"

namespace statetap {
namespace {

constexpr int kGap = 2;        // between columns
constexpr int kLeastKept = 8;  // columns are not cut below this

}  // namespace

void Table::Add(const std::vector<std::string>& cells) {
  assert(cells.size() == columns_.size());
  std::vector<std::string>& row = rows_.emplace_back();
  for (const std::string& cell : cells) row.push_back(Printable(cell));
}

std::vector<int> Table::Widths(int width) const {
  std::vector<int> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    int widest = DisplayWidth(columns_[c].title);
    for (const auto& row : rows_) widest = std::max(widest, DisplayWidth(row[c]));
    widths.push_back(widest);
  }
  if (width <= 0) return widths;
  int excess = std::accumulate(widths.begin(), widths.end(), 0) +
               kGap * (static_cast<int>(widths.size()) - 1) - width;
  while (excess > 0) {
    // The widest gives way first.
    int* widest = nullptr;
    for (size_t c = 0; c < columns_.size(); ++c) {
      if (!columns_[c].whole && widths[c] > kLeastKept &&
          (widest == nullptr || widths[c] > *widest))
        widest = &widths[c];
    }
    if (widest == nullptr) break;
    --*widest;
    --excess;
  }
  return widths;
}

std::string Table::FormatRow(const std::vector<std::string>& cells,
                             const std::vector<int>& widths) const {
  std::string line;
  for (size_t c = 0; c < cells.size(); ++c) {
    const std::string cell = Shorten(cells[c], widths[c]);
    const std::string space(static_cast<size_t>(std::max(0, widths[c] - DisplayWidth(cell))), ' ');
    if (c > 0) line.append(kGap, ' ');
    line += columns_[c].align == Column::Align::kRight ? space + cell : cell + space;
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::string Table::Format(int width) const {
  const std::vector<int> widths = Widths(width);
  std::vector<std::string> titles;
  for (const Column& column : columns_) titles.push_back(column.title);
  std::string text = FormatRow(titles, widths);
  for (const auto& row : rows_) text += FormatRow(row, widths);
  return text;
}

}  // namespace statetap
