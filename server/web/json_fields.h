// The fields of a JSON object, taken one by one; those that nobody took are refused by name. A
// field that is null counts as missing.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "extractor/base/json.h"

namespace statetap {

class JsonFields {
 public:
  // INVALID_ARGUMENT where `body` is no JSON object. `what` names it in errors.
  static absl::StatusOr<JsonFields> Parse(std::string_view body, std::string_view what);
  // REQUIRES: an object. `prefix`: before its fields' names in errors.
  explicit JsonFields(Json object, std::string prefix = "")
      : object_(std::move(object)), prefix_(std::move(prefix)) {}

  // Null where it is missing.
  const Json* Take(const std::string& name);
  // INVALID_ARGUMENT where it is there and something else, or out of bounds.
  absl::StatusOr<std::optional<int64_t>> Integer(const std::string& name, int64_t least,
                                                 int64_t most);
  absl::StatusOr<std::optional<double>> Number(const std::string& name, double least, double most);
  absl::StatusOr<bool> Flag(const std::string& name, bool otherwise);
  absl::StatusOr<std::optional<std::string>> Text(const std::string& name);
  // Of a field that can be given in one way only: missing, or one of these.
  absl::Status Only(const std::string& name, std::initializer_list<Json> values,
                    std::string_view remedy);
  // Taken, whatever it holds: it has no part in the answer.
  void Ignore(const std::string& name) { Take(name); }
  // REQUIRES: all known fields were taken.
  absl::Status NoOthers() const;

  // INVALID_ARGUMENT: the field, its value cut to a line, and what to give instead.
  absl::Status Refuse(std::string_view name, std::string_view remedy) const;

 private:
  Json object_;
  std::string prefix_;
  std::set<std::string, std::less<>> taken_;
};

}  // namespace statetap
