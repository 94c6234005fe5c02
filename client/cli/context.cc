#include <iostream>

#include "client/cli/command.h"
#include "extractor/base/json.h"

namespace statetap {

absl::StatusOr<Client*> Context::client() {
  const std::lock_guard lock(mutex_);
  if (client_ == nullptr) {
    STATETAP_ASSIGN_OR_RETURN(client_, Client::Create(server, client_options));
    if (interrupted_) client_->CancelAll();
  }
  return client_.get();
}

void Context::Interrupt() {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  if (client_ != nullptr) client_->CancelAll();
}

void Context::Say(std::string_view line) {
  if (!quiet) err << line << '\n' << std::flush;
}

absl::StatusOr<bool> Context::Confirm(std::string_view question) {
  if (!terminal.in || !terminal.err)
    return absl::InvalidArgumentError("nobody is there to ask: give --yes to go on without");
  err << question << " [y/N] " << std::flush;
  std::string answer;
  std::getline(std::cin, answer);
  return answer == "y" || answer == "Y" || answer == "yes";
}

void Context::PrintJson(const Json& value) { out << DumpJson(value) << '\n' << std::flush; }

std::unique_ptr<Progress> Context::MakeProgress() {
  const Progress::Style style = quiet          ? Progress::Style::kQuiet
                                : terminal.err ? Progress::Style::kBar
                                               : Progress::Style::kLines;
  return std::make_unique<Progress>(err, style, terminal.width);
}

}  // namespace statetap
