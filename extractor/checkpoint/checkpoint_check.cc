#include "extractor/checkpoint/checkpoint_check.h"

#include <array>
#include <cstring>

#include "extractor/checkpoint/fault_list.h"
#include "extractor/checkpoint/int4.h"
#include "extractor/checkpoint/scattered_read.h"
#include "extractor/checkpoint/tensor_inventory.h"

namespace statetap {
namespace {

// Beyond this many the folder belongs to another model; more would only take time.
constexpr int64_t kMostFaults = 10'000;

absl::Status CheckGroups(const ModelConfig& c) {
  if (c.hidden % kInt4Group == 0 && c.expert_width % kInt4Group == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format(
      "INT4 experts need hidden_size {} and moe_intermediate_size {} to be multiples of "
      "{}",
      c.hidden, c.expert_width, kInt4Group));
}

// The two numbers of a weight_shape tensor, which is [2] of int32 or int64.
using ShapeBytes = std::array<std::byte, 16>;
std::array<int64_t, 2> ShapeOf(const ShapeBytes& bytes, DType dtype) {
  std::array<int64_t, 2> shape;
  std::memcpy(shape.data(), bytes.data(), sizeof(shape));
  if (dtype == DType::kI64) return shape;
  std::array<int32_t, 2> narrow;
  std::memcpy(narrow.data(), bytes.data(), sizeof(narrow));
  return {narrow[0], narrow[1]};
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
                              DescribeTensor(NameOf(info.dtype), info.shape),
                              DescribeTensor(AcceptedTypes(expected.kind), expected.shape)));
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
  std::vector<const TensorInfo*> tensors;
  for (const auto& [name, info] : table.tensors) {
    if (!name.ends_with(".weight_shape")) continue;
    if (!Accepts(TensorKind::kShape, info.dtype) || info.shape != std::vector<int64_t>{2}) {
      return absl::InvalidArgumentError(
          fmt::format("{}: {} is {}, expected {}", table.files[info.file].string(), name,
                      DescribeTensor(NameOf(info.dtype), info.shape),
                      DescribeTensor(AcceptedTypes(TensorKind::kShape), {2})));
    }
    tensors.push_back(&info);
  }
  std::vector<ShapeBytes> bytes(tensors.size());
  std::vector<SmallRead> reads;
  for (size_t i = 0; i < tensors.size(); ++i) {
    reads.push_back({tensors[i]->file, tensors[i]->offset,
                     std::span(bytes[i]).first(static_cast<size_t>(tensors[i]->size_bytes))});
  }
  STATETAP_RETURN_IF_ERROR(ReadScattered(table.files, std::move(reads)));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto found = ShapeOf(bytes[i], tensors[i]->dtype);
    const auto expected = ExpertShape(config, tensors[i]->name);
    if (found == expected) continue;
    return absl::InvalidArgumentError(fmt::format(
        "{}: {} holds ({}, {}), expected ({}, {})", table.files[tensors[i]->file].string(),
        tensors[i]->name, found[0], found[1], expected[0], expected[1]));
  }
  return absl::OkStatus();
}

}  // namespace statetap
