// manual, completion: made from the commands themselves, so that they cannot fall behind.
#include "client/cli/commands.h"

namespace statetap {
namespace {

std::vector<const CLI::App*> CommandsOf(const CLI::App& root) {
  return root.get_subcommands([](const CLI::App*) { return true; });
}

std::vector<std::string> LongNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

// "-h, --help", or "FILE" of what is given by its place.
std::string NamesOf(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return names.empty() ? option.get_name(/*positional=*/true)
                       : fmt::format("{}", fmt::join(names, ", "));
}

// Text of a manual page (man(7)): no character of it is a request.
std::string Troff(std::string_view text) {
  std::string out;
  bool line_begins = true;
  for (const char c : text) {
    if (line_begins && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
    line_begins = c == '\n';
  }
  return out;
}

std::string TroffOptions(const CLI::App& app) {
  std::string out;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    out +=
        fmt::format(".TP\n.B {}\n{}\n", Troff(NamesOf(*option)), Troff(option->get_description()));
  }
  return out;
}

// man(7) source of all commands.
std::string ManualOf(const CLI::App& root, std::string_view version) {
  std::string out = fmt::format(
      ".TH STATETAP 1 \"\" \"statetap {0}\" \"User Commands\"\n.SH NAME\nstatetap \\- {1}\n"
      ".SH SYNOPSIS\n.B statetap\n.I COMMAND\n[options]\n.SH OPTIONS\n{2}.SH COMMANDS\n",
      version, Troff(root.get_description()), TroffOptions(root));
  for (const CLI::App* command : CommandsOf(root)) {
    out += fmt::format(".SS {}\n{}\n{}.PP\n.nf\n{}\n.fi\n", Troff(command->get_name()),
                       Troff(command->get_description()), TroffOptions(*command),
                       Troff(command->get_footer()));
  }
  out += fmt::format(".SH EXAMPLES AND EXIT STATUS\n.nf\n{}\n.fi\n", Troff(root.get_footer()));
  return out;
}

std::string BashCompletion(const CLI::App& root) {
  std::string names, cases;
  for (const CLI::App* command : CommandsOf(root)) {
    names += (names.empty() ? "" : "|") + command->get_name();
    cases += fmt::format("    {}) words=\"{}\" ;;\n", command->get_name(),
                         fmt::join(LongNames(*command), " "));
  }
  std::string words = names;
  std::replace(words.begin(), words.end(), '|', ' ');
  const std::string global = fmt::format("{}", fmt::join(LongNames(root), " "));
  return fmt::format(R"(_statetap() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command= words= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case $word in
      {0}) command=$word; break ;;
    esac
  done
  case $command in
    "") words="{1}" ;;
{2}  esac
  mapfile -t COMPREPLY < <(compgen -W "$words {3}" -- "$current"
    if [ -n "$command" ]; then compgen -f -- "$current"; fi)
}}
complete -o filenames -F _statetap statetap
)",
                     names, words, cases, global);
}

// In fish's single quotes only \ and ' are special.
std::string Quoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + "'";
}

std::string FishCompletion(const CLI::App& root) {
  std::string out;
  const auto add_options = [&](const CLI::App& app, const std::string& condition) {
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) {
        out += fmt::format("complete -c statetap{} -l {} -d {}\n", condition, name,
                           Quoted(option->get_description()));
      }
    }
  };
  add_options(root, "");
  for (const CLI::App* command : CommandsOf(root)) {
    out += fmt::format("complete -c statetap -n __fish_use_subcommand -a {} -d {}\n",
                       command->get_name(), Quoted(command->get_description()));
    add_options(*command, fmt::format(" -n '__fish_seen_subcommand_from {}'", command->get_name()));
  }
  return out;
}

absl::StatusOr<int> Completion(Context& context, const CLI::App& root, const std::string& shell) {
  if (shell == "fish") {
    context.out << FishCompletion(root);
    return kExitDone;
  }
  if (shell == "zsh") context.out << "autoload -U +X bashcompinit && bashcompinit\n";
  context.out << BashCompletion(root);
  return kExitDone;
}

}  // namespace

std::vector<Command> ManualCommands() {
  Command manual{"manual", "The manual page, for man(1)",
                 "Examples:\n  statetap manual | man -l -\n"
                 "  statetap manual > ~/.local/share/man/man1/statetap.1",
                 [](CLI::App& app) -> Runner {
                   return [&app](Context& context) -> absl::StatusOr<int> {
                     context.out << ManualOf(*app.get_parent(), STATETAP_VERSION);
                     return kExitDone;
                   };
                 }};
  Command completion{"completion", "Completion of commands and options for a shell",
                     "Examples:\n  source <(statetap completion bash)\n"
                     "  statetap completion fish > ~/.config/fish/completions/statetap.fish",
                     [](CLI::App& app) -> Runner {
                       auto shell = std::make_shared<std::string>();
                       app.add_option("SHELL", *shell, "bash, zsh or fish")
                           ->required()
                           ->check(CLI::IsMember({"bash", "zsh", "fish"}));
                       return [&app, shell](Context& context) {
                         return Completion(context, *app.get_parent(), *shell);
                       };
                     }};
  return {manual, completion};
}

}  // namespace statetap
