#include "extractor/checkpoint/drafter_rules.h"

#include <fmt/ranges.h>

#include <bit>
#include <cstring>
#include <map>
#include <set>
#include <system_error>

#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/base/suggest.h"
#include "extractor/checkpoint/drafter_config.h"
#include "extractor/checkpoint/drafter_engines.h"
#include "extractor/checkpoint/drafter_tensors.h"
#include "extractor/checkpoint/safetensors.h"
#include "extractor/checkpoint/vocab_map.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kUnknown = DrafterConfig::kUnknown;
constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;
constexpr size_t kMostNames = 10'000;  // of tensors that are looked at for near matches

struct Found {
  SafetensorsEntry entry;
  fs::path file;
};
using Tensors = std::map<std::string, Found, std::less<>>;

std::string Describe(std::string_view dtype, const std::vector<int64_t>& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape)
    sizes.push_back(size == kUnknown ? "?" : fmt::format("{}", size));
  return fmt::format("{} [{}]", dtype, fmt::join(sizes, ", "));
}

bool Fits(const std::vector<int64_t>& found, const std::vector<int64_t>& expected) {
  return std::ranges::equal(found, expected,
                            [](int64_t f, int64_t e) { return e == kUnknown || f == e; });
}

// Every *.safetensors of the folder; a damaged one is a row and its tensors are missing.
absl::StatusOr<Tensors> ReadHeaders(const fs::path& folder, RuleReport& report) {
  std::set<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") files.insert(entry.path());
  }
  if (error) return ErrnoStatus(error.value(), "cannot list", folder);
  if (files.empty()) {
    return absl::NotFoundError(fmt::format(
        "{} has no *.safetensors; pickled weights (pytorch_model.bin) can run code and are not "
        "read: save the drafter as safetensors",
        folder.string()));
  }
  Tensors tensors;
  for (const fs::path& file : files) {
    auto entries = ReadSafetensorsHeader(file);
    std::error_code ignored;
    const std::string size = fmt::format("{} bytes", fs::file_size(file, ignored));
    if (!entries.ok()) {
      report.Add({Verdict::kFault, file.filename(), size, "a whole safetensors file",
                  std::string(MessageOf(entries.status()))});
      continue;
    }
    int64_t data = 0;
    for (const SafetensorsEntry& entry : *entries) data += entry.size_bytes;
    report.Add(
        {Verdict::kOk, file.filename(), size,
         fmt::format("{} bytes", data + (entries->empty() ? 8 : entries->front().offset)),
         fmt::format("header, then {} tensors of {} bytes without a hole", entries->size(), data)});
    for (SafetensorsEntry& entry : *entries) {
      const auto [at, added] = tensors.try_emplace(entry.name);
      if (added) {
        at->second = {std::move(entry), file};
        continue;
      }
      report.Add({Verdict::kFault, at->first, fmt::format("in {} too", file.filename().string()),
                  fmt::format("in {} alone", at->second.file.filename().string()),
                  "two files hold it: engines take either"});
    }
  }
  return tensors;
}

class Checker {
 public:
  Checker(DrafterConfig config, const Tensors& tensors, RuleReport& report)
      : c_(std::move(config)), tensors_(tensors), report_(report), style_(StyleOf()) {}

  void Run(const DrafterCheck& check) {
    report_.Add({Verdict::kOk, "naming style", std::string(NameOf(style_)),
                 "one of the public three",
                 c_.architecture.empty() ? "config.json names no architecture" : c_.architecture});
    CheckTaps();
    CheckHeads();
    CheckTensors();
    CheckVocabulary();
    if (check.against) CheckTarget(*check.against);
    if (check.engine) AddEngineRows(*check.engine, c_, style_, unknown_, report_);
  }

 private:
  bool Has(std::string_view name) const { return tensors_.contains(name); }

  DrafterStyle StyleOf() const {
    if (c_.speculators) return DrafterStyle::kSpeculators;
    const auto at = tensors_.lower_bound("midlayer.");
    const bool midlayer = at != tensors_.end() && at->first.starts_with("midlayer.");
    return midlayer ? DrafterStyle::kMidlayer : DrafterStyle::kLayers;
  }

  // Columns of a matrix that is there.
  int64_t Columns(std::string_view name) const { return Size(name, 1); }
  int64_t Rows(std::string_view name) const { return Size(name, 0); }
  int64_t Size(std::string_view name, size_t axis) const {
    const auto at = tensors_.find(name);
    if (at == tensors_.end() || at->second.entry.shape.size() != 2) return kUnknown;
    return at->second.entry.shape[axis];
  }

  // By config.json, else by fc.
  int64_t NumTaps() const {
    if (!c_.taps.empty()) return static_cast<int64_t>(c_.taps.size());
    const int64_t columns = Columns("fc.weight");
    if (columns == kUnknown || c_.target_hidden <= 0 || columns % c_.target_hidden != 0) {
      return kUnknown;
    }
    return columns / c_.target_hidden;
  }

  void CheckTaps() {
    if (c_.taps.empty()) {
      report_.Add({Verdict::kWarning, "taps", "not named", "eagle_aux_hidden_state_layer_ids",
                   "engines take boundaries 2, N/2, N−3 (outputs of layers 1, N/2−1, N−4)"});
      return;
    }
    std::vector<int64_t> outputs, later;
    for (const int64_t id : c_.taps) {
      outputs.push_back(id - 1);
      later.push_back(id + 1);
    }
    const std::string ids = fmt::format("[{}]", fmt::join(c_.taps, ", "));
    const bool ascending =
        std::ranges::adjacent_find(c_.taps, std::greater_equal<>()) == c_.taps.end();
    if (!ascending) {
      report_.Add({Verdict::kFault, c_.taps_key, ids, "ascending, each once",
                   "fc takes the taps side by side in the order of the layers"});
      return;
    }
    report_.Add(
        {c_.speculators ? Verdict::kOk : Verdict::kWarning, c_.taps_key, ids,
         fmt::format("boundaries {} (outputs of layers {})", fmt::join(c_.taps, ","),
                     fmt::join(outputs, ",")),
         c_.speculators
             ? "speculators counts boundaries"
             : fmt::format("vLLM and SGLang since May 2026 read them so; older SGLang adds 1 "
                           "(boundaries {}), and drafters were published for either: measure the "
                           "acceptance with both",
                           fmt::join(later, ","))});
  }

  std::string AttentionPrefix() const {
    return style_ == DrafterStyle::kMidlayer ? "midlayer.self_attn." : "layers.0.self_attn.";
  }

  // Heads as the tensors have them against heads as config.json has them: engines that find no
  // head_dim take hidden / heads, which is no head size for 7168 / 64 = 112.
  void CheckHeads() {
    if (c_.latent_attention || c_.num_heads <= 0) return;
    const int64_t rows = Rows(AttentionPrefix() + "q_proj.weight");
    const bool whole = rows > 0 && rows % c_.num_heads == 0;
    const int64_t built = whole ? rows / c_.num_heads : kUnknown;
    const int64_t implied = c_.hidden > 0 ? c_.hidden / c_.num_heads : kUnknown;
    const std::string found =
        built == kUnknown ? "unknown" : fmt::format("{} (q_proj has {} rows)", built, rows);
    if (c_.head_dim != kUnknown) {
      const bool fits = built == c_.head_dim || rows == kUnknown;
      report_.Add({fits ? Verdict::kOk : Verdict::kFault, "head_dim", found,
                   fmt::format("{}", c_.head_dim),
                   built == implied && !fits
                       ? "config.json's head_dim; the tensors were built with hidden / heads"
                       : "config.json's head_dim"});
      return;
    }
    if (implied <= 0) return;
    const auto usual = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(implied)));
    const bool fits = implied == usual && (built == implied || rows == kUnknown);
    report_.Add({fits ? Verdict::kOk : Verdict::kFault, "head_dim", found, fmt::format("{}", usual),
                 fits
                     ? "hidden / heads, since config.json gives none"
                     : fmt::format("config.json gives none, and engines then take hidden / heads = "
                                   "{} / {} = {}: write head_dim into config.json",
                                   c_.hidden, c_.num_heads, implied)});
  }

  void CheckTensors() {
    const std::vector<DrafterTensor> expected = DrafterTensors(c_, style_, NumTaps());
    std::vector<std::string> missing, known;
    for (const DrafterTensor& tensor : expected) {
      known.push_back(tensor.name);
      if (tensor.required && !Has(tensor.name)) missing.push_back(tensor.name);
    }
    for (const auto& [name, found] : tensors_) {
      if (std::ranges::find(known, name) == known.end()) unknown_.push_back(name);
    }
    if (unknown_.size() > kMostNames) unknown_.resize(kMostNames);
    for (const DrafterTensor& tensor : expected) CheckTensor(tensor);
    for (const std::string& name : unknown_) {
      std::string near = Nearest(name, missing);
      if (near.empty()) near = Nearest(name, known);
      report_.Add({Verdict::kFault, name, Shown(tensors_.find(name)->second), "no such key",
                   near.empty() ? "SGLang skips unknown keys in silence, vLLM refuses them"
                                : fmt::format("did you mean {}?", near)});
    }
  }

  static std::string Shown(const Found& found) {
    return Describe(found.entry.dtype, found.entry.shape);
  }

  void CheckTensor(const DrafterTensor& tensor) {
    const auto at = tensors_.find(tensor.name);
    const std::string_view dtype = tensor.kind == DrafterTensorKind::kOffsets   ? "I64"
                                   : tensor.kind == DrafterTensorKind::kMembers ? "BOOL"
                                                                                : "BF16";
    RuleRow row{Verdict::kOk, tensor.name, "missing", Describe(dtype, tensor.shape), tensor.why};
    if (at == tensors_.end()) {
      if (!tensor.required) return;
      row.verdict = Verdict::kFault;
      const std::string near = Nearest(tensor.name, unknown_);
      if (!near.empty()) row.why += fmt::format("; is it {}?", near);
      return report_.Add(std::move(row));
    }
    const Found& found = at->second;
    row.found = Shown(found);
    const bool plain_weight = tensor.kind == DrafterTensorKind::kWeight &&
                              (found.entry.dtype == "F16" || found.entry.dtype == "F32");
    if (!Fits(found.entry.shape, tensor.shape)) {
      row.verdict = Verdict::kFault;
    } else if (plain_weight) {
      row.verdict = Verdict::kWarning;
      row.why += "; engines convert it";
    } else if (found.entry.dtype != dtype) {
      row.verdict = Verdict::kFault;
    }
    report_.Add(std::move(row));
  }

  void CheckVocabulary() {
    if (!c_.names_draft_vocab && Has("d2t")) {
      report_.Add({Verdict::kFault, "config draft_vocab_size", "missing",
                   Describe("", tensors_.find("d2t")->second.entry.shape),
                   "d2t maps a reduced vocabulary; engines then build lm_head for vocab_size"});
    }
    CheckVocabMap(Bytes("d2t", "I64"), Bytes("t2d", "BOOL"), c_.draft_vocab, c_.vocab, report_);
  }

  // Empty where the tensor is missing, of another type or larger than any vocabulary.
  std::vector<std::byte> Bytes(std::string_view name, std::string_view dtype) {
    constexpr int64_t kMostBytes = int64_t{256} << 20;
    const auto at = tensors_.find(name);
    if (at == tensors_.end() || at->second.entry.dtype != dtype) return {};
    const SafetensorsEntry& entry = at->second.entry;
    if (entry.size_bytes > kMostBytes) return {};
    std::vector<std::byte> bytes(static_cast<size_t>(entry.size_bytes));
    absl::StatusOr<File> file = File::OpenForRead(at->second.file);
    const absl::Status status = file.ok() ? file->ReadAt(entry.offset, bytes) : file.status();
    if (status.ok()) return bytes;
    report_.Add({Verdict::kFault, std::string(name), "unreadable", "values",
                 std::string(MessageOf(status))});
    return {};
  }

  void CheckTarget(const DrafterTarget& target) {
    const auto compare = [&](std::string_view what, int64_t found, int64_t expected) {
      if (expected == 0 || found == kUnknown) return;
      report_.Add({found == expected ? Verdict::kOk : Verdict::kFault,
                   fmt::format("target's {}", what), fmt::format("{}", found),
                   fmt::format("{}", expected), target.name});
    };
    compare("hidden", c_.target_hidden, target.hidden);
    compare("vocabulary", c_.vocab, target.vocab);
    if (target.layers > 0 && !c_.taps.empty() && c_.taps.back() > target.layers) {
      report_.Add({Verdict::kFault, "target's layers", fmt::format("a tap at {}", c_.taps.back()),
                   fmt::format("at most {}", target.layers), target.name});
    }
    if (!target.boundaries.empty() && !c_.taps.empty()) CompareTaps(target);
  }

  void CompareTaps(const DrafterTarget& target) {
    const auto captured = [&](int64_t shift) {
      return std::ranges::all_of(c_.taps, [&](int64_t id) {
        return std::ranges::find(target.boundaries, id + shift) != target.boundaries.end();
      });
    };
    RuleRow row{Verdict::kOk, "target's boundaries",
                fmt::format("taps {}", fmt::join(c_.taps, ",")),
                fmt::format("among {}", fmt::join(target.boundaries, ",")), target.name};
    if (!captured(0)) {
      row.verdict = captured(1) ? Verdict::kWarning : Verdict::kFault;
      row.why += captured(1) ? ": there only as outputs of layers, one boundary later"
                             : ": the features lack a tap";
    }
    report_.Add(std::move(row));
  }

  const DrafterConfig c_;
  const Tensors& tensors_;
  RuleReport& report_;
  const DrafterStyle style_;
  std::vector<std::string> unknown_;
};

}  // namespace

absl::StatusOr<RuleReport> VerifyDrafter(const fs::path& folder, const DrafterCheck& check) {
  STATETAP_ASSIGN_OR_RETURN(const std::string text,
                            ReadWholeFile(folder / "config.json", kMaxConfigBytes));
  auto config = ParseJson(text);
  if (config.ok() && !config->is_object()) {
    config =
        absl::InvalidArgumentError(fmt::format("{}, an object is needed", config->type_name()));
  }
  RuleReport report;
  if (!config.ok()) {
    report.Add({Verdict::kFault, "config.json", "unreadable", "a JSON object",
                std::string(MessageOf(config.status()))});
  }
  STATETAP_ASSIGN_OR_RETURN(const Tensors tensors, ReadHeaders(folder, report));
  if (!config.ok()) return report;
  Checker(ReadDrafterConfig(*config, report), tensors, report).Run(check);
  return report;
}

}  // namespace statetap
