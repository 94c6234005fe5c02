#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <thread>

#include "client/cli/command.h"

namespace {

int WidthOf(int descriptor) {
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  if (const char* columns = std::getenv("COLUMNS"); columns != nullptr && std::atoi(columns) > 0)
    return std::atoi(columns);
  return 80;
}

// The first Ctrl-C lets the command end its calls and say how things stand, the second ends it.
void HandleInterrupts(statetap::Context& context) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before any other thread starts
  std::thread([&context, signals] {
    for (int count = 1;; ++count) {
      int signal = 0;
      sigwait(&signals, &signal);
      if (count > 1) _exit(statetap::kExitInterrupted);
      context.Interrupt();
    }
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  const bool in = isatty(STDIN_FILENO) != 0;
  const bool out = isatty(STDOUT_FILENO) != 0, err = isatty(STDERR_FILENO) != 0;
  const int width = WidthOf(out ? STDOUT_FILENO : STDERR_FILENO);
  statetap::Context context(std::cout, std::cerr,
                            {.in = in, .out = out, .err = err, .width = width});
  HandleInterrupts(context);
  const int code = statetap::RunApp(std::vector<std::string>(argv + 1, argv + argc), context);
  std::cout.flush();
  std::cerr.flush();
  _exit(code);  // the signal thread still waits, with references into this frame
}
