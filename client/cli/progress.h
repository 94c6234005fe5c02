// How far a job or a file is: a bar that redraws on a terminal, a line every few seconds elsewhere,
// nothing with --quiet. Writes to standard error only. Not thread safe.
#pragma once

#include <chrono>
#include <ostream>
#include <string>
#include <string_view>

#include "statetap/v1/jobs.pb.h"

namespace statetap {

// "████▌     " of `width` columns for a share in [0, 1].
std::string Bar(double share, int width);

// "running  12/64 stored · 1 rejected · 87 tok/s · ETA 0:35", without a bar.
std::string DescribeProgress(const v1::Job& job);
// The same behind a bar, in at most `width` columns.
std::string FormatProgress(const v1::Job& job, int width);

class Progress {
 public:
  enum class Style { kBar, kLines, kQuiet };
  Progress(std::ostream& err, Style style, int width) : err_(err), style_(style), width_(width) {}
  ~Progress() { Clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Another state or message than before is shown at once: a job may say nothing for long after it.
  void Show(const v1::Job& job);
  // `total` 0: unknown.
  void ShowShare(std::string_view text, int64_t done, int64_t total);
  void ShowBytes(std::string_view what, int64_t done, int64_t total);
  void ShowCount(std::string_view what, int64_t done, int64_t total);
  void ShowText(const std::string& text);
  // Prints a line above the bar; with every style but kQuiet.
  void Say(std::string_view line);
  void Clear();

 private:
  // Not more often than people can read; what is over at once is not shown at all.
  enum class First { kAtOnce, kLater };
  bool Due(First first);
  std::ostream& err_;
  Style style_;
  int width_;
  bool drawn_ = false;
  std::string last_line_, standing_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace statetap
