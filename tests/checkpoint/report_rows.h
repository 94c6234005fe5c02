// Rows of a report, to be looked at.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "extractor/checkpoint/rule_report.h"

namespace statetap::testing {

inline std::vector<std::string> RulesOf(const RuleReport& report, Verdict verdict) {
  std::vector<std::string> rules;
  for (const RuleRow& row : report.rows()) {
    if (row.verdict == verdict) rules.push_back(row.rule);
  }
  return rules;
}

inline RuleRow RowOf(const RuleReport& report, std::string_view rule) {
  for (const RuleRow& row : report.rows()) {
    if (row.rule == rule) return row;
  }
  ADD_FAILURE() << "no row " << rule;
  return {};
}

}  // namespace statetap::testing
