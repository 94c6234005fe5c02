// Whether the files of a base model are whole and what its configuration calls for, as a report
// that goes on where loading would stop at the first fault. Headers only, unless asked for more; no
// code of the checkpoint is run.
#pragma once

#include <filesystem>

#include "extractor/base/status.h"
#include "extractor/checkpoint/rule_report.h"
#include "extractor/checkpoint/weight_scan.h"

namespace statetap {

struct BaseCheck {
  // Reads every byte: SHA-256 of the files of a Hugging Face cache, whose blobs are named by it.
  bool digests = false;
  // Reads every text tensor: weights and scales finite, weight_shape right, which INT4 codes occur.
  bool deep = false;
  ScanProgress progress;  // called now and then while data is read
};

// NOT_FOUND where `folder` is no folder or has no config.json. All else that is wrong is a row.
// A row a kind of tensor ("model.layers.{1..60}.mlp.gate.weight"), counted by the configuration.
absl::StatusOr<RuleReport> VerifyCheckpoint(const std::filesystem::path& folder,
                                            const BaseCheck& check);

}  // namespace statetap
