#include "client/cli/input_faults.h"

#include "client/cli/format.h"
#include "client/cli/text_width.h"

namespace statetap {

std::string At(const LinePlace& place) { return fmt::format("{} line {}", place.file, place.line); }

absl::StatusOr<std::unique_ptr<InputFiles>> OpenInput(const std::vector<std::string>& paths) {
  absl::StatusOr<std::unique_ptr<InputFiles>> files = InputFiles::Open(paths);
  if (!files.ok()) return absl::InvalidArgumentError(files.status().message());
  return files;
}

absl::StatusOr<InputSummary> CheckInput(Context& context, const InputFiles& files, bool skip_bad) {
  const auto progress = context.MakeProgress();
  absl::StatusOr<InputSummary> summary = files.Validate([&](int64_t done, int64_t total) {
    progress->ShowBytes("checking", done, total);
    return !context.interrupted();
  });
  progress->Clear();
  // A file that is damaged or holds a line without end is refused like one with bad lines.
  if (absl::IsDataLoss(summary.status()) || absl::IsResourceExhausted(summary.status()))
    return absl::InvalidArgumentError(summary.status().message());
  STATETAP_RETURN_IF_ERROR(summary.status());

  for (const InputFault& fault : summary->faults)
    context.err << fmt::format("{}: {}\n", At(fault.place), Printable(fault.message));
  const int64_t more = summary->faulty_lines - static_cast<int64_t>(summary->faults.size());
  if (more > 0) context.err << fmt::format("… and {} more\n", FormatCount(more));
  const std::string bad = fmt::format("{} bad line{}", FormatCount(summary->faulty_lines),
                                      summary->faulty_lines == 1 ? "" : "s");
  if (summary->faulty_lines > 0 && !skip_bad)
    return absl::InvalidArgumentError(fmt::format(
        "{}; nothing was done. Mend the file, or leave such lines out with --skip-bad", bad));
  if (summary->faulty_lines > 0) context.Say(bad + " skipped");
  if (!summary->ignored_fields.empty()) {
    std::string names;
    for (const auto& [name, lines] : summary->ignored_fields)
      names += fmt::format("{}{} ({} line{})", names.empty() ? "" : ", ",
                           Shorten(Printable(name), 60), FormatCount(lines), lines == 1 ? "" : "s");
    context.Say(
        fmt::format("warning: nothing reads these fields: {}; put into meta what is to be "
                    "kept",
                    names));
  }
  if (summary->samples == 0)
    return absl::InvalidArgumentError("the input holds no sample; nothing was done");
  return summary;
}

}  // namespace statetap
