#include "server/web/json_fields.h"

#include "extractor/base/suggest.h"
#include "extractor/base/text.h"

namespace statetap {

absl::StatusOr<JsonFields> JsonFields::Parse(std::string_view body, std::string_view what) {
  absl::StatusOr<Json> json = ParseJson(body);
  if (!json.ok()) return WithContext(json.status(), what);
  if (!json->is_object())
    return absl::InvalidArgumentError(fmt::format("{}: give a JSON object", what));
  return JsonFields(*std::move(json));
}

const Json* JsonFields::Take(const std::string& name) {
  taken_.insert(name);
  return FindMember(object_, name);
}

absl::Status JsonFields::Refuse(std::string_view name, std::string_view remedy) const {
  const Json* value = FindMember(object_, name);
  return absl::InvalidArgumentError(
      fmt::format("{}{}: {} is not possible; {}", prefix_, name,
                  value == nullptr ? "null" : CutMiddle(DumpJson(*value), 100), remedy));
}

absl::StatusOr<std::optional<int64_t>> JsonFields::Integer(const std::string& name, int64_t least,
                                                           int64_t most) {
  const Json* value = Take(name);
  if (value == nullptr) return std::nullopt;
  // An unsigned number of the library is above what fits.
  const bool fits = value->is_number_integer() &&
                    !(value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX);
  if (!fits || value->get<int64_t>() < least || value->get<int64_t>() > most)
    return Refuse(name, least == most ? fmt::format("give {}, or leave it out", least)
                                      : fmt::format("give an integer of {} to {}", least, most));
  return value->get<int64_t>();
}

absl::StatusOr<std::optional<double>> JsonFields::Number(const std::string& name, double least,
                                                         double most) {
  const Json* value = Take(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number() || !(value->get<double>() >= least && value->get<double>() <= most))
    return Refuse(name, fmt::format("give a number of {} to {}", least, most));
  return value->get<double>();
}

absl::StatusOr<bool> JsonFields::Flag(const std::string& name, bool otherwise) {
  const Json* value = Take(name);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) return Refuse(name, "give true or false");
  return value->get<bool>();
}

absl::StatusOr<std::optional<std::string>> JsonFields::Text(const std::string& name) {
  const Json* value = Take(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) return Refuse(name, "give a string");
  return value->get<std::string>();
}

absl::Status JsonFields::Only(const std::string& name, std::initializer_list<Json> values,
                              std::string_view remedy) {
  const Json* value = Take(name);
  if (value == nullptr) return absl::OkStatus();
  for (const Json& one : values) {
    if (*value == one) return absl::OkStatus();
  }
  return Refuse(name, remedy);
}

absl::Status JsonFields::NoOthers() const {
  for (const auto& [name, value] : object_.items()) {
    if (value.is_null() || taken_.contains(name)) continue;
    const std::string near = Nearest(name, {taken_.begin(), taken_.end()});
    return absl::InvalidArgumentError(
        fmt::format("{}{}: this server has no such field; {}", prefix_, CutMiddle(name, 100),
                    near.empty() ? "leave it out" : fmt::format("did you mean {}?", near)));
  }
  return absl::OkStatus();
}

}  // namespace statetap
