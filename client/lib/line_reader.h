// Lines of a text file that may be compressed (gzip or zstd, told by its first bytes, never by its
// name). Memory is bounded by the longest line. Not thread safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "extractor/base/status.h"

namespace statetap {

class LineReader {
 public:
  struct Options {
    // A longer line is an error (RESOURCE_EXHAUSTED): it bounds what a compressed file can unfold
    // to.
    int64_t max_line_bytes = int64_t{1} << 30;
  };
  // NOT_FOUND and PERMISSION_DENIED name the path; INVALID_ARGUMENT for a folder.
  static absl::StatusOr<std::unique_ptr<LineReader>> Open(const std::string& path,
                                                          const Options& options);
  // Takes over the descriptor; `name` is for messages.
  static absl::StatusOr<std::unique_ptr<LineReader>> FromDescriptor(int descriptor,
                                                                    std::string name,
                                                                    const Options& options);
  ~LineReader();

  // The next line without its line feed; nothing at the end. Valid until the next call. A byte
  // order mark at the start is skipped. DATA_LOSS where a compressed file is damaged or cut.
  absl::StatusOr<std::optional<std::string_view>> Next();
  int64_t line_number() const { return line_number_; }  // of the last line, from 1
  int64_t bytes_read() const;                           // of the file as it lies on disk
  int64_t size_bytes() const { return size_bytes_; }    // 0 where unknown (a pipe)

  class ByteSource;  // plain, gzip or zstd

 private:
  LineReader(std::unique_ptr<ByteSource> source, std::string name, const Options& options);
  absl::Status Refill();

  std::unique_ptr<ByteSource> source_;
  std::string name_;
  Options options_;
  std::string buffer_;
  size_t begin_ = 0;    // of the next line in buffer_
  size_t scanned_ = 0;  // no line feed in [begin_, scanned_)
  bool ended_ = false;
  int64_t line_number_ = 0;
  int64_t size_bytes_ = 0;
};

}  // namespace statetap
