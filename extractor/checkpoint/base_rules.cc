#include "extractor/checkpoint/base_rules.h"

#include <fmt/ranges.h>

#include <map>
#include <set>
#include <system_error>
#include <unordered_map>

#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/base/suggest.h"
#include "extractor/checkpoint/checkpoint_check.h"
#include "extractor/checkpoint/checkpoint_index.h"
#include "extractor/checkpoint/fault_list.h"
#include "extractor/checkpoint/hf_cache.h"
#include "extractor/checkpoint/int4.h"
#include "extractor/checkpoint/name_pattern.h"
#include "extractor/checkpoint/safetensors.h"
#include "extractor/checkpoint/tensor_inventory.h"
#include "extractor/checkpoint/tensor_table.h"
#include "extractor/checkpoint/vision_inventory.h"
#include "extractor/checkpoint/weight_scan.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;

std::string Count(int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

// The files of a checkpoint and what their headers hold, as far as they can be read.
class Inventory {
 public:
  absl::Status Read(const fs::path& folder, RuleReport& report) {
    STATETAP_ASSIGN_OR_RETURN(index_, ReadWeightIndex(folder));
    std::set<std::string> files;
    if (index_.files.empty()) {
      STATETAP_ASSIGN_OR_RETURN(const std::string file, SingleWeightFile(folder));
      files.insert(file);
    }
    for (const auto& [tensor, file] : index_.files) files.insert(file);
    for (const std::string& file : files) ReadFile(folder, file, report);
    AddFilesRow(folder, static_cast<int64_t>(files.size()), report);
    AddIndexRow(report);
    return absl::OkStatus();
  }

  const TensorTable& text() const { return text_; }    // INT4, norms, … by our names
  const TensorMap& vision() const { return vision_; }  // by stored names
  // Of both, in files that cannot be read.
  bool Absent(const std::string& name) const { return absent_.contains(name); }
  const std::map<std::string, std::pair<int64_t, int64_t>>& skipped() const { return skipped_; }
  const FaultList& foreign_types() const { return foreign_types_; }
  int64_t tensors() const { return tensors_; }
  int64_t bytes() const { return bytes_; }
  const std::vector<fs::path>& whole_files() const { return text_.files; }

 private:
  void ReadFile(const fs::path& folder, const std::string& file, RuleReport& report) {
    const fs::path path = folder / file;
    std::error_code ignored;
    absl::StatusOr<std::vector<SafetensorsEntry>> entries = absl::NotFoundError("not there");
    if (!fs::exists(path, ignored)) {
      missing_.Add(file);
    } else if (entries = ReadSafetensorsHeader(path); !entries.ok()) {
      report.Add({Verdict::kFault, file, fmt::format("{} bytes", fs::file_size(path, ignored)),
                  "a whole safetensors file", std::string(MessageOf(entries.status()))});
    }
    if (!entries.ok()) {
      for (const auto& [tensor, in] : index_.files) {
        if (in != file) continue;
        if (const auto name = TextTensorName(tensor)) absent_.insert(*name);
        if (IsVisionTensor(tensor)) absent_.insert(tensor);
      }
      return;
    }
    text_.files.push_back(path);
    for (const SafetensorsEntry& entry : *entries) AddEntry(file, entry);
  }

  void AddEntry(const std::string& file, const SafetensorsEntry& entry) {
    ++tensors_;
    bytes_ += entry.size_bytes;
    if (!index_.files.empty()) {
      const auto listed = index_.files.find(entry.name);
      if (listed == index_.files.end()) {
        disagree_.Add(fmt::format("{} in {} is not listed", entry.name, file));
      } else if (listed->second != file) {
        disagree_.Add(fmt::format("{} is in {}, not in {}", entry.name, file, listed->second));
      }
      ++found_[entry.name];
    }
    const std::optional<std::string> name = TextTensorName(entry.name);
    const std::optional<DType> dtype = DTypeOfSafetensors(entry.dtype);
    const auto add_to = [&](TensorMap& tensors, const std::string& as) {
      return tensors
          .try_emplace(as, TensorInfo{.name = as,
                                      .dtype = *dtype,
                                      .shape = entry.shape,
                                      .file = static_cast<int>(text_.files.size()) - 1,
                                      .offset = entry.offset,
                                      .size_bytes = entry.size_bytes})
          .second;
    };
    if (!name) {
      auto& [count, bytes] = skipped_[entry.name.substr(0, entry.name.find('.'))];
      ++count;
      bytes += entry.size_bytes;
      if (dtype && IsVisionTensor(entry.name)) add_to(vision_, entry.name);
      return;
    }
    if (!dtype) return foreign_types_.Add(fmt::format("{} is {}", entry.name, entry.dtype));
    if (!add_to(text_.tensors, *name))
      disagree_.Add(fmt::format("{} in {} is there a second time", entry.name, file));
  }

  void AddFilesRow(const fs::path& folder, int64_t files, RuleReport& report) const {
    const auto whole = static_cast<int64_t>(text_.files.size());
    RuleRow row{Verdict::kOk, "files", fmt::format("{} of {} whole", whole, files),
                fmt::format("{} whole", files), fmt::format("{} bytes of tensors", bytes_)};
    if (whole < files) {
      row.verdict = Verdict::kFault;
      row.why = missing_.empty() ? "damaged, see above" : "not there: " + missing_.Text();
      const int64_t parts = UnfinishedDownloads(folder);
      if (parts > 0) {
        row.why += fmt::format("; the download has {}", Count(parts, "unfinished part"));
      }
    }
    report.Add(std::move(row));
  }

  // Of a Hugging Face cache: blobs/*.incomplete beside snapshots/.
  static int64_t UnfinishedDownloads(const fs::path& folder) {
    std::error_code error;
    int64_t parts = 0;
    for (const auto& entry :
         fs::directory_iterator(folder.parent_path().parent_path() / "blobs", error)) {
      parts += entry.path().extension() == ".incomplete";
    }
    return parts;
  }

  void AddIndexRow(RuleReport& report) const {
    if (index_.files.empty()) return;
    RuleRow row{Verdict::kOk, "index", Count(tensors_, "tensor"),
                Count(static_cast<int64_t>(index_.files.size()), "tensor"),
                "files and index name each other's tensors"};
    if (!disagree_.empty()) {
      row.verdict = Verdict::kFault;
      row.why = disagree_.Text();
    } else if (found_.size() != index_.files.size()) {
      row.verdict = Verdict::kFault;
      row.why = "the rest is in files that are missing or damaged, or in none";
    }
    report.Add(std::move(row));
    // Some writers count shared or packed tensors otherwise: worth a look, no fault.
    if (index_.total_size) {
      report.Add({bytes_ == *index_.total_size ? Verdict::kOk : Verdict::kWarning,
                  "index total_size", fmt::format("{} bytes", bytes_),
                  fmt::format("{} bytes", *index_.total_size), "all tensors together"});
    }
  }

  WeightIndex index_;
  TensorTable text_;
  TensorMap vision_;
  std::set<std::string> absent_;
  std::unordered_map<std::string, int> found_;
  std::map<std::string, std::pair<int64_t, int64_t>> skipped_;  // first part → count, bytes
  FaultList missing_, disagree_, foreign_types_;
  int64_t tensors_ = 0, bytes_ = 0;
};

// Tensors of one pattern and shape.
struct Group {
  NumberRanges ranges;
  int64_t expected = 0, found = 0, absent = 0;
  std::string expected_as, found_as;
  FaultList missing, misshapen;
};

// A row for each kind of tensor that is called for, and for each kind that is not.
class TensorRules {
 public:
  // `departs`: what a tensor that is missing, misshapen or not called for is.
  TensorRules(const Inventory& inventory, const TensorMap& tensors, Verdict departs)
      : inventory_(inventory), tensors_(tensors), departs_(departs), unused_(tensors) {}

  void Visit(const ExpectedTensor& expected) {
    ++expected_;
    const NumberedName name = SplitNumbers(expected.name);
    const auto [at, added] = groups_.try_emplace({name.pattern, expected.shape});
    if (added) order_.push_back(at);
    Group& group = at->second;
    group.ranges.Add(name.numbers);
    ++group.expected;
    if (group.expected_as.empty()) {
      group.expected_as = DescribeTensor(AcceptedTypes(expected.kind), expected.shape);
    }
    const auto found = tensors_.find(expected.name);
    if (found == tensors_.end()) {
      if (inventory_.Absent(expected.name)) {
        ++group.absent;
      } else {
        group.missing.Add(expected.name);
      }
      return;
    }
    unused_.erase(expected.name);
    ++matched_;
    Note(expected, found->second, group);
  }

  // A row of its own for tensors that `accounts_for` says so of; the rest are strangers.
  void AddRows(const std::function<bool(const TensorInfo&)>& accounts_for,
               RuleReport& report) const {
    std::vector<std::string> patterns;
    for (const auto& group : order_) {
      patterns.push_back(group->first.first);
      AddRow(patterns.back(), group->second, report);
    }
    std::map<std::string, std::pair<NumberRanges, int64_t>> strangers;
    for (const auto& [name, info] : unused_) {
      if (accounts_for(info)) continue;
      const NumberedName split = SplitNumbers(name);
      auto& [ranges, count] = strangers[split.pattern];
      ranges.Add(split.numbers);
      ++count;
    }
    for (const auto& [pattern, stranger] : strangers) {
      const std::string near = Nearest(pattern, patterns);
      report.Add({departs_, stranger.first.Text(pattern), Count(stranger.second, "tensor"),
                  "not called for by config.json",
                  near.empty() ? "" : fmt::format("did you mean {}?", near)});
    }
  }

  // "3 tensors" found and expected, and what they hold.
  void AddTotal(const std::string& rule, const std::string& why, RuleReport& report) const {
    report.Add({Verdict::kNote, rule, Count(matched_, "tensor"), Count(expected_, "tensor"),
                fmt::format("{} bytes, {} parameters{}", bytes_, parameters_, why)});
  }

 private:
  void Note(const ExpectedTensor& expected, const TensorInfo& info, Group& group) {
    ++group.found;
    bytes_ += info.size_bytes;
    if (expected.kind != TensorKind::kScale && expected.kind != TensorKind::kShape) {
      const int64_t elements = info.size_bytes / static_cast<int64_t>(SizeOf(info.dtype));
      parameters_ += expected.kind == TensorKind::kPacked ? elements * kInt4PerWord : elements;
    }
    if (group.found_as.empty()) group.found_as = DescribeTensor(NameOf(info.dtype), info.shape);
    if (Accepts(expected.kind, info.dtype) && info.shape == expected.shape) return;
    group.misshapen.Add(
        fmt::format("{} is {}", expected.name, DescribeTensor(NameOf(info.dtype), info.shape)));
  }

  void AddRow(const std::string& pattern, const Group& group, RuleReport& report) const {
    RuleRow row{Verdict::kOk, group.ranges.Text(pattern),
                fmt::format("{} × {}", group.found, group.found_as),
                fmt::format("{} × {}", group.expected, group.expected_as), ""};
    if (group.found == 0) row.found = "missing";
    if (group.absent > 0) row.why = fmt::format("{} in files that are not whole", group.absent);
    if (!group.missing.empty()) row.why += "; missing: " + group.missing.Text();
    if (!group.misshapen.empty()) row.why += "; " + group.misshapen.Text();
    if (row.why.starts_with("; ")) row.why.erase(0, 2);
    if (!row.why.empty()) row.verdict = departs_;
    report.Add(std::move(row));
  }

  const Inventory& inventory_;
  const TensorMap& tensors_;
  const Verdict departs_;
  TensorMap unused_;
  using Groups = std::map<std::pair<std::string, std::vector<int64_t>>, Group>;
  Groups groups_;
  std::vector<Groups::iterator> order_;  // as called for
  int64_t expected_ = 0, matched_ = 0, bytes_ = 0, parameters_ = 0;
};

void AddTextRows(const ModelConfig& config, const Inventory& inventory, RuleReport& report) {
  const bool quantized = IsQuantized(inventory.text().tensors);
  TensorRules rules(inventory, inventory.text().tensors, Verdict::kFault);
  ForEachTensor(config, quantized, [&](const ExpectedTensor& expected) {
    rules.Visit(expected);
    return true;
  });
  int64_t prediction = 0;
  rules.AddRows(
      [&](const TensorInfo& info) {
        if (IsPrediction(info.name, config)) {
          ++prediction;
          return true;
        }
        if (config.tie_word_embeddings && info.name == "lm_head.weight") {  // loading warns, too
          report.Add({Verdict::kWarning, info.name, DescribeTensor(NameOf(info.dtype), info.shape),
                      "not used", "config.json ties the head to model.embed_tokens.weight"});
          return true;
        }
        return info.size_bytes == 0;  // a part that is not there, as some writers say it
      },
      report);
  if (prediction > 0) {
    report.Add({Verdict::kNote, "multi-token prediction", Count(prediction, "tensor"), "not used",
                fmt::format("{} behind the last", Count(config.num_mtp_layers, "layer"))});
  }
  if (!inventory.foreign_types().empty()) {
    report.Add({Verdict::kFault, "dtypes", inventory.foreign_types().Text(), "known types",
                "no text tensor has such a type"});
  }
  rules.AddTotal("text model", quantized ? ", routed experts INT4" : "", report);
}

// What the text model leaves aside; no fault of it keeps anything from running.
void AddOtherRows(const Json& config, const Inventory& inventory, RuleReport& report) {
  const std::optional<VisionSizes> vision = VisionSizesOf(config);
  if (vision && !inventory.vision().empty()) {
    TensorRules rules(inventory, inventory.vision(), Verdict::kWarning);
    ForEachVisionTensor(*vision, [&](const ExpectedTensor& expected) { rules.Visit(expected); });
    rules.AddRows([](const TensorInfo&) { return false; }, report);
    rules.AddTotal("vision model", ", not used", report);
  }
  for (const auto& [part, sizes] : inventory.skipped()) {
    if (vision && IsVisionTensor(part + ".")) continue;
    report.Add({Verdict::kNote, part + ".*", Count(sizes.first, "tensor"), "not used",
                fmt::format("no part of the text model; {} bytes", sizes.second)});
  }
}

}  // namespace

absl::StatusOr<RuleReport> VerifyCheckpoint(const fs::path& path, const BaseCheck& check) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    return absl::NotFoundError(fmt::format("{} is no folder", path.string()));
  }
  STATETAP_ASSIGN_OR_RETURN(const fs::path folder, SnapshotOf(path));
  RuleReport report;
  const absl::StatusOr<ModelConfig> config = ReadModelConfig(folder);
  if (absl::IsNotFound(config.status())) return config.status();
  if (config.ok()) {
    report.Add({Verdict::kOk, "config.json",
                fmt::format("{} layers of hidden {}", config->num_layers, config->hidden),
                "the DeepSeek-V3 family", config->architecture});
  } else {
    report.Add({Verdict::kFault, "config.json", "refused", "the DeepSeek-V3 family",
                std::string(MessageOf(config.status()))});
  }
  Inventory inventory;
  if (const absl::Status status = inventory.Read(folder, report); !status.ok()) {
    report.Add({Verdict::kFault, "files", "unreadable", "safetensors files",
                std::string(MessageOf(status))});
    return report;
  }
  if (config.ok()) {
    AddTextRows(*config, inventory, report);
    STATETAP_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(folder / "config.json"));
    STATETAP_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
    AddOtherRows(json, inventory, report);
  }
  if (check.digests) {
    STATETAP_RETURN_IF_ERROR(AddDigestRows(inventory.whole_files(), check.progress, report));
  }
  if (check.deep && config.ok()) {
    STATETAP_RETURN_IF_ERROR(AddScanRows(*config, inventory.text(), check.progress, report));
  }
  return report;
}

}  // namespace statetap
