// Passing absl::Status up, and printing it. Messages are made with fmt::format: Debian's
// absl::string_view is not std::string_view, so absl::StrCat refuses the latter.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define STATETAP_RETURN_IF_ERROR(expr)                                                        \
  do {                                                                                        \
    if (absl::Status statetap_status = (expr); !statetap_status.ok()) return statetap_status; \
  } while (false)

#define STATETAP_CONCAT_INNER_(a, b) a##b
#define STATETAP_CONCAT_(a, b) STATETAP_CONCAT_INNER_(a, b)
// STATETAP_ASSIGN_OR_RETURN(auto x, MakeX());
#define STATETAP_ASSIGN_OR_RETURN(lhs, expr) \
  STATETAP_ASSIGN_OR_RETURN_(STATETAP_CONCAT_(statusor_, __LINE__), lhs, expr)
#define STATETAP_ASSIGN_OR_RETURN_(statusor, lhs, expr) \
  auto statusor = (expr);                               \
  if (!statusor.ok()) return statusor.status();         \
  lhs = *std::move(statusor)

namespace statetap {

inline std::string_view MessageOf(const absl::Status& status) {
  return {status.message().data(), status.message().size()};
}

// The same code with `context: ` in front of the message: added once, where the context is known.
inline absl::Status WithContext(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), fmt::format("{}: {}", context, MessageOf(status)));
}

}  // namespace statetap
