#include "client/lib/input_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <unordered_map>

#include "extractor/base/file.h"
#include "extractor/base/text.h"
#include "extractor/base/worker_pool.h"
#include "proto/messages/sample_text.h"

namespace statetap {
namespace {

constexpr std::string_view kStdin = "stdin";
constexpr int kLinesBetweenReports = 256;
// Lines that are read before they are parsed on all cores.
constexpr size_t kBatchLines = 1024, kBatchBytes = size_t{4} << 20;

bool IsBlank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

// A copy, without a name, of what `from` gives; the caller owns the descriptor.
absl::StatusOr<int> Spool(int from, const std::string& source) {
  std::string name = (std::filesystem::temp_directory_path() / "statetap-input-XXXXXX").string();
  const int copy = ::mkstemp(name.data());
  if (copy < 0) return ErrnoStatus(errno, fmt::format("create a copy of {}", source), name);
  ::unlink(name.c_str());
  std::array<char, 1 << 16> block;
  while (true) {
    const ssize_t count = ::read(from, block.data(), block.size());
    if (count == 0) return copy;
    if (count < 0 && errno == EINTR) continue;
    for (ssize_t done = 0; done < count;) {
      const ssize_t wrote = ::write(copy, block.data() + done, static_cast<size_t>(count - done));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) {
        const int error = errno;
        ::close(copy);
        return ErrnoStatus(error, fmt::format("copy {} to", source), name);
      }
      done += wrote;
    }
    if (count < 0) {
      const int error = errno;
      ::close(copy);
      return ErrnoStatus(error, "read", source);
    }
  }
}

absl::StatusOr<int> SpoolPipe(const std::string& path) {
  const int pipe = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (pipe < 0) return ErrnoStatus(errno, "open", path);
  absl::StatusOr<int> copy = Spool(pipe, path);
  ::close(pipe);
  return copy;
}

// Lines of one file: gathered, parsed on all cores, visited in order.
class LineBatch {
 public:
  LineBatch(WorkerPool& workers, const std::function<absl::Status(InputLine)>& visit)
      : workers_(workers), visit_(visit) {}

  absl::Status Add(const std::string& path, const std::string& source, int64_t number,
                   std::string_view line) {
    bytes_ += line.size();
    lines_.push_back({{path, number}, source, std::string(line)});
    return lines_.size() < kBatchLines && bytes_ < kBatchBytes ? absl::OkStatus() : Visit();
  }

  absl::Status Visit() {
    std::vector<InputLine> parsed(lines_.size());
    workers_.ParallelFor(static_cast<int64_t>(lines_.size()), [&](int64_t begin, int64_t end, int) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
        const Line& line = lines_[i];
        parsed[i] = {line.place, ParseSampleLine(line.text, line.source)};
        if (parsed[i].parsed.ok()) parsed[i].parsed->sample.set_source_line(line.place.line);
      }
    });
    lines_.clear();
    bytes_ = 0;
    for (InputLine& line : parsed) STATETAP_RETURN_IF_ERROR(visit_(std::move(line)));
    return absl::OkStatus();
  }

 private:
  struct Line {
    LinePlace place;
    std::string source, text;
  };
  WorkerPool& workers_;
  const std::function<absl::Status(InputLine)>& visit_;
  std::vector<Line> lines_;
  size_t bytes_ = 0;
};

// What the server would refuse: an id with other content than it had before.
class GivenIds {
 public:
  absl::Status Check(const LinePlace& place, const v1::SampleInput& sample) {
    if (sample.id().empty()) return absl::OkStatus();
    const uint64_t digest = ContentHash(sample);
    const auto [first, added] = first_.try_emplace(sample.id(), Given{digest, place.line});
    if (added || first->second.digest == digest) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("id: \"{}\" is that of line {} too, which has other content; give each sample "
                    "its own id, or leave ids out",
                    sample.id().substr(0, 100), first->second.line));
  }

 private:
  struct Given {
    uint64_t digest;
    int64_t line;
  };
  std::unordered_map<std::string, Given> first_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<InputFiles>> InputFiles::Open(
    const std::vector<std::string>& paths) {
  auto files = std::make_unique<InputFiles>();
  for (const std::string& path : paths) {
    Entry entry{path, std::filesystem::path(path).filename().string()};
    if (path == "-") {
      entry.source = kStdin;
      STATETAP_ASSIGN_OR_RETURN(entry.spooled, Spool(STDIN_FILENO, std::string(kStdin)));
    } else if (std::error_code ignored; std::filesystem::is_fifo(path, ignored)) {
      STATETAP_ASSIGN_OR_RETURN(entry.spooled, SpoolPipe(path));
    }
    files->entries_.push_back(entry);
    STATETAP_RETURN_IF_ERROR(files->Reader(entry).status());
  }
  return files;
}

InputFiles::~InputFiles() {
  for (const Entry& entry : entries_)
    if (entry.spooled >= 0) ::close(entry.spooled);
}

absl::StatusOr<std::unique_ptr<LineReader>> InputFiles::Reader(const Entry& entry) const {
  if (entry.spooled < 0) return LineReader::Open(entry.path, {});
  // The duplicate shares the offset, so one reader at a time.
  ::lseek(entry.spooled, 0, SEEK_SET);
  const int copy = ::dup(entry.spooled);
  const std::string name = entry.path == "-" ? std::string(kStdin) : entry.path;
  if (copy < 0) return ErrnoStatus(errno, "open", name);
  return LineReader::FromDescriptor(copy, name, {});
}

absl::Status InputFiles::ForEach(const std::function<absl::Status(InputLine)>& visit,
                                 const std::function<bool(int64_t, int64_t)>& progress) const {
  int64_t total = 0, done = 0;
  bool total_known = true;
  for (const Entry& entry : entries_) {
    STATETAP_ASSIGN_OR_RETURN(const auto reader, Reader(entry));
    total += reader->size_bytes();
    total_known &= reader->size_bytes() > 0;
  }
  if (!total_known) total = 0;
  WorkerPool workers(static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u)));
  for (const Entry& entry : entries_) {
    STATETAP_ASSIGN_OR_RETURN(const auto reader, Reader(entry));
    LineBatch batch(workers, visit);
    while (true) {
      const absl::StatusOr<std::optional<std::string_view>> next = reader->Next();
      if (!next.ok() || !next->has_value()) {
        STATETAP_RETURN_IF_ERROR(batch.Visit());
        STATETAP_RETURN_IF_ERROR(next.status());
        break;
      }
      const std::string_view line = **next;
      if (progress != nullptr && reader->line_number() % kLinesBetweenReports == 0 &&
          !progress(done + reader->bytes_read(), total))
        return absl::CancelledError("interrupted");
      if (IsBlank(line)) continue;
      STATETAP_RETURN_IF_ERROR(batch.Add(entry.path, entry.source, reader->line_number(), line));
    }
    done += reader->bytes_read();
  }
  if (progress != nullptr) progress(done, total);
  return absl::OkStatus();
}

absl::StatusOr<InputSummary> InputFiles::Validate(
    const std::function<bool(int64_t, int64_t)>& progress) const {
  InputSummary summary;
  GivenIds ids;
  const auto visit = [&](InputLine line) {
    absl::Status status = line.parsed.status();
    if (status.ok()) status = ids.Check(line.place, line.parsed->sample);
    if (!status.ok()) {
      ++summary.faulty_lines;
      if (summary.faults.size() < InputSummary::kMaxFaults)
        summary.faults.push_back({line.place, std::string(MessageOf(status))});
      return absl::OkStatus();
    }
    for (const std::string& name : line.parsed->ignored) {
      if (summary.ignored_fields.size() < InputSummary::kMaxIgnored ||
          summary.ignored_fields.contains(name))
        ++summary.ignored_fields[name];
    }
    const v1::SampleInput& sample = line.parsed->sample;
    ++summary.samples;
    ++summary.samples_by_source[sample.source()];
    summary.text_bytes += static_cast<int64_t>(sample.prompt().size()) +
                          static_cast<int64_t>(sample.chat().messages_json().size());
    summary.token_ids += sample.tokens().ids_size();
    InputSummary::Kind& kind = summary.kinds[line.parsed->kind];
    if (kind.samples++ == 0) kind.first = line.place;
    summary.answers += line.parsed->answers;
    summary.chats_without_answer += sample.has_chat() && line.parsed->answers == 0 ? 1 : 0;
    return absl::OkStatus();
  };
  STATETAP_RETURN_IF_ERROR(ForEach(visit, progress));
  return summary;
}

std::string InputFiles::DefaultName() const {
  constexpr size_t kMaxName = 200;  // characters of JobOptions.name
  std::string name;
  for (const Entry& entry : entries_) {
    if (entry.spooled >= 0) return "";
    name += (name.empty() ? "" : "+") + entry.source;
  }
  return CountCharacters(name) <= kMaxName ? name : "";
}

}  // namespace statetap
