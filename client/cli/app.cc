#include <CLI/Option.hpp>
#include <cstdlib>
#include <exception>

#include "client/cli/command.h"
#include "client/cli/commands.h"
#include "extractor/base/suggest.h"

namespace statetap {
namespace {

constexpr std::string_view kVersion = STATETAP_VERSION;

void AddGlobalOptions(CLI::App& app, Context& context) {
  app.add_option("--server", context.server, "Server's HOST:PORT [127.0.0.1:7070]")
      ->envname("STATETAP_SERVER");
  app.add_flag("--json", context.json, "Results as JSON");
  app.add_flag("--quiet", context.quiet, "No progress and no notes, errors only");
}

std::vector<std::string> NamesOf(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

// What a person may have meant by a word that is not known.
std::string Suggestion(const CLI::App& app, const CLI::App* command, const std::string& word) {
  std::vector<std::string> known;
  if (word.starts_with("-")) {
    known = NamesOf(app);
    if (command != nullptr)
      for (std::string& name : NamesOf(*command)) known.push_back(std::move(name));
  } else if (command == nullptr) {
    for (const CLI::App* one : app.get_subcommands([](const CLI::App*) { return true; }))
      known.push_back(one->get_name());
  }
  const std::string nearest = Nearest(word.substr(0, word.find('=')), known);
  return nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest);
}

const CLI::App* ParsedCommand(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? nullptr : parsed.front();
}

int RefuseUsage(const CLI::App& app, const std::string& what, Context& context) {
  const CLI::App* command = ParsedCommand(app);
  context.err << fmt::format("statetap: {}\nTry `statetap {}--help`.\n", what,
                             command == nullptr ? "" : command->get_name() + " ");
  return kExitUsage;
}

std::string DescribeParseError(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = ParsedCommand(app);
  const std::vector<std::string> unknown = app.remaining(/*recurse=*/true);
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !unknown.empty()) {
    const std::string& word = unknown.front();
    const std::string_view kind = word.starts_with("-") ? "option"
                                  : command == nullptr  ? "command"
                                                        : "argument";
    return fmt::format("unknown {} \"{}\"{}", kind, word, Suggestion(app, command, word));
  }
  return error.what();
}

int Report(const Command& command, const absl::Status& status, Context& context) {
  const int code = ExitCodeOf(status);
  if (code == kExitInterrupted) {
    context.Say("interrupted");
    return code;
  }
  context.err << fmt::format("statetap {}: {}\n", command.name, MessageOf(status));
  return code;
}

int RunCommand(const Command& command, const Runner& run, Context& context) {
  absl::StatusOr<int> code = absl::InternalError("did not run");
  try {
    code = run(context);
  } catch (const std::exception& fault) {  // memory, a library's own faults
    code = absl::InternalError(fmt::format("unexpected fault: {}", fault.what()));
  }
  if (code.ok() && !context.out.flush()) code = absl::InternalError("cannot write the results");
  return code.ok() ? *code : Report(command, code.status(), context);
}

}  // namespace

int ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk: return kExitDone;
    case absl::StatusCode::kInvalidArgument: return kExitUsage;
    case absl::StatusCode::kCancelled: return kExitInterrupted;
    default: return kExitFailed;
  }
}

std::string RefuseNegative(const std::string& text) {
  return text.starts_with("-") ? fmt::format("{} is negative; give 0 or more", text) : "";
}

std::string AtLeastOne(const std::string& text) {
  const bool is_number = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  const bool is_zero = text.find_first_not_of('0') == std::string::npos;
  return is_number && !is_zero ? "" : fmt::format("{} is not possible; give 1 or more", text);
}

std::vector<Command> AllCommands() {
  std::vector<Command> commands = {SubmitCommand(), EstimateCommand()};
  const auto add = [&](std::vector<Command> more) {
    for (Command& command : more) commands.push_back(std::move(command));
  };
  add(JobCommands());
  add(SampleCommands());
  add({TokensCommand()});
  add(ShardCommands());
  add({StatsCommand(), CompareCommand(), ViewCommand(), StreamCommand()});
  add(ExportCommands());
  add(ModelCommands());
  add({VerifyCommand(), MakeCheckpointCommand()});
  add(ManualCommands());
  return commands;
}

int RunApp(const std::vector<std::string>& arguments, Context& context) {
  CLI::App app("Statetap captures the hidden states of a base model while it answers prompts.",
               "statetap");
  app.set_version_flag("--version", fmt::format("statetap {}", kVersion));
  app.set_help_flag("-h,--help", "This help; `statetap COMMAND --help` for a command's");
  app.footer(
      "A first job:\n  statetap submit prompts.jsonl --wait\n  statetap list\n"
      "  statetap stats JOB --plot\n\n"
      "Exit: 0 done, 1 failed, 2 wrong usage or a refused file, 3 more samples rejected than "
      "--max-rejected allows, 130 interrupted.");
  AddGlobalOptions(app, context);
  app.fallthrough();
  app.require_subcommand(0, 1);

  const std::vector<Command> commands = AllCommands();
  std::vector<std::pair<CLI::App*, Runner>> runners;
  for (const Command& command : commands) {
    CLI::App* part = app.add_subcommand(command.name, command.help);
    part->footer(command.examples + "\n\nWith every command: --server HOST:PORT, --json, --quiet.");
    part->fallthrough();
    runners.emplace_back(part, command.declare(*part));
  }
  try {
    std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    const CLI::App* command = ParsedCommand(app);
    context.out << (command == nullptr ? app.help() : command->help("statetap"));
    return kExitDone;
  } catch (const CLI::CallForVersion&) {
    context.out << fmt::format("statetap {}\n", kVersion);
    return kExitDone;
  } catch (const CLI::ParseError& error) {
    return RefuseUsage(app, DescribeParseError(app, error), context);
  }
  for (size_t i = 0; i < commands.size(); ++i)
    if (runners[i].first->parsed()) return RunCommand(commands[i], runners[i].second, context);
  if (arguments.empty()) {
    context.out << app.help();
    return kExitUsage;
  }
  return RefuseUsage(app, "no command is given", context);
}

}  // namespace statetap
