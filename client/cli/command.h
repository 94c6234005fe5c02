// A command of `statetap`: its name, help and options, and what it does. One file a group of
// commands; app.cc knows them all.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <vector>

#include "client/cli/progress.h"
#include "client/lib/client.h"
#include "extractor/base/json.h"
#include "extractor/base/status.h"

namespace statetap {

enum ExitCode : int {
  kExitDone = 0,
  kExitFailed = 1,
  kExitUsage = 2,     // wrong usage or a refused input file
  kExitRejected = 3,  // done, but more samples were rejected than allowed
  kExitInterrupted = 130,
};

// Of --where, which means the same everywhere.
inline constexpr std::string_view kWhereHelp =
    "Only samples for which this holds: id, source, split, finish, index, tokens, prompt_tokens, "
    "supervised_tokens, generated_tokens, logprob, truncated and meta.NAME with == != < <= > >= in "
    "(...), and, or, not";

// Where a command's results and messages go, and which server it talks to.
class Context {
 public:
  struct Terminal {
    bool in = false, out = false, err = false;  // are they terminals?
    int width = 80;                             // columns
  };
  Context(std::ostream& out, std::ostream& err, Terminal terminal)
      : out(out), err(err), terminal(terminal) {}

  // Connects on first use. INVALID_ARGUMENT for an address without a port.
  absl::StatusOr<Client*> client();
  // From any thread: running calls end with CANCELLED.
  void Interrupt();
  bool interrupted() const { return interrupted_; }

  // A message on standard error; not with --quiet.
  void Say(std::string_view line);
  // Asks a person at the terminal; INVALID_ARGUMENT where nobody can answer.
  absl::StatusOr<bool> Confirm(std::string_view question);
  // One line of JSON on standard output.
  void PrintJson(const Json& value);
  // The width tables have to keep to on standard output; 0: none.
  int table_width() const { return terminal.out ? terminal.width : 0; }
  std::unique_ptr<Progress> MakeProgress();

  std::ostream& out;
  std::ostream& err;
  Terminal terminal;
  std::string server = "127.0.0.1:7070";
  bool json = false;
  bool quiet = false;
  ClientOptions client_options;

 private:
  std::mutex mutex_;
  std::unique_ptr<Client> client_;
  std::atomic<bool> interrupted_ = false;
};

// OK carries an exit code; errors become one by ExitCodeOf.
using Runner = std::function<absl::StatusOr<int>(Context&)>;

struct Command {
  std::string name;
  std::string help;      // one line
  std::string examples;  // below the options in --help
  // Adds the options to its part of the command line; what it returns is called once they are read.
  std::function<Runner(CLI::App&)> declare;
};

// INVALID_ARGUMENT is wrong usage, CANCELLED an interruption, all else a failure.
int ExitCodeOf(const absl::Status& status);

std::vector<Command> AllCommands();

// For unsigned options: the library would read -1 as 2^64 - 1.
std::string RefuseNegative(const std::string& text);
std::string AtLeastOne(const std::string& text);

// Runs `arguments` (without the program's name) and returns the exit code. Never throws.
int RunApp(const std::vector<std::string>& arguments, Context& context);

}  // namespace statetap
