#include "extractor/text/python_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <vector>

#include "extractor/base/json.h"

namespace statetap {
namespace {

// repr(float): the shortest digits, with an exponent below 1e-4 and from 1e16 on.
std::string FloatRepr(double value) {
  if (!std::isfinite(value))
    return std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
  char buffer[32];
  const auto scientific =
      std::to_chars(buffer, std::end(buffer), value, std::chars_format::scientific);
  const std::string_view shortest(buffer, scientific.ptr - buffer);
  const size_t e = shortest.find('e');
  int exponent = 0;
  std::from_chars(&shortest[e + 1] + (shortest[e + 1] == '+'), scientific.ptr, exponent);
  if (exponent < -4 || exponent >= 16) return std::string(shortest);
  const auto fixed = std::to_chars(buffer, std::end(buffer), value, std::chars_format::fixed);
  std::string text(buffer, fixed.ptr);
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

void AppendQuoted(std::string_view text, std::string* out) {
  *out += '"';
  for (const char c : text) {
    switch (c) {
      case '"': *out += "\\\""; break;
      case '\\': *out += "\\\\"; break;
      case '\n': *out += "\\n"; break;
      case '\r': *out += "\\r"; break;
      case '\t': *out += "\\t"; break;
      case '\b': *out += "\\b"; break;
      case '\f': *out += "\\f"; break;
      default:
        if (static_cast<uint8_t>(c) < 0x20) {
          *out += fmt::format("\\u{:04x}", static_cast<int>(c));
        } else {
          *out += c;
        }
    }
  }
  *out += '"';
}

void AppendJson(const Json& value, JsonSeparators separators, std::string* out) {
  std::string_view before;
  switch (value.type()) {
    case Json::value_t::object:
      *out += '{';
      for (const auto& [key, member] : value.items()) {
        *out += before;
        AppendQuoted(key, out);
        *out += separators.key;
        AppendJson(member, separators, out);
        before = separators.item;
      }
      *out += '}';
      break;
    case Json::value_t::array:
      *out += '[';
      for (const Json& item : value) {
        *out += before;
        AppendJson(item, separators, out);
        before = separators.item;
      }
      *out += ']';
      break;
    case Json::value_t::string: AppendQuoted(value.get_ref<const std::string&>(), out); break;
    case Json::value_t::boolean: *out += value.get<bool>() ? "true" : "false"; break;
    case Json::value_t::number_float: *out += FloatRepr(value.get<double>()); break;
    case Json::value_t::number_integer: *out += fmt::to_string(value.get<int64_t>()); break;
    case Json::value_t::number_unsigned: *out += fmt::to_string(value.get<uint64_t>()); break;
    case Json::value_t::binary: *out += *BigInteger(value); break;
    default: *out += "null"; break;
  }
}

}  // namespace

std::string PythonJson(const Json& value, JsonSeparators separators) {
  std::string text;
  AppendJson(value, separators, &text);
  return text;
}

std::optional<std::string> PythonStr(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_number() || BigInteger(value)) return PythonJson(value);
  return std::nullopt;
}

bool PythonTruth(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return false;
    case Json::value_t::boolean: return value.get<bool>();
    case Json::value_t::binary: return true;  // beyond 64 bits
    case Json::value_t::string: return !value.get_ref<const std::string&>().empty();
    case Json::value_t::array:
    case Json::value_t::object: return !value.empty();
    default: return value.get<double>() != 0;
  }
}

Json SortedByKey(const Json& value) {
  if (value.is_array()) {
    Json sorted = Json::array();
    for (const Json& item : value) sorted.push_back(SortedByKey(item));
    return sorted;
  }
  if (!value.is_object()) return value;
  std::vector<std::string> keys;
  for (const auto& [key, member] : value.items()) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  Json sorted = Json::object();
  for (const std::string& key : keys) sorted[key] = SortedByKey(value[key]);
  return sorted;
}

}  // namespace statetap
