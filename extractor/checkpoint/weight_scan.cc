#include "extractor/checkpoint/weight_scan.h"

#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <system_error>

#include "extractor/base/digest.h"
#include "extractor/base/file.h"
#include "extractor/checkpoint/checkpoint_check.h"
#include "extractor/checkpoint/fault_list.h"
#include "extractor/checkpoint/int4.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kPiece = int64_t{4} << 20;

// The digest that a cache's link says its file has.
std::optional<std::string> NamedDigest(const fs::path& file) {
  std::error_code error;
  std::string name = fs::read_symlink(file, error).filename().string();
  const bool hex = name.size() == 64 && name.find_first_not_of("0123456789abcdef") == name.npos;
  if (error || !hex) return std::nullopt;
  return name;
}

class Scan {
 public:
  Scan(int64_t total_bytes, const ScanProgress& progress)
      : total_bytes_(total_bytes), progress_(progress), piece_(static_cast<size_t>(kPiece)) {}

  // Bytes [offset, offset + size) in pieces of a multiple of 16 bytes, the last apart.
  absl::Status Read(const File& file, int64_t offset, int64_t size,
                    const std::function<void(std::span<const std::byte>)>& visit) {
    for (int64_t at = 0; at < size; at += kPiece) {
      const auto piece = std::span(piece_).first(static_cast<size_t>(std::min(kPiece, size - at)));
      STATETAP_RETURN_IF_ERROR(file.ReadAt(offset + at, piece));
      visit(piece);
      done_bytes_ += static_cast<int64_t>(piece.size());
      if (progress_ && !progress_(done_bytes_, total_bytes_)) {
        return absl::CancelledError("interrupted");
      }
    }
    return absl::OkStatus();
  }

 private:
  int64_t total_bytes_, done_bytes_ = 0;
  const ScanProgress& progress_;
  std::vector<std::byte> piece_;
};

class ValueScan {
 public:
  void AddCodes(std::span<const std::byte> packed) {
    for (const std::byte two : packed) {
      ++codes_[std::to_integer<unsigned>(two) & 15];
      ++codes_[std::to_integer<unsigned>(two) >> 4];
    }
  }

  void AddFloats(const TensorInfo& tensor, std::span<const std::byte> bytes) {
    floats_.resize(bytes.size() / SizeOf(tensor.dtype));
    ScalesToFloat(tensor.dtype, bytes.data(), floats_);
    int64_t nonfinite = 0;
    for (const float value : floats_) nonfinite += !std::isfinite(value);
    count_ += static_cast<int64_t>(floats_.size());
    if (nonfinite > 0) nonfinite_.Add(fmt::format("{} of {}", nonfinite, tensor.name));
    if (!tensor.name.ends_with(".weight_scale")) return;
    for (const float value : floats_) {
      least_ = std::fmin(least_, value);
      greatest_ = std::fmax(greatest_, value);
    }
  }

  void AddRows(RuleReport& report) const {
    report.Add({nonfinite_.empty() ? Verdict::kOk : Verdict::kFault, "weights and scales",
                nonfinite_.empty() ? fmt::format("{} finite", count_) : nonfinite_.Text(),
                "all finite", "a value that is not ends in NaN states"});
    const auto used = [](int64_t n) { return n > 0; };
    if (std::ranges::none_of(codes_, used)) return;
    const auto low = std::ranges::find_if(codes_, used) - codes_.begin();
    const auto high = std::find_if(codes_.rbegin(), codes_.rend(), used) - codes_.rbegin();
    report.Add({low + 1 == 16 - high ? Verdict::kFault : Verdict::kOk, "INT4 codes",
                fmt::format("{} to {}, {} of them −8", low - 8, 7 - high, codes_[0]), "−8 to 7",
                "one code for every weight would be no weights"});
    report.Add({least_ >= 0 ? Verdict::kOk : Verdict::kWarning, "INT4 scales",
                fmt::format("{:.3g} to {:.3g}", least_, greatest_), "0 or more",
                "the quantiser writes magnitudes"});
  }

 private:
  std::array<int64_t, 16> codes_{};
  std::vector<float> floats_;
  FaultList nonfinite_;
  int64_t count_ = 0;
  float least_ = std::numeric_limits<float>::infinity();
  float greatest_ = -std::numeric_limits<float>::infinity();
};

}  // namespace

absl::Status AddDigestRows(const std::vector<fs::path>& files, const ScanProgress& progress,
                           RuleReport& report) {
  std::vector<std::pair<fs::path, std::string>> named;
  int64_t total = 0;
  for (const fs::path& file : files) {
    std::error_code ignored;
    const std::optional<std::string> digest = NamedDigest(file);
    if (!digest) continue;
    named.emplace_back(file, *digest);
    total += static_cast<int64_t>(fs::file_size(file, ignored));
  }
  FaultList wrong;
  Scan scan(total, progress);
  for (const auto& [path, expected] : named) {
    STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForRead(path));
    STATETAP_ASSIGN_OR_RETURN(const int64_t size, file.Size());
    Sha256 sha;
    STATETAP_RETURN_IF_ERROR(
        scan.Read(file, 0, size, [&](std::span<const std::byte> piece) { sha.Update(piece); }));
    if (const std::string found = sha.Hex(); found != expected) {
      wrong.Add(fmt::format("{} has {}", path.filename().string(), found));
    }
  }
  RuleRow row{Verdict::kOk, "SHA-256", fmt::format("{} files right", named.size()),
              fmt::format("{} files", files.size()), "the names of the cache's blobs"};
  if (named.size() < files.size()) {
    row.verdict = Verdict::kWarning;
    row.why = "the others are no links into a Hugging Face cache: nothing says their digest";
  }
  if (!wrong.empty()) {
    row.verdict = Verdict::kFault;
    row.found = wrong.Text();
    row.why = "the bytes differ from what was published: download these files again";
  }
  report.Add(std::move(row));
  return absl::OkStatus();
}

absl::Status AddScanRows(const ModelConfig& config, const TensorTable& table,
                         const ScanProgress& progress, RuleReport& report) {
  std::vector<const TensorInfo*> tensors;
  int64_t total = 0;
  for (const auto& [name, info] : table.tensors) {
    const bool floats =
        info.dtype == DType::kBf16 || info.dtype == DType::kF16 || info.dtype == DType::kF32;
    if (!floats && !name.ends_with(".weight_packed")) continue;
    tensors.push_back(&info);
    total += info.size_bytes;
  }
  std::ranges::sort(tensors, {}, [](const TensorInfo* t) { return std::pair(t->file, t->offset); });
  Scan scan(total, progress);
  ValueScan values;
  std::optional<File> file;
  for (const TensorInfo* tensor : tensors) {
    const fs::path& path = table.files[static_cast<size_t>(tensor->file)];
    if (!file || file->path() != path) {
      STATETAP_ASSIGN_OR_RETURN(file, File::OpenForRead(path));
    }
    STATETAP_RETURN_IF_ERROR(
        scan.Read(*file, tensor->offset, tensor->size_bytes, [&](std::span<const std::byte> piece) {
          if (tensor->dtype == DType::kI32) {
            values.AddCodes(piece);
          } else {
            values.AddFloats(*tensor, piece);
          }
        }));
  }
  values.AddRows(report);
  const absl::Status shapes = CheckStoredShapes(config, table);
  report.Add({shapes.ok() ? Verdict::kOk : Verdict::kFault, "weight_shape values",
              shapes.ok() ? "as configured" : "another shape", "(out, in) of each expert",
              std::string(MessageOf(shapes))});
  return absl::OkStatus();
}

}  // namespace statetap
