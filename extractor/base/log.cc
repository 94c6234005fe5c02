#include "extractor/base/log.h"

#include <fmt/chrono.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>

namespace statetap {
namespace {

LogLevel LeastLevel() {
  const char* name = std::getenv("STATETAP_LOG");
  const std::string_view text = name == nullptr ? "" : name;
  if (text == "debug") return LogLevel::kDebug;
  if (text == "warning") return LogLevel::kWarning;
  if (text == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

constexpr std::string_view Name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: return "error";
  }
  return "?";
}

}  // namespace

void LogLine(LogLevel level, std::string_view text) {
  static const LogLevel least = LeastLevel();
  if (level < least) return;
  const auto now =
      std::chrono::time_point_cast<std::chrono::milliseconds>(std::chrono::system_clock::now());
  const std::string line = fmt::format("{:%Y-%m-%dT%H:%M:}{:%S}Z {:<7} {}\n", now,
                                       now.time_since_epoch(), Name(level), text);
  // One write a line keeps lines of several threads and processes whole.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace statetap
