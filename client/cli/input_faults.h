// Input files as `submit` and `tokens` take them: checked whole before anything is done with them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/lib/input_files.h"

namespace statetap {

std::string At(const LinePlace& place);  // "a.jsonl line 3"

// INVALID_ARGUMENT for a file that cannot be opened: it was named wrongly.
absl::StatusOr<std::unique_ptr<InputFiles>> OpenInput(const std::vector<std::string>& paths);

// Reads all lines and lists the bad ones on standard error. INVALID_ARGUMENT where there are any
// and they are not to be skipped, or where no sample is left.
absl::StatusOr<InputSummary> CheckInput(Context& context, const InputFiles& files, bool skip_bad);

}  // namespace statetap
