// A table of text in columns. On a terminal the widest columns give way so that a row keeps to one
// line, as far as columns that stay whole allow; elsewhere nothing is cut.
#pragma once

#include <string>
#include <vector>

namespace statetap {

struct Column {
  enum class Align { kLeft, kRight } align = Align::kLeft;
  std::string title;
  bool whole = false;  // never cut: what people copy, and numbers
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // REQUIRES: one cell for each column. Control characters are made visible.
  void Add(const std::vector<std::string>& cells);
  bool empty() const { return rows_.empty(); }
  // `width`: columns of the terminal, 0: no limit.
  std::string Format(int width) const;

 private:
  std::vector<int> Widths(int width) const;
  std::string FormatRow(const std::vector<std::string>& cells,
                        const std::vector<int>& widths) const;
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

inline Column Left(std::string title) { return {Column::Align::kLeft, std::move(title), false}; }
inline Column Whole(std::string title) { return {Column::Align::kLeft, std::move(title), true}; }
inline Column Right(std::string title) { return {Column::Align::kRight, std::move(title), true}; }

}  // namespace statetap
