// Numbers as people read them (FormatBytes is of extractor/base/text.h), and as they type them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "extractor/base/status.h"
#include "extractor/base/text.h"

namespace statetap {

std::string FormatCount(int64_t count);             // "25,000"
std::string FormatRate(double per_second);          // "0.4", "87", "12,300"
std::string FormatSeconds(double seconds);          // "0:07", "12:30", "3:07:05", "2 d 03:00:00"
std::string FormatTime(int64_t unix_ms);            // local time, "2026-01-31 12:00:05"; "-" for 0
std::string FormatNumber(double value);             // four digits; "-" for NaN
std::string FormatFixed(double value, int digits);  // "-1.250"; never "-0.000"; "-" for NaN

// "4GiB", "512 MiB", "100MB", "4096": INVALID_ARGUMENT says the known units.
absl::StatusOr<uint64_t> ParseBytes(std::string_view text);
// "12" or "5%".
struct Allowance {
  double value = 0;
  bool percent = false;
  // Whether `part` of `whole` is allowed.
  bool Allows(int64_t part, int64_t whole) const;
};
absl::StatusOr<Allowance> ParseAllowance(std::string_view text);

}  // namespace statetap
