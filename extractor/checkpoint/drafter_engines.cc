#include "extractor/checkpoint/drafter_engines.h"

#include <fmt/ranges.h>

namespace statetap {
namespace {

class Rows {
 public:
  Rows(std::string_view engine, RuleReport& report) : engine_(engine), report_(report) {}
  void Add(Verdict verdict, std::string found, std::string does, std::string why) {
    report_.Add({verdict, fmt::format("for {}", engine_), std::move(found), std::move(does),
                 std::move(why)});
  }

 private:
  std::string_view engine_;
  RuleReport& report_;
};

void AddVllm(const DrafterConfig& config, DrafterStyle style,
             const std::vector<std::string>& unknown, Rows& rows) {
  if (style == DrafterStyle::kMidlayer) {
    rows.Add(Verdict::kNote, "midlayer.*", "renames to layers.0.*", "loads as it is");
  }
  rows.Add(Verdict::kNote, "q, k, v; gate, up", "merges", "into qkv_proj and gate_up_proj");
  rows.Add(Verdict::kNote, "d2t", "renames to draft_id_to_target_id", "t2d is skipped");
  if (!unknown.empty()) {
    rows.Add(Verdict::kFault, fmt::format("{}", fmt::join(unknown, ", ")), "refuses",
             "a key without a parameter ends the load");
  }
  if (config.taps_key.starts_with("eagle_config.")) {
    rows.Add(Verdict::kWarning, config.taps_key, "older versions do not look there",
             "they take 2, N/2, N−3; put the list at the top level too");
  }
}

void AddSglang(const DrafterConfig& config, DrafterStyle style,
               const std::vector<std::string>& unknown, Rows& rows) {
  if (style != DrafterStyle::kMidlayer) {
    rows.Add(Verdict::kFault, "layers.0.*", "skips in silence",
             "it looks for midlayer.*: rename the keys, or the layer stays random");
  }
  if (!unknown.empty()) {
    rows.Add(Verdict::kFault, fmt::format("{}", fmt::join(unknown, ", ")), "skips in silence",
             "no message says so");
  }
  rows.Add(Verdict::kNote, "d2t", "adds 0, 1, 2, … to it", "t2d is not read");
  if (!config.taps.empty()) {
    const bool shifted = config.taps.front() == 1;
    rows.Add(Verdict::kNote, fmt::format("taps {}", fmt::join(config.taps, ",")),
             shifted ? "adds 1" : "takes as boundaries; before May 2026 adds 1",
             "since May 2026 only a list that starts with 1 counts outputs of layers");
  }
}

void AddSpeculators(const DrafterConfig& config, DrafterStyle style, Rows& rows) {
  if (style == DrafterStyle::kMidlayer) {
    rows.Add(Verdict::kNote, "midlayer.*", "renames to layers.0.*", "by its converter");
  }
  if (!config.speculators) {
    rows.Add(Verdict::kWarning, "config without speculators_model_type", "converts first",
             "its converter takes the target's vocabulary from t2d's length");
  }
}

}  // namespace

void AddEngineRows(DrafterEngine engine, const DrafterConfig& config, DrafterStyle style,
                   const std::vector<std::string>& unknown, RuleReport& report) {
  switch (engine) {
    case DrafterEngine::kVllm: {
      Rows rows("vllm", report);
      return AddVllm(config, style, unknown, rows);
    }
    case DrafterEngine::kSglang: {
      Rows rows("sglang", report);
      return AddSglang(config, style, unknown, rows);
    }
    case DrafterEngine::kSpeculators: {
      Rows rows("speculators", report);
      return AddSpeculators(config, style, rows);
    }
  }
}

}  // namespace statetap
