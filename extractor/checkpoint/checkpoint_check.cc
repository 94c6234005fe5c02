#include "extractor/checkpoint/checkpoint_check.h"

#include <array>
#include <cstring>
#include <optional>

#include "extractor/base/file.h"
#include "extractor/checkpoint/fault_list.h"
#include "extractor/checkpoint/int4.h"
#include "extractor/checkpoint/tensor_inventory.h"

namespace statetap {
namespace {

// Beyond this many the folder belongs to another model; more would only take time.
constexpr int64_t kMostFaults = 10'000;

std::string Describe(std::string_view types, const std::vector<int64_t>& shape) {
  return fmt::format("{} [{}]", types, fmt::join(shape, ", "));
}

absl::Status CheckGroups(const ModelConfig& c) {
  if (c.hidden % kInt4Group == 0 && c.expert_width % kInt4Group == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format(
      "INT4 experts need hidden_size {} and moe_intermediate_size {} to be multiples of "
      "{}",
      c.hidden, c.expert_width, kInt4Group));
}

// The two numbers of a weight_shape tensor, which is [2] of int32 or int64.
absl::StatusOr<std::array<int64_t, 2>> ReadShape(const File& file, const TensorInfo& tensor) {
  std::array<std::byte, 16> bytes;
  STATETAP_RETURN_IF_ERROR(
      file.ReadAt(tensor.offset, std::span(bytes).first(static_cast<size_t>(tensor.size_bytes))));
  std::array<int64_t, 2> shape;
  if (tensor.dtype == DType::kI64) {
    std::memcpy(shape.data(), bytes.data(), sizeof(shape));
  } else {
    std::array<int32_t, 2> narrow;
    std::memcpy(narrow.data(), bytes.data(), sizeof(narrow));
    shape = {narrow[0], narrow[1]};
  }
  return shape;
}

}  // namespace

bool IsQuantized(const TensorMap& tensors) {
  for (const auto& [name, info] : tensors) {
    if (name.ends_with(".weight_packed")) return true;
  }
  return false;
}

absl::Status CheckInventory(const ModelConfig& config, bool quantized, const TensorTable& table) {
  if (quantized) STATETAP_RETURN_IF_ERROR(CheckGroups(config));
  FaultList missing, misshapen, left_over;
  TensorMap::size_type matched = 0;
  ForEachTensor(config, quantized, [&](const ExpectedTensor& expected) {
    const auto found = table.tensors.find(expected.name);
    if (found == table.tensors.end()) {
      missing.Add(expected.name);
      return missing.count() < kMostFaults;
    }
    ++matched;
    const TensorInfo& info = found->second;
    if (Accepts(expected.kind, info.dtype) && info.shape == expected.shape) return true;
    misshapen.Add(fmt::format("{} in {} is {}, expected {}", expected.name,
                              table.files[info.file].filename().string(),
                              Describe(NameOf(info.dtype), info.shape),
                              Describe(AcceptedTypes(expected.kind), expected.shape)));
    return misshapen.count() < kMostFaults;
  });
  const bool whole = missing.count() < kMostFaults && misshapen.count() < kMostFaults;
  if (whole && matched < table.tensors.size()) {
    TensorMap unused = table.tensors;
    ForEachTensor(config, quantized, [&](const ExpectedTensor& expected) {
      unused.erase(expected.name);
      return true;
    });
    for (const auto& [name, info] : unused) {
      // Some writers store a part that is not there as tensors of no element.
      if (info.size_bytes > 0) left_over.Add(name);
    }
  }
  std::string faults;
  if (!missing.empty()) faults += fmt::format("; missing: {}", missing.Text());
  if (!misshapen.empty()) faults += fmt::format("; {}", misshapen.Text());
  if (!left_over.empty()) {
    faults += fmt::format("; not called for by config.json: {}", left_over.Text());
  }
  if (faults.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("the tensors do not fit config.json{}{}", faults,
                  quantized ? " (INT4 is read for routed experts only, all or none)" : ""));
}

absl::Status CheckStoredShapes(const ModelConfig& config, const TensorTable& table) {
  std::optional<File> file;
  int file_number = -1;
  for (const auto& [name, info] : table.tensors) {
    if (!name.ends_with(".weight_shape")) continue;
    if (info.file != file_number) {
      STATETAP_ASSIGN_OR_RETURN(file, File::OpenForRead(table.files[info.file]));
      file_number = info.file;
    }
    STATETAP_ASSIGN_OR_RETURN(const auto found, ReadShape(*file, info));
    const std::array<int64_t, 2> expected = ExpertShape(config, name);
    if (found == expected) continue;
    return absl::InvalidArgumentError(fmt::format("{}: {} holds ({}, {}), expected ({}, {})",
                                                  table.files[info.file].string(), name, found[0],
                                                  found[1], expected[0], expected[1]));
  }
  return absl::OkStatus();
}

}  // namespace statetap
