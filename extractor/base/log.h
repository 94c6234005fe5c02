// One line a message on stderr: time, level, text. Thread safe.
// STATETAP_LOG=debug|info|warning|error sets the least level.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace statetap {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

void LogLine(LogLevel level, std::string_view text);

template <typename... Args>
void LogInfo(fmt::format_string<Args...> format, Args&&... args) {
  LogLine(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void LogWarning(fmt::format_string<Args...> format, Args&&... args) {
  LogLine(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void LogError(fmt::format_string<Args...> format, Args&&... args) {
  LogLine(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace statetap
