#include "extractor/checkpoint/config_reader.h"

#include <fmt/ranges.h>

#include <cmath>

#include "extractor/base/json.h"

namespace statetap {
namespace {

const Json* FindKey(const Json& object, std::string_view key) {
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

// Equal whatever the order of keys; 10 equals 10.0.
bool SameValue(const Json& a, const Json& b) { return nlohmann::json(a) == nlohmann::json(b); }

}  // namespace

std::string ShownValue(const Json& value) {
  constexpr size_t kMost = 80;
  std::string text = DumpJson(value);
  if (text.size() > kMost) text = text.substr(0, kMost) + "…";
  return text;
}

absl::StatusOr<ConfigReader> ConfigReader::Make(const Json& config) {
  if (!config.is_object()) {
    return absl::InvalidArgumentError(
        fmt::format("the configuration is {}, an object is needed", config.type_name()));
  }
  const Json* text = FindKey(config, "text_config");
  if (text == nullptr) return ConfigReader(config, nullptr);
  if (!text->is_object()) {
    return absl::InvalidArgumentError(
        fmt::format("text_config is {}, an object is needed", text->type_name()));
  }
  return ConfigReader(*text, &config);
}

std::string ConfigReader::Path(std::string_view key) const {
  return fmt::format("{}{}", outer_ != nullptr ? "text_config." : "", key);
}

void ConfigReader::Fail(std::string message) {
  if (fault_.empty()) fault_ = std::move(message);
}

absl::Status ConfigReader::status() const {
  if (!fault_.empty()) return absl::InvalidArgumentError(fault_);
  if (missing_.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("{} missing", fmt::join(missing_, ", ")));
}

const Json* ConfigReader::Lookup(std::string_view key, bool null_is_a_value) {
  const Json* inner = FindKey(*text_, key);
  const Json* outer = outer_ != nullptr ? FindKey(*outer_, key) : nullptr;
  if (inner == nullptr || outer == nullptr) return inner;
  const bool comparable = null_is_a_value || (!inner->is_null() && !outer->is_null());
  if (comparable && !SameValue(*inner, *outer)) {
    Fail(fmt::format("{0} is {1} outside and {2} in text_config; make the two agree", key,
                     ShownValue(*outer), ShownValue(*inner)));
  }
  return inner;
}

const Json* ConfigReader::Find(std::string_view key) {
  const Json* value = Lookup(key, /*null_is_a_value=*/false);
  return value == nullptr || value->is_null() ? nullptr : value;
}

const Json* ConfigReader::FindAnywhere(std::string_view key) {
  const Json* inner = Find(key);
  return inner != nullptr ? inner : FindOuter(key);
}

const Json* ConfigReader::FindInner(std::string_view key) const { return FindMember(*text_, key); }

const Json* ConfigReader::FindOuter(std::string_view key) const {
  return outer_ != nullptr ? FindMember(*outer_, key) : nullptr;
}

int ConfigReader::IntOf(const Json& value, std::string_view path, int64_t least, int64_t most) {
  if (!value.is_number_integer()) {
    Fail(fmt::format("{} is {}, an integer is needed", path, ShownValue(value)));
    return static_cast<int>(least);
  }
  const bool huge = value.is_number_unsigned() &&
                    value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()};
  const int64_t number = huge ? 0 : value.get<int64_t>();
  if (huge || number < least || number > most) {
    Fail(fmt::format("{} is {}, {} to {} is supported", path, ShownValue(value), least, most));
    return static_cast<int>(least);
  }
  return static_cast<int>(number);
}

double ConfigReader::DoubleOf(const Json& value, std::string_view path, double least, double most) {
  if (!value.is_number()) {
    Fail(fmt::format("{} is {}, a number is needed", path, ShownValue(value)));
    return least;
  }
  const double number = value.get<double>();
  if (!(number >= least && number <= most)) {
    Fail(fmt::format("{} is {}, {} to {} is supported", path, ShownValue(value), least, most));
    return least;
  }
  return number;
}

bool ConfigReader::BoolOf(const Json& value, std::string_view path) {
  if (!value.is_boolean()) {
    Fail(fmt::format("{} is {}, true or false is needed", path, ShownValue(value)));
    return false;
  }
  return value.get<bool>();
}

int ConfigReader::Int(std::string_view key, int64_t least, int64_t most) {
  if (const Json* value = Find(key)) return IntOf(*value, Path(key), least, most);
  Missing(Path(key));
  return static_cast<int>(least);
}

double ConfigReader::Double(std::string_view key, double least, double most) {
  if (const Json* value = Find(key)) return DoubleOf(*value, Path(key), least, most);
  Missing(Path(key));
  return least;
}

bool ConfigReader::Bool(std::string_view key) {
  if (const Json* value = Find(key)) return BoolOf(*value, Path(key));
  Missing(Path(key));
  return false;
}

int ConfigReader::NullableInt(std::string_view key, int if_null, int64_t least, int64_t most) {
  const Json* value = Lookup(key, /*null_is_a_value=*/true);
  if (value == nullptr) {
    Missing(fmt::format("{} (null where there is none)", Path(key)));
    return if_null;
  }
  return value->is_null() ? if_null : IntOf(*value, Path(key), least, most);
}

int ConfigReader::Int(std::string_view key, int64_t least, int64_t most, int fallback) {
  const Json* value = Find(key);
  return value != nullptr ? IntOf(*value, Path(key), least, most) : fallback;
}

double ConfigReader::Double(std::string_view key, double least, double most, double fallback) {
  const Json* value = Find(key);
  return value != nullptr ? DoubleOf(*value, Path(key), least, most) : fallback;
}

bool ConfigReader::Bool(std::string_view key, bool fallback) {
  const Json* value = Find(key);
  return value != nullptr ? BoolOf(*value, Path(key)) : fallback;
}

std::string ConfigReader::String(std::string_view key, std::string_view fallback) {
  const Json* value = Find(key);
  if (value == nullptr) return std::string(fallback);
  if (value->is_string()) return value->get<std::string>();
  Fail(fmt::format("{} is {}, a string is needed", Path(key), ShownValue(*value)));
  return std::string(fallback);
}

}  // namespace statetap
