#include "client/cli/format.h"

#include <array>
#include <charconv>
#include <cmath>
#include <ctime>
#include <utility>

namespace statetap {
namespace {

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

// The number at the start of `text`, which moves behind it.
bool TakeNumber(std::string_view& text, double& value) {
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc() || !(value >= 0)) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

}  // namespace

std::string FormatCount(int64_t count) {
  std::string text = std::to_string(count);
  const size_t first = count < 0 ? 1 : 0;
  for (size_t at = text.size(); at > first + 3;) text.insert(at -= 3, ",");
  return text;
}

std::string FormatRate(double per_second) {
  if (!std::isfinite(per_second)) return "-";
  if (per_second < 9.95) return fmt::format("{:.1f}", per_second);
  return FormatCount(std::llround(per_second));
}

std::string FormatSeconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  const int64_t days = whole / 86400, hours = whole / 3600 % 24, minutes = whole / 60 % 60;
  if (days > 0) return fmt::format("{} d {:02}:{:02}:{:02}", days, hours, minutes, whole % 60);
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60);
  return fmt::format("{}:{:02}", minutes, whole % 60);
}

std::string FormatTime(int64_t unix_ms) {
  if (unix_ms == 0) return "-";
  const std::time_t seconds = unix_ms / 1000;
  std::tm local{};
  localtime_r(&seconds, &local);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &local);
  return text.data();
}

std::string FormatNumber(double value) {
  if (std::isnan(value)) return "-";
  return fmt::format("{:.4g}", value == 0 ? 0.0 : value);
}

std::string FormatFixed(double value, int digits) {
  if (std::isnan(value)) return "-";
  std::string text = fmt::format("{:.{}f}", value, digits);
  const bool zero = text.find_first_of("123456789nf") == std::string::npos;
  return zero && text.starts_with('-') ? text.substr(1) : text;
}

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 12> kUnits = {{
      {"", 1},
      {"B", 1},
      {"KiB", 0x1p10},
      {"MiB", 0x1p20},
      {"GiB", 0x1p30},
      {"TiB", 0x1p40},
      {"K", 0x1p10},
      {"M", 0x1p20},
      {"G", 0x1p30},
      {"KB", 1e3},
      {"MB", 1e6},
      {"GB", 1e9},
  }};
  std::string_view rest = Trimmed(text);
  double value = 0;
  if (TakeNumber(rest, value)) {
    for (const auto& [unit, factor] : kUnits) {
      const double bytes = value * factor;
      if (Trimmed(rest) == unit && bytes < 0x1p63) return static_cast<uint64_t>(bytes);
    }
  }
  return absl::InvalidArgumentError(fmt::format(
      "\"{}\" is no size; give bytes or a number with KiB, MiB, GiB, as in 4GiB", text));
}

bool Allowance::Allows(int64_t part, int64_t whole) const {
  const double most = percent ? value / 100 * static_cast<double>(whole) : value;
  return static_cast<double>(part) <= most;
}

absl::StatusOr<Allowance> ParseAllowance(std::string_view text) {
  std::string_view rest = Trimmed(text);
  Allowance allowance;
  if (TakeNumber(rest, allowance.value)) {
    allowance.percent = rest == "%";
    const bool whole = allowance.value == std::floor(allowance.value);
    if (allowance.percent ? allowance.value <= 100 : rest.empty() && whole) return allowance;
  }
  return absl::InvalidArgumentError(
      fmt::format("\"{}\" is no allowance; give a count, as 10, or a share, as 2%", text));
}

}  // namespace statetap
