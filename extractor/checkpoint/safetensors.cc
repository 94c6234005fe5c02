#include "extractor/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <limits>
#include <unordered_set>

#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/checkpoint/safetensors_json.h"

namespace statetap {
namespace {

struct TypeRow {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};
constexpr std::array kTypes = {
    TypeRow{"BOOL", 8, DType::kBool},      TypeRow{"U8", 8, DType::kU8},
    TypeRow{"I8", 8, DType::kI8},          TypeRow{"I16", 16, DType::kI16},
    TypeRow{"I32", 32, DType::kI32},       TypeRow{"I64", 64, DType::kI64},
    TypeRow{"F8_E4M3", 8, DType::kF8E4M3}, TypeRow{"F8_E5M2", 8, DType::kF8E5M2},
    TypeRow{"F16", 16, DType::kF16},       TypeRow{"BF16", 16, DType::kBf16},
    TypeRow{"F32", 32, DType::kF32},       TypeRow{"F64", 64, DType::kF64},
    TypeRow{"U16", 16, std::nullopt},      TypeRow{"U32", 32, std::nullopt},
    TypeRow{"U64", 64, std::nullopt},      TypeRow{"F8_E8M0", 8, std::nullopt},
    TypeRow{"C64", 64, std::nullopt},      TypeRow{"F4", 4, std::nullopt},
    TypeRow{"F6_E2M3", 6, std::nullopt},   TypeRow{"F6_E3M2", 6, std::nullopt},
};

const TypeRow* FindType(std::string_view name) {
  const auto* found = std::ranges::find(kTypes, name, &TypeRow::name);
  return found == kTypes.end() ? nullptr : found;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// dtype × shape in bytes; none where it overflows or ends inside a byte.
std::optional<int64_t> SizeOfTensor(int bits, const std::vector<int64_t>& shape) {
  // A zero anywhere makes it empty, whatever the others multiply to.
  if (std::ranges::find(shape, 0) != shape.end()) return 0;
  int64_t total = bits;
  for (const int64_t dim : shape) {
    if (__builtin_mul_overflow(total, dim, &total)) return std::nullopt;
  }
  if (total % 8 != 0) return std::nullopt;
  return total / 8;
}

absl::Status CheckEntry(const HeaderTensor& tensor, int64_t data_bytes) {
  const TypeRow* type = FindType(tensor.dtype);
  if (type == nullptr) {
    return absl::InvalidArgumentError(
        fmt::format("tensor {} has the unknown dtype \"{}\"", tensor.name, tensor.dtype));
  }
  if (tensor.begin > tensor.end) {
    return absl::InvalidArgumentError(fmt::format(
        "tensor {} ends at offset {}, before its begin {}", tensor.name, tensor.end, tensor.begin));
  }
  const std::optional<int64_t> size = SizeOfTensor(type->bits, tensor.shape);
  if (!size || *size != tensor.end - tensor.begin) {
    return absl::InvalidArgumentError(fmt::format(
        "tensor {} has {} bytes, expected {} for {} {}", tensor.name, tensor.end - tensor.begin,
        size ? fmt::to_string(*size) : "more than fit", tensor.dtype, ShapeText(tensor.shape)));
  }
  if (tensor.end > data_bytes) {
    return absl::OutOfRangeError(
        fmt::format("the file is cut short: tensor {} ends at byte {} of the data, found {} bytes",
                    tensor.name, tensor.end, data_bytes));
  }
  return absl::OkStatus();
}

// `tensors` in order of their offsets.
absl::Status CheckLayout(const std::vector<HeaderTensor>& tensors, int64_t data_bytes) {
  int64_t end = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const HeaderTensor& tensor = tensors[i];
    if (tensor.begin < end) {
      return absl::InvalidArgumentError(
          fmt::format("tensor {} begins at offset {}, inside tensor {} that ends at {}",
                      tensor.name, tensor.begin, tensors[i - 1].name, end));
    }
    if (tensor.begin > end) {
      return absl::InvalidArgumentError(
          fmt::format("{} bytes of no tensor before tensor {} at offset {}; the format allows none",
                      tensor.begin - end, tensor.name, tensor.begin));
    }
    end = tensor.end;
  }
  if (end != data_bytes) {
    return absl::InvalidArgumentError(fmt::format(
        "{} bytes behind the last tensor{}; the format allows none", data_bytes - end,
        tensors.empty() ? ""
                        : fmt::format(" {} that ends at offset {}", tensors.back().name, end)));
  }
  return absl::OkStatus();
}

absl::Status CheckNames(const std::vector<HeaderTensor>& tensors) {
  std::unordered_set<std::string_view> names;
  names.reserve(tensors.size());
  for (const HeaderTensor& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(fmt::format("tensor {} is given twice", tensor.name));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<DType> DTypeOfSafetensors(std::string_view name) {
  const TypeRow* type = FindType(name);
  return type == nullptr ? std::nullopt : type->dtype;
}

std::string_view SafetensorsNameOf(DType dtype) {
  return std::ranges::find(kTypes, std::optional(dtype), &TypeRow::dtype)->name;
}

absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(std::string_view header,
                                                                     int64_t data_offset,
                                                                     int64_t data_bytes) {
  STATETAP_ASSIGN_OR_RETURN(std::vector<HeaderTensor> tensors, ParseHeaderJson(header));
  STATETAP_RETURN_IF_ERROR(CheckNames(tensors));
  std::ranges::stable_sort(tensors, [](const HeaderTensor& a, const HeaderTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  for (const HeaderTensor& tensor : tensors) {
    STATETAP_RETURN_IF_ERROR(CheckEntry(tensor, data_bytes));
  }
  STATETAP_RETURN_IF_ERROR(CheckLayout(tensors, data_bytes));
  std::vector<SafetensorsEntry> entries;
  entries.reserve(tensors.size());
  for (HeaderTensor& tensor : tensors) {
    entries.push_back({.name = std::move(tensor.name),
                       .dtype = std::move(tensor.dtype),
                       .shape = std::move(tensor.shape),
                       .offset = data_offset + tensor.begin,
                       .size_bytes = tensor.end - tensor.begin});
  }
  return entries;
}

absl::StatusOr<std::vector<SafetensorsEntry>> ReadSafetensorsHeader(
    const std::filesystem::path& path) {
  STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForRead(path));
  STATETAP_ASSIGN_OR_RETURN(const int64_t size, file.Size());
  std::array<unsigned char, 8> prefix{};
  if (size < int64_t{prefix.size()}) {
    return absl::OutOfRangeError(
        fmt::format("{}: {} bytes are no safetensors file, which begins with 8 of length",
                    path.string(), size));
  }
  STATETAP_RETURN_IF_ERROR(file.ReadAt(0, std::as_writable_bytes(std::span(prefix))));
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | prefix[i];
  if (length > uint64_t{kMaxSafetensorsHeader}) {
    return absl::InvalidArgumentError(
        fmt::format("{}: a header of {} bytes; the format allows {} (is this a safetensors file?)",
                    path.string(), length, kMaxSafetensorsHeader));
  }
  const int64_t data_offset = int64_t{prefix.size()} + static_cast<int64_t>(length);
  if (data_offset > size) {
    return absl::OutOfRangeError(
        fmt::format("{}: the file is cut short: its header ends at byte {}, found {} bytes",
                    path.string(), data_offset, size));
  }
  std::string header(length, '\0');
  STATETAP_RETURN_IF_ERROR(
      file.ReadAt(int64_t{prefix.size()}, std::as_writable_bytes(std::span(header))));
  auto entries = ParseSafetensorsHeader(header, data_offset, size - data_offset);
  if (!entries.ok()) return WithContext(entries.status(), path.string());
  return entries;
}

std::string MakeSafetensorsHeader(std::vector<SafetensorsEntry>& entries) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  int64_t end = 0;
  for (SafetensorsEntry& entry : entries) {
    entry.offset = end;
    entry.size_bytes = SizeOfTensor(FindType(entry.dtype)->bits, entry.shape).value();
    end += entry.size_bytes;
    json += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                        DumpJson(Json(entry.name)), entry.dtype, fmt::join(entry.shape, ","),
                        entry.offset, end);
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::string header(8, '\0');
  for (int i = 0; i < 8; ++i) header[i] = static_cast<char>(json.size() >> (8 * i));
  header += json;
  for (SafetensorsEntry& entry : entries) entry.offset += static_cast<int64_t>(header.size());
  return header;
}

}  // namespace statetap
