#include "client/cli/python_package.h"

#include <spawn.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

extern char** environ;

namespace statetap {
namespace {

std::string Python() {
  const char* named = std::getenv("STATETAP_PYTHON");
  return named != nullptr && *named != '\0' ? named : "python3";
}

// Runs the program and waits; its exit code. FAILED_PRECONDITION where it cannot be started.
absl::StatusOr<int> RunProgram(const std::vector<std::string>& words) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t child = 0;
  if (const int error =
          posix_spawnp(&child, arguments[0], nullptr, nullptr, arguments.data(), environ);
      error != 0)
    return absl::FailedPreconditionError(
        fmt::format("cannot run {}: {}; STATETAP_PYTHON names the interpreter that has the "
                    "package statetap",
                    words[0], std::strerror(error)));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : kExitFailed;
}

// The command line again, as the package takes it.
void AppendOptions(const CLI::App& app, std::vector<std::string>& words) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() == 0) continue;
    for (const std::string& value : option->results()) {
      if (!option->get_lnames().empty()) words.push_back("--" + option->get_lnames().front());
      if (option->get_items_expected_max() > 0) words.push_back(value);
    }
  }
}

}  // namespace

absl::StatusOr<int> RunPackage(Context& context, const CLI::App& app, const std::string& module,
                               const std::string& command) {
  constexpr std::string_view kLook =
      "import importlib.util, sys; sys.exit(importlib.util.find_spec('statetap') is None)";
  STATETAP_ASSIGN_OR_RETURN(const int missing, RunProgram({Python(), "-c", std::string(kLook)}));
  if (missing != 0)
    return absl::FailedPreconditionError(
        fmt::format("{} has no package statetap, which this needs: {} -m pip install "
                    "./client/python, or name another interpreter with STATETAP_PYTHON",
                    Python(), Python()));
  std::vector<std::string> words = {Python(), "-m", module};
  if (!command.empty()) words.insert(words.end(), {command, "--server", context.server});
  AppendOptions(app, words);
  if (context.json) words.push_back("--json");
  if (context.quiet) words.push_back("--quiet");
  context.out.flush();
  return RunProgram(words);
}

}  // namespace statetap
