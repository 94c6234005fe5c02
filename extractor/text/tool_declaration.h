// K2.5's declaration of tools: TypeScript-like text, or compact JSON where that is not possible.
#pragma once

#include <string>

#include "extractor/base/json_fwd.h"
#include "extractor/base/status.h"

namespace statetap {

// `tools`: a list of OpenAI-style declarations, sorted by key (SortedByKey). Entries that are no
// functions are left out; an empty string if none is left. INVALID_ARGUMENT for a schema that the
// vendor's encoder refuses: the prompt then has the tools as JSON.
absl::StatusOr<std::string> TypeScriptDeclaration(const Json& tools);

// What stands in the prompt: the text above, or the whole list as compact JSON.
std::string ToolDeclarationText(const Json& tools);

}  // namespace statetap
