#include "extractor/base/json.h"

#include <unordered_set>
#include <vector>

namespace statetap {
namespace {

constexpr int kMaxDepth = 512;
// Objects keep their order in a list, so filling one costs the square of its keys.
constexpr size_t kMaxKeys = 4096;

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text) {
  std::vector<std::unordered_set<std::string>> keys;
  std::string fault;
  const auto callback = [&](int depth, Json::parse_event_t event, Json& parsed) {
    // Once the text is refused, nothing more of it is kept.
    if (!fault.empty()) return false;
    switch (event) {
      case Json::parse_event_t::object_start:
        if (depth > kMaxDepth) fault = fmt::format("nested more than {} levels deep", kMaxDepth);
        keys.emplace_back();
        break;
      case Json::parse_event_t::object_end: keys.pop_back(); break;
      case Json::parse_event_t::array_start:
        if (depth > kMaxDepth) fault = fmt::format("nested more than {} levels deep", kMaxDepth);
        break;
      case Json::parse_event_t::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        if (!keys.back().insert(key).second) fault = fmt::format("key \"{}\" is given twice", key);
        if (keys.back().size() > kMaxKeys)
          fault = fmt::format("an object has more than {} keys", kMaxKeys);
        break;
      }
      default: break;
    }
    return fault.empty();
  };
  try {
    Json value = Json::parse(text.begin(), text.end(), callback);
    if (!fault.empty()) return absl::InvalidArgumentError(fmt::format("JSON: {}", fault));
    return value;
  } catch (const Json::parse_error& error) {
    // The library's text starts with its own identifier in brackets.
    std::string_view what = error.what();
    if (const size_t end = what.find("] "); end != std::string_view::npos)
      what.remove_prefix(end + 2);
    return absl::InvalidArgumentError(
        fmt::format("no valid JSON at byte {}: {}", error.byte, what));
  } catch (const Json::out_of_range&) {
    return absl::InvalidArgumentError(
        "JSON: a number is too large for a double (like 1e400); give it as a string");
  }
}

const Json* FindMember(const Json& object, std::string_view key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::string DumpJson(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace statetap
