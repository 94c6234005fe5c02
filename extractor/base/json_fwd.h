// Json by name only, for headers: the library itself costs a second a translation unit.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace statetap {

using Json = nlohmann::ordered_json;

}  // namespace statetap
