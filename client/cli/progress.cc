#include "client/cli/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "client/cli/format.h"
#include "client/cli/text_width.h"
#include "client/lib/client.h"
#include "client/lib/proto_json.h"

namespace statetap {
namespace {

constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::milliseconds kLineEvery{5'000};
constexpr int kMaxBar = 30, kMinBar = 8;

}  // namespace

std::string Bar(double share, int width) {
  constexpr std::array<std::string_view, 8> kPart = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const double eighths = std::clamp(share, 0.0, 1.0) * width * 8;
  const int filled = static_cast<int>(std::floor(eighths + 1e-9));
  std::string bar;
  for (int i = 0; i < filled / 8; ++i) bar += "█";
  bar += kPart[static_cast<size_t>(filled % 8)];
  const int used = filled / 8 + (filled % 8 != 0 ? 1 : 0);
  return bar.append(static_cast<size_t>(width - used), ' ');
}

std::string DescribeProgress(const v1::Job& job) {
  const v1::Counts& counts = job.counts();
  std::string text =
      fmt::format("{}/{} stored", FormatCount(counts.stored()), FormatCount(counts.submitted()));
  if (counts.captured() > 0) text += fmt::format(" · {} captured", FormatCount(counts.captured()));
  if (counts.rejected() > 0) text += fmt::format(" · {} rejected", FormatCount(counts.rejected()));
  if (counts.cancelled() > 0)
    text += fmt::format(" · {} cancelled", FormatCount(counts.cancelled()));
  if (counts.running() > 0) text += fmt::format(" · {} running", FormatCount(counts.running()));
  if (job.state() != v1::JOB_STATE_RUNNING)
    text += " · " + EnumName(*v1::JobState_descriptor()->FindValueByNumber(job.state()));
  if (job.tokens_per_second() > 0)
    text += fmt::format(" · {} tok/s", FormatRate(job.tokens_per_second()));
  if (!IsTerminal(job.state()) && job.eta_seconds() > 0)
    text += fmt::format(" · ETA {}", FormatSeconds(job.eta_seconds()));
  if (!job.message().empty()) text += " · " + Printable(job.message());
  return text;
}

std::string FormatProgress(const v1::Job& job, int width) {
  const v1::Counts& counts = job.counts();
  const double share = counts.submitted() == 0
                           ? 0
                           : 1 - static_cast<double>(counts.to_do() - counts.captured()) /
                                     static_cast<double>(counts.submitted());
  const std::string text = DescribeProgress(job);
  const int bar = std::min(kMaxBar, width - DisplayWidth(text) - 3);
  if (bar < kMinBar) return Shorten(text, width);
  return fmt::format("▕{}▏ {}", Bar(share, bar), text);
}

bool Progress::Due(First first) {
  if (style_ == Style::kQuiet) return false;
  const auto now = std::chrono::steady_clock::now();
  const bool at_once = !shown_ && first == First::kAtOnce;
  if (!at_once && now - last_ < (style_ == Style::kBar ? kRedraw : kLineEvery)) return false;
  last_ = now;
  shown_ = true;
  return true;
}

void Progress::ShowText(const std::string& text) {
  if (style_ == Style::kQuiet) return;
  if (style_ == Style::kLines) {
    if (text != last_line_) err_ << text << '\n' << std::flush;
    last_line_ = text;
    return;
  }
  // One column stays free: some terminals wrap when the last one is used.
  err_ << "\r" << Shorten(text, width_ - 1) << "\x1b[K" << std::flush;
  drawn_ = true;
}

void Progress::Show(const v1::Job& job) {
  std::string standing = fmt::format("{} {}", static_cast<int>(job.state()), job.message());
  if (standing != standing_) shown_ = false;
  standing_ = std::move(standing);
  if (!Due(First::kAtOnce)) return;
  ShowText(style_ == Style::kBar ? FormatProgress(job, width_ - 1) : DescribeProgress(job));
}

void Progress::ShowShare(std::string_view text, int64_t done, int64_t total) {
  if (!Due(First::kLater)) return;
  if (style_ != Style::kBar || total <= 0) return ShowText(std::string(text));
  const double share = static_cast<double>(done) / static_cast<double>(total);
  ShowText(fmt::format("▕{}▏ {}", Bar(share, kMaxBar), text));
}

void Progress::ShowBytes(std::string_view what, int64_t done, int64_t total) {
  const std::string of = total > 0 ? " of " + FormatBytes(total) : "";
  ShowShare(fmt::format("{} {}{}", what, FormatBytes(done), of), done, total);
}

void Progress::ShowCount(std::string_view what, int64_t done, int64_t total) {
  const std::string of = total > 0 ? " of " + FormatCount(total) : "";
  ShowShare(fmt::format("{} {}{}", what, FormatCount(done), of), done, total);
}

void Progress::Say(std::string_view line) {
  if (style_ == Style::kQuiet) return;
  Clear();
  err_ << line << '\n' << std::flush;
}

void Progress::Clear() {
  if (drawn_) err_ << "\r\x1b[K" << std::flush;
  drawn_ = false;
}

}  // namespace statetap
