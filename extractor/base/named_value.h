// Values of an option and the words people write for them, in one table.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "extractor/base/status.h"

namespace statetap {

template <typename Value>
using NamedValue = std::pair<Value, std::string_view>;

// INVALID_ARGUMENT lists the names; `what` says of what.
template <typename Value, size_t size>
absl::StatusOr<Value> ValueOf(const NamedValue<Value> (&table)[size], std::string_view what,
                              std::string_view name) {
  std::string names;
  for (const auto& [value, known] : table) {
    if (known == name) return value;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", known);
  }
  return absl::InvalidArgumentError(
      fmt::format("{} \"{}\" is unknown; it is one of {}", what, name, names));
}

// REQUIRES: the table has the value.
template <typename Value, size_t size>
std::string_view NameIn(const NamedValue<Value> (&table)[size], Value value) {
  for (const auto& [known, name] : table) {
    if (known == value) return name;
  }
  return table[0].second;
}

}  // namespace statetap
