// What the public engines do with a drafter's keys, as their loaders were read (2026).
#pragma once

#include <string>
#include <vector>

#include "extractor/checkpoint/drafter_config.h"
#include "extractor/checkpoint/drafter_rules.h"
#include "extractor/checkpoint/drafter_tensors.h"

namespace statetap {

// Adds a row for what `engine` renames, skips or refuses. `unknown`: keys that no style has.
void AddEngineRows(DrafterEngine engine, const DrafterConfig& config, DrafterStyle style,
                   const std::vector<std::string>& unknown, RuleReport& report);

}  // namespace statetap
