// JSON values as Python prints them, which is what the vendor's templates do: key order kept,
// integers apart from floats, floats in the shortest form that reads back, text not escaped beyond
// what JSON needs.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "extractor/base/json.h"

namespace statetap {

struct JsonSeparators {
  std::string_view item = ", ";
  std::string_view key = ": ";
};
inline constexpr JsonSeparators kCompactSeparators = {",", ":"};

// json.dumps(value, ensure_ascii=False) with these separators.
std::string PythonJson(const Json& value, JsonSeparators separators = {});
// str(value) of a scalar: a string as it is, None, True, 10, 10.0, 1e-07. Nothing for lists and
// objects.
std::optional<std::string> PythonStr(const Json& value);
// bool(value): false for null, false, zero and whatever is empty.
bool PythonTruth(const Json& value);
// `value` with the keys of every object in order of code points; lists keep theirs.
Json SortedByKey(const Json& value);

}  // namespace statetap
