// What a check of a folder found: a row a rule, whether it holds or not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace statetap {

enum class Verdict {
  kOk,
  kNote,     // nothing wrong, but worth knowing
  kWarning,  // may be wrong: a person has to decide
  kFault
};

struct RuleRow {
  Verdict verdict = Verdict::kOk;
  std::string rule;  // what was looked at: a key, a field, a total
  std::string found;
  std::string expected;
  std::string why;  // where `expected` comes from, and what to do
};

class RuleReport {
 public:
  void Add(RuleRow row) { rows_.push_back(std::move(row)); }
  const std::vector<RuleRow>& rows() const { return rows_; }
  int64_t Count(Verdict verdict) const {
    return std::ranges::count(rows_, verdict, &RuleRow::verdict);
  }

 private:
  std::vector<RuleRow> rows_;
};

}  // namespace statetap
