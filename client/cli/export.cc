// export, vocab-map: files for trainers, by the Python package (docs/decisions/exporters.md).
#include "client/cli/commands.h"
#include "client/cli/python_package.h"

namespace statetap {
namespace {

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
         return [&app, sources](Context& context) {
           return RunPackage(context, app, "statetap.export", app.get_name());
         };
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
         return [&app, sources](Context& context) {
           return RunPackage(context, app, "statetap.export", app.get_name());
         };
       }}};
}

}  // namespace statetap
