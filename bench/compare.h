// A case of a bench: ours and a baseline in one run, alternating, medians of the rounds and of
// their ratios, and the line of JSON that scripts read.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/status.h"

namespace statetap::bench {

using Measure = std::function<absl::StatusOr<double>()>;

struct Comparison {
  std::string bench, name, baseline;  // no baseline: ours alone, null in the line
  std::string unit = "GB/s";
  int rounds = 5;
};

// Whether `name` is among `cases`, which have commas between.
inline bool HasCase(const std::string& cases, std::string_view name) {
  return ("," + cases + ",").find(fmt::format(",{},", name)) != std::string::npos;
}

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A line a round, then the line of JSON.
inline absl::Status Compare(const Comparison& c, const Measure& ours, const Measure& baseline) {
  std::vector<double> mine, theirs, ratios;
  for (int round = 0; round < c.rounds; ++round) {
    for (const bool of_ours : {round % 2 != 0, round % 2 == 0}) {  // who comes first alternates
      if (!of_ours && baseline == nullptr) continue;
      auto& rates = of_ours ? mine : theirs;
      STATETAP_ASSIGN_OR_RETURN(rates.emplace_back(), of_ours ? ours() : baseline());
    }
    std::string line =
        fmt::format("{} round {}: {:.2f} {}", c.name, round + 1, mine.back(), c.unit);
    if (baseline != nullptr) {
      ratios.push_back(mine.back() / theirs.back());
      line += fmt::format(", {} {:.2f}, ratio {:.3f}", c.baseline, theirs.back(), ratios.back());
    }
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }
  const auto number = [](const std::vector<double>& values) {
    return values.empty() ? std::string("null") : fmt::format("{:.4f}", Median(values));
  };
  fmt::print(
      "{{\"bench\":\"{}\",\"case\":\"{}\",\"value\":{},\"unit\":\"{}\",\"baseline\":{},"
      "\"baseline_value\":{},\"ratio\":{}}}\n",
      c.bench, c.name, number(mine), c.unit,
      baseline == nullptr ? "null" : fmt::format("\"{}\"", c.baseline), number(theirs),
      number(ratios));
  std::fflush(stdout);
  return absl::OkStatus();
}

}  // namespace statetap::bench
