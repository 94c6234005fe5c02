#include "extractor/base/json.h"

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

namespace statetap {
namespace {

constexpr size_t kMaxDepth = 512;
// Objects keep their order in a list, so filling one costs the square of its keys.
constexpr size_t kMaxKeys = 4096;

// An integer beyond 64 bits: its digits, which a double would lose.
constexpr uint8_t kBigInteger = 1;  // the subtype

bool IsInteger(std::string_view number) {
  return number.find_first_of(".eE") == std::string_view::npos;
}

// Builds the value as the parser reads it, and refuses what readers disagree on.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return Put(nullptr); }
  bool boolean(bool value) override { return Put(value); }
  bool number_integer(int64_t value) override { return Put(value); }
  bool number_unsigned(uint64_t value) override { return Put(value); }
  bool number_float(double value, const std::string& text) override {
    if (!IsInteger(text)) return Put(value);
    return Put(Json::binary({text.begin(), text.end()}, kBigInteger));
  }
  bool string(std::string& value) override { return Put(std::move(value)); }
  bool binary(Json::binary_t&) override { return false; }
  bool start_object(size_t) override {
    keys_.emplace_back();
    return Open(Json::object());
  }
  bool key(std::string& key) override {
    std::unordered_set<std::string>& known = keys_.back();
    if (!known.insert(key).second) return Refuse(fmt::format("key \"{}\" is given twice", key));
    if (known.size() > kMaxKeys)
      return Refuse(fmt::format("an object has more than {} keys", kMaxKeys));
    key_ = std::move(key);
    return true;
  }
  bool end_object() override {
    keys_.pop_back();
    open_.pop_back();
    return true;
  }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_array() override {
    open_.pop_back();
    return true;
  }
  bool parse_error(size_t byte, const std::string&, const Json::exception& error) override {
    if (dynamic_cast<const Json::out_of_range*>(&error) != nullptr)
      return Refuse("a number is too large for a double (like 1e400); give it as a string");
    // The library's text starts with its own identifier in brackets.
    std::string_view what = error.what();
    if (const size_t end = what.find("] "); end != std::string_view::npos)
      what.remove_prefix(end + 2);
    fault_ = fmt::format("no valid JSON at byte {}: {}", byte, what);
    return false;
  }

  Json& root() { return root_; }
  const std::string& fault() const { return fault_; }

 private:
  bool Refuse(std::string_view what) {
    fault_ = fmt::format("JSON: {}", what);
    return false;
  }
  Json* Place(Json value) {
    if (open_.empty()) return &(root_ = std::move(value));
    Json& parent = *open_.back();
    if (parent.is_array()) return &parent.get_ref<Json::array_t&>().emplace_back(std::move(value));
    // The key is new: no search.
    auto& members = parent.get_ref<Json::object_t&>();
    return &members.Container::emplace_back(std::move(key_), std::move(value)).second;
  }
  bool Put(Json value) {
    Place(std::move(value));
    return true;
  }
  bool Open(Json value) {
    if (open_.size() > kMaxDepth)
      return Refuse(fmt::format("nested more than {} levels deep", kMaxDepth));
    open_.push_back(Place(std::move(value)));
    return true;
  }

  Json root_;
  std::vector<Json*> open_;                            // containers, the outermost first
  std::vector<std::unordered_set<std::string>> keys_;  // of the open objects
  std::string key_, fault_;
};

bool HoldsBigInteger(const Json& value) {
  if (!value.is_structured()) return value.is_binary();
  return std::any_of(value.begin(), value.end(), HoldsBigInteger);
}

std::string Dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void AppendDump(const Json& value, std::string* to) {
  if (!HoldsBigInteger(value)) {
    *to += Dump(value);
  } else if (value.is_binary()) {
    *to += *BigInteger(value);
  } else {
    std::string_view before;
    *to += value.is_array() ? '[' : '{';
    for (auto item = value.begin(); item != value.end(); ++item) {
      *to += before;
      if (value.is_object()) *to += Dump(item.key()) + ':';
      AppendDump(*item, to);
      before = ",";
    }
    *to += value.is_array() ? ']' : '}';
  }
}

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text) {
  Builder builder;
  if (!Json::sax_parse(text.begin(), text.end(), &builder))
    return absl::InvalidArgumentError(builder.fault());
  return std::move(builder.root());
}

std::optional<std::string> BigInteger(const Json& value) {
  if (!value.is_binary()) return std::nullopt;
  const auto& digits = value.get_binary();
  return std::string(digits.begin(), digits.end());
}

const Json* FindMember(const Json& object, std::string_view key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::string DumpJson(const Json& value) {
  std::string text;
  AppendDump(value, &text);
  return text;
}

}  // namespace statetap
