#include "client/lib/line_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "extractor/base/file.h"

namespace statetap {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 18;

// Reads the file itself; keeps count, and can give its first bytes twice.
class Descriptor {
 public:
  Descriptor(int descriptor, std::string name) : descriptor_(descriptor), name_(std::move(name)) {}
  ~Descriptor() { ::close(descriptor_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  // Up to `size` bytes; 0 at the end.
  absl::StatusOr<size_t> Read(char* to, size_t size) {
    if (!head_.empty()) {
      const size_t count = std::min(size, head_.size());
      std::memcpy(to, head_.data(), count);
      head_.erase(0, count);
      return count;
    }
    while (true) {
      const ssize_t count = ::read(descriptor_, to, size);
      if (count >= 0) {
        bytes_read_ += count;
        return static_cast<size_t>(count);
      }
      if (errno != EINTR) return ErrnoStatus(errno, "read", name_);
    }
  }

  // The first four bytes, or fewer where the file has no more; Read gives them again.
  absl::StatusOr<std::string> Peek() {
    std::string head(4, '\0');
    size_t count = 0;
    while (count < head.size()) {
      STATETAP_ASSIGN_OR_RETURN(const size_t more, Read(head.data() + count, head.size() - count));
      if (more == 0) break;
      count += more;
    }
    head.resize(count);
    head_ = head;
    return head;
  }

  int64_t bytes_read() const { return bytes_read_; }
  const std::string& name() const { return name_; }

 private:
  int descriptor_;
  std::string name_, head_;
  int64_t bytes_read_ = 0;
};

absl::Status Cut(const std::string& name) {
  return absl::DataLossError(fmt::format(
      "{}: ends in the middle of its compressed data; copy or compress the file again", name));
}

absl::Status Damaged(const std::string& name, std::string_view what) {
  return absl::DataLossError(fmt::format("{}: damaged compressed data ({})", name, what));
}

}  // namespace

class LineReader::ByteSource {
 public:
  explicit ByteSource(std::unique_ptr<Descriptor> file) : file_(std::move(file)) {}
  virtual ~ByteSource() = default;
  // Appends some bytes to `to`, none at the end.
  virtual absl::Status AppendSome(std::string& to) = 0;
  int64_t bytes_read() const { return file_->bytes_read(); }

 protected:
  std::unique_ptr<Descriptor> file_;
};

namespace {

class PlainSource : public LineReader::ByteSource {
 public:
  using ByteSource::ByteSource;
  absl::Status AppendSome(std::string& to) override {
    const size_t before = to.size();
    to.resize(before + kBlockBytes);
    absl::StatusOr<size_t> count = file_->Read(to.data() + before, kBlockBytes);
    to.resize(before + (count.ok() ? *count : 0));
    return count.status();
  }
};

// Compressed input through a block; Step() unfolds what is there.
class CompressedSource : public LineReader::ByteSource {
 public:
  using ByteSource::ByteSource;
  absl::Status AppendSome(std::string& to) override {
    const size_t before = to.size();
    while (to.size() == before) {
      if (used_ == filled_ && !more_inside_) {
        STATETAP_ASSIGN_OR_RETURN(filled_, file_->Read(block_.data(), block_.size()));
        used_ = 0;
        if (filled_ == 0) return in_frame_ ? Cut(file_->name()) : absl::OkStatus();
      }
      to.resize(before + kBlockBytes);
      absl::StatusOr<size_t> made = Step(to.data() + before, kBlockBytes);
      to.resize(before + (made.ok() ? *made : 0));
      STATETAP_RETURN_IF_ERROR(made.status());
      more_inside_ = *made == kBlockBytes;
    }
    return absl::OkStatus();
  }

 protected:
  // Uses bytes of block_ from used_ on; returns how many it wrote; sets in_frame_.
  virtual absl::StatusOr<size_t> Step(char* to, size_t size) = 0;

  std::vector<char> block_ = std::vector<char>(kBlockBytes);
  size_t used_ = 0, filled_ = 0;
  bool in_frame_ = false;
  bool more_inside_ = false;  // the decoder may hold output for which there was no room
};

// Members one after another (pigz, cat) are one text.
class GzipSource : public CompressedSource {
 public:
  explicit GzipSource(std::unique_ptr<Descriptor> file) : CompressedSource(std::move(file)) {
    inflateInit2(&stream_, 16 + MAX_WBITS);
  }
  ~GzipSource() override { inflateEnd(&stream_); }

 protected:
  absl::StatusOr<size_t> Step(char* to, size_t size) override {
    stream_.next_in = reinterpret_cast<Bytef*>(block_.data() + used_);
    stream_.avail_in = static_cast<uInt>(filled_ - used_);
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(size);
    const int code = inflate(&stream_, Z_NO_FLUSH);
    used_ = filled_ - stream_.avail_in;
    if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR)
      return Damaged(file_->name(), stream_.msg != nullptr ? stream_.msg : zError(code));
    in_frame_ = code != Z_STREAM_END;
    if (code == Z_STREAM_END) inflateReset(&stream_);
    return size - stream_.avail_out;
  }

 private:
  z_stream stream_{};
};

class ZstdSource : public CompressedSource {
 public:
  explicit ZstdSource(std::unique_ptr<Descriptor> file)
      : CompressedSource(std::move(file)), context_(ZSTD_createDCtx(), &ZSTD_freeDCtx) {}

 protected:
  absl::StatusOr<size_t> Step(char* to, size_t size) override {
    ZSTD_inBuffer in{block_.data(), filled_, used_};
    ZSTD_outBuffer out{to, size, 0};
    const size_t code = ZSTD_decompressStream(context_.get(), &out, &in);
    if (ZSTD_isError(code) != 0) return Damaged(file_->name(), ZSTD_getErrorName(code));
    used_ = in.pos;
    in_frame_ = code != 0;
    return out.pos;
  }

 private:
  std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context_;
};

}  // namespace

LineReader::LineReader(std::unique_ptr<ByteSource> source, std::string name, const Options& options)
    : source_(std::move(source)), name_(std::move(name)), options_(options) {}
LineReader::~LineReader() = default;

int64_t LineReader::bytes_read() const { return source_->bytes_read(); }

absl::StatusOr<std::unique_ptr<LineReader>> LineReader::Open(const std::string& path,
                                                             const Options& options) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return ErrnoStatus(errno, "open", path);
  return FromDescriptor(descriptor, path, options);
}

absl::StatusOr<std::unique_ptr<LineReader>> LineReader::FromDescriptor(int descriptor,
                                                                       std::string name,
                                                                       const Options& options) {
  auto file = std::make_unique<Descriptor>(descriptor, name);
  struct stat info {};
  if (::fstat(descriptor, &info) != 0) return ErrnoStatus(errno, "stat", name);
  if (S_ISDIR(info.st_mode))
    return absl::InvalidArgumentError(
        fmt::format("{} is a folder; give the .jsonl files inside it", name));
  STATETAP_ASSIGN_OR_RETURN(const std::string head, file->Peek());
  std::unique_ptr<ByteSource> source;
  if (head == "PAR1")
    return absl::InvalidArgumentError(fmt::format(
        "{} is a Parquet file; submit it with the Python client, or convert it to JSON lines",
        name));
  if (head.starts_with("\x1f\x8b")) {
    source = std::make_unique<GzipSource>(std::move(file));
  } else if (head == "\x28\xb5\x2f\xfd") {
    source = std::make_unique<ZstdSource>(std::move(file));
  } else {
    source = std::make_unique<PlainSource>(std::move(file));
  }
  std::unique_ptr<LineReader> reader(new LineReader(std::move(source), std::move(name), options));
  reader->size_bytes_ = S_ISREG(info.st_mode) ? info.st_size : 0;
  return reader;
}

absl::Status LineReader::Refill() {
  if (begin_ > 0) {
    buffer_.erase(0, begin_);
    scanned_ -= begin_;
    begin_ = 0;
  }
  const size_t before = buffer_.size();
  STATETAP_RETURN_IF_ERROR(source_->AppendSome(buffer_));
  ended_ = buffer_.size() == before;
  if (static_cast<int64_t>(buffer_.size()) > options_.max_line_bytes)
    return absl::ResourceExhaustedError(
        fmt::format("{} line {}: longer than {} bytes; is it one JSON value a line?", name_,
                    line_number_ + 1, options_.max_line_bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::optional<std::string_view>> LineReader::Next() {
  while (true) {
    const size_t end = buffer_.find('\n', scanned_);
    if (end == std::string::npos && !ended_) {
      scanned_ = buffer_.size();
      STATETAP_RETURN_IF_ERROR(Refill());
      continue;
    }
    const size_t stop = end == std::string::npos ? buffer_.size() : end;
    if (end == std::string::npos && begin_ == stop) return std::nullopt;
    std::string_view line(buffer_.data() + begin_, stop - begin_);
    begin_ = scanned_ = end == std::string::npos ? stop : end + 1;
    if (++line_number_ == 1 && line.starts_with("\xef\xbb\xbf")) line.remove_prefix(3);
    return line;
  }
}

}  // namespace statetap
