// What only the bytes of a checkpoint can tell: digests of its files, values that are not finite,
// INT4 codes and scales.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "extractor/base/status.h"
#include "extractor/checkpoint/model_config.h"
#include "extractor/checkpoint/rule_report.h"
#include "extractor/checkpoint/tensor_table.h"

namespace statetap {

// False: stop, with CANCELLED.
using ScanProgress = std::function<bool(int64_t done_bytes, int64_t total_bytes)>;

// SHA-256 of every file that a Hugging Face cache names by it (a link to blobs/<64 hex digits>).
absl::Status AddDigestRows(const std::vector<std::filesystem::path>& files,
                           const ScanProgress& progress, RuleReport& report);

// Reads every tensor of the table.
absl::Status AddScanRows(const ModelConfig& config, const TensorTable& table,
                         const ScanProgress& progress, RuleReport& report);

}  // namespace statetap
