// statetapd as a process: started on port 0, waited for, signalled, killed.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "extractor/base/file.h"

namespace statetap::testing {

class ServerProcess {
 public:
  // `out` and `err` of the process go to files below `logs`.
  ServerProcess(std::vector<std::string> arguments, const std::filesystem::path& logs)
      : out_(logs / "stdout"), err_(logs / "stderr") {
    arguments.insert(arguments.begin(), std::string(STATETAP_BIN_DIR) + "/statetapd");
    std::filesystem::remove(out_);  // of a process before this one
    pid_ = fork();
    if (pid_ != 0) return;
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    dup2(open(out_.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0644), STDOUT_FILENO);
    dup2(open(err_.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0644), STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  ~ServerProcess() {
    if (pid_ > 0) {
      Signal(SIGKILL);
      WaitForExit();
    }
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // The address after "grpc=" of the ready line; empty where the process ended or 60 s passed.
  std::string WaitUntilReady() {
    for (int i = 0; i < 6000; ++i) {
      const std::string line = Output();
      if (line.ends_with('\n')) {
        const size_t begin = line.find("grpc=");
        return begin == std::string::npos
                   ? ""
                   : line.substr(begin + 5, line.find(' ', begin) - begin - 5);
      }
      if (waitpid(pid_, &status_, WNOHANG) == pid_) {
        pid_ = 0;
        return "";
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return "";
  }
  int id() const { return pid_; }
  void Signal(int number) { kill(pid_, number); }
  // The exit code; 128 + signal where one ended it.
  int WaitForExit() {
    if (pid_ > 0) waitpid(pid_, &status_, 0);
    pid_ = 0;
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  }
  std::string Output() const { return ReadWholeFile(out_).value_or(""); }
  std::string Errors() const { return ReadWholeFile(err_).value_or(""); }

 private:
  std::filesystem::path out_, err_;
  pid_t pid_ = 0;
  int status_ = 0;
};

}  // namespace statetap::testing
