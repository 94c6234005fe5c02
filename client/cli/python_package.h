// Commands whose work the Python package does: whoever trains has Python, and torch's and Arrow's
// files have their libraries there (docs/decisions/exporters.md).
#pragma once

#include <string>

#include "client/cli/command.h"

namespace statetap {

// Runs `python3 -m module [command]` (STATETAP_PYTHON names another interpreter) with the options
// of `app` that were given, --json and --quiet, and, for a command, --server; its exit code.
// FAILED_PRECONDITION says how to install the package where it is missing.
absl::StatusOr<int> RunPackage(Context& context, const CLI::App& app, const std::string& module,
                               const std::string& command);

}  // namespace statetap
