// JSON with key order kept and integers apart from floats (10 and 10.0 stay different), of any
// size.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "extractor/base/status.h"

namespace statetap {

using Json = nlohmann::ordered_json;

// Parses one JSON value that fills `text`. INVALID_ARGUMENT with the byte offset for bad syntax,
// bad UTF-8, a key given twice in an object (which reader wins differs between libraries, so we
// refuse), nesting beyond 512 levels, or more than 4096 keys in one object.
absl::StatusOr<Json> ParseJson(std::string_view text);

// The member, or null where it is missing or holds null.
const Json* FindMember(const Json& object, std::string_view key);

// The digits of an integer beyond 64 bits; nothing for any other value. Such a value is of none of
// the library's number types (is_number() is false), and DumpJson alone writes it.
std::optional<std::string> BigInteger(const Json& value);

// Compact text. Invalid UTF-8 inside strings becomes U+FFFD.
std::string DumpJson(const Json& value);

}  // namespace statetap
