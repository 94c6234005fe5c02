// Whether an EAGLE-3 drafter's files are what its configuration says, what engines expect and what
// features to train or run it on hold. Reads config.json, the headers of the safetensors files and
// the two vocabulary maps; nothing else of the tensors, no code.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "extractor/base/status.h"
#include "extractor/checkpoint/rule_report.h"

namespace statetap {

// What the drafter is held against: a job, a shard or a base model.
struct DrafterTarget {
  std::string name;             // for messages: "job pilot"
  int64_t hidden = 0;           // 0: not known, not compared; as the next two
  int64_t layers = 0;           // of the base model
  int64_t vocab = 0;            // of the base model
  std::vector<int> boundaries;  // that are captured; empty: not compared
};

enum class DrafterEngine { kVllm, kSglang, kSpeculators };

struct DrafterCheck {
  std::optional<DrafterTarget> against;
  std::optional<DrafterEngine> engine;  // adds what it would rename, skip or refuse
};

// NOT_FOUND where the folder has no config.json or no safetensors file. All else that is wrong is a
// row of the report. A sound drafter of the published layout gives a row a tensor and no fault.
absl::StatusOr<RuleReport> VerifyDrafter(const std::filesystem::path& folder,
                                         const DrafterCheck& check);

}  // namespace statetap
