// The files of a submission, line by line, as often as needed. Standard input ("-") and other pipes
// are kept in unnamed temporary files so that they can be read twice.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/lib/line_reader.h"
#include "client/lib/sample_line.h"
#include "extractor/base/status.h"

namespace statetap {

// Where a line lies.
struct LinePlace {
  std::string file;
  int64_t line = 0;
};

struct InputLine {
  LinePlace place;
  absl::StatusOr<ParsedLine> parsed;
};

struct InputFault {
  LinePlace place;
  std::string message;
};

struct InputSummary {
  int64_t samples = 0;
  int64_t faulty_lines = 0;
  std::vector<InputFault> faults;  // the first kMaxFaults
  int64_t text_bytes = 0;          // of prompts and chats
  int64_t token_ids = 0;           // given as ids
  std::map<std::string, int64_t> samples_by_source;
  // Members of lines that nothing reads, by name: in how many lines. At most kMaxIgnored names.
  std::map<std::string, int64_t> ignored_fields;
  struct Kind {
    int64_t samples = 0;
    LinePlace first;
  };
  std::map<LineKind, Kind> kinds;
  int64_t answers = 0;               // assistant messages of chats
  int64_t chats_without_answer = 0;  // without any

  static constexpr size_t kMaxFaults = 20, kMaxIgnored = 100;
};

class InputFiles {
 public:
  // Opens each once, to fail early. Errors name the path.
  static absl::StatusOr<std::unique_ptr<InputFiles>> Open(const std::vector<std::string>& paths);
  ~InputFiles();

  // Calls `visit` for every line that is not blank, in order; stops at its first error. A file that
  // cannot be read to its end is an error; a line that is no sample is not.
  // `progress` (may be null) gets bytes read and the total, 0 where unknown, now and then;
  // false ends the pass with CANCELLED.
  absl::Status ForEach(const std::function<absl::Status(InputLine)>& visit,
                       const std::function<bool(int64_t done, int64_t total)>& progress) const;

  absl::StatusOr<InputSummary> Validate(
      const std::function<bool(int64_t done, int64_t total)>& progress) const;

  // "prompts.jsonl", "a.jsonl+b.jsonl"; empty where a pipe is among them: the job is named by its
  // content then.
  std::string DefaultName() const;

 private:
  struct Entry {
    std::string path, source;
    int spooled = -1;  // a pipe's copy
  };
  absl::StatusOr<std::unique_ptr<LineReader>> Reader(const Entry& entry) const;
  std::vector<Entry> entries_;
};

}  // namespace statetap
