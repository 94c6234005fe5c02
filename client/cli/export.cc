// export, vocab-map: files for trainers. The Python package writes them
// (docs/decisions/exporters.md): whoever trains has Python, and torch's and Arrow's files have
// their libraries there. These commands are its command line.
#include <spawn.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "client/cli/commands.h"

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

absl::StatusOr<int> RunPackage(Context& context, const CLI::App& app) {
  constexpr std::string_view kLook =
      "import importlib.util, sys; sys.exit(importlib.util.find_spec('statetap') is None)";
  STATETAP_ASSIGN_OR_RETURN(const int missing, RunProgram({Python(), "-c", std::string(kLook)}));
  if (missing != 0)
    return absl::FailedPreconditionError(
        fmt::format("{} has no package statetap, which writes trainers' files: {} -m pip install "
                    "./client/python, or name another interpreter with STATETAP_PYTHON",
                    Python(), Python()));
  std::vector<std::string> words = {Python(), "-m", "statetap.export", app.get_name()};
  AppendOptions(app, words);
  words.insert(words.end(), {"--server", context.server});
  if (context.json) words.push_back("--json");
  if (context.quiet) words.push_back("--quiet");
  context.out.flush();
  return RunProgram(words);
}

void AddOption(CLI::App& app, const std::string& name, const std::string& help) {
  app.add_option(name)->description(help)->expected(1);
}

void AddFlag(CLI::App& app, const std::string& name, const std::string& help) {
  app.add_flag(name)->description(help);
}

// What both commands have; its vector receives jobs or paths.
std::shared_ptr<std::vector<std::string>> AddCommonOptions(CLI::App& app) {
  auto sources = std::make_shared<std::vector<std::string>>();
  app.add_option("JOB|PATH", *sources, "Jobs, or folders and files of shards");
  AddOption(app, "--out", "Folder to write to");
  AddOption(app, "--where", "Only samples that this expression holds for");
  AddOption(app, "--model", "The base model's folder: final norm, vocabulary size");
  return sources;
}

}  // namespace

std::vector<Command> ExportCommands() {
  return {
      {"export", "Writes a trainer's files from jobs or shards",
       "Needs the Python package (pip install ./client/python). An interrupted export goes on when "
       "the same command runs again.\n\n"
       "Examples:\n  statetap export --to speculators mine --out data/ --draft-vocab 32000\n"
       "  statetap export --to specforge shards/ --model models/tiny-kimi --out data/\n"
       "  statetap export --to head --model models/tiny-kimi --flat --out head/",
       [](CLI::App& app) -> Runner {
         const auto sources = AddCommonOptions(app);
         AddOption(app, "--to",
                   "speculators, specforge, torchspec, modelopt, angelslim, or head: embeddings, "
                   "head, final norm and config alone");
         AddOption(app, "--taps", "Boundaries, as in 2,30,58 [all that are stored]");
         AddOption(app, "--order", "shuffled or stored; train before eval either way [shuffled]");
         AddOption(app, "--seed", "Of the shuffled order [0]");
         AddOption(app, "--draft-vocab", "Writes the vocabulary map of this size, too");
         AddFlag(app, "--rows-only", "speculators: rows and counts, states come from the server");
         AddFlag(app, "--flat", "head: the text model's config at the top level, for SpecForge");
         return [&app, sources](Context& context) { return RunPackage(context, app); };
       }},
      {"vocab-map", "Makes d2t and t2d from the supervised tokens",
       "Needs the Python package (pip install ./client/python).\n\n"
       "Examples:\n  statetap vocab-map mine --report\n"
       "  statetap vocab-map shards/ --model models/tiny-kimi --draft-vocab 512 --out maps/",
       [](CLI::App& app) -> Runner {
         const auto sources = AddCommonOptions(app);
         app.add_option("--draft-vocab")
             ->description("Draft tokens; may be given more than once")
             ->expected(1)
             ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
         AddFlag(app, "--report", "Shares that maps of several sizes cover, by source");
         AddOption(app, "--against", "An earlier map: how far a new one differs");
         return [&app, sources](Context& context) { return RunPackage(context, app); };
       }}};
}

}  // namespace statetap
