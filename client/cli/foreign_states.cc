#include "client/cli/foreign_states.h"

#include <algorithm>
#include <utility>

#include "extractor/base/dtype.h"
#include "extractor/base/file.h"
#include "extractor/checkpoint/safetensors.h"
#include "extractor/checkpoint/tensor_inventory.h"
#include "extractor/shard/fp8.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;

struct ForeignFile {
  SafetensorsEntry states, scales, ids;  // scales: of states in fp8
};

absl::StatusOr<ForeignFile> ReadHeader(const fs::path& path) {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<SafetensorsEntry> entries,
                            ReadSafetensorsHeader(path));
  ForeignFile file;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.name == "hidden_states") file.states = entry;
    if (entry.name == "hidden_states_scales") file.scales = entry;
    if (entry.name == "token_ids") file.ids = entry;
  }
  const auto wrong = [&](const SafetensorsEntry& entry, std::string_view name,
                         std::string_view expected) {
    return absl::InvalidArgumentError(fmt::format(
        "{}: {} is {}; {} is read, as vLLM's connector and speculators write it", path.string(),
        name, entry.name.empty() ? "not there" : DescribeTensor(entry.dtype, entry.shape),
        expected));
  };
  if (file.ids.dtype != "I64" || file.ids.shape.size() != 1)
    return wrong(file.ids, "token_ids", "I64 [tokens]");
  const bool fp8 = file.states.dtype == "F8_E4M3";
  if ((file.states.dtype != "BF16" && !fp8) || file.states.shape.size() != 3)
    return wrong(file.states, "hidden_states", "BF16 or F8_E4M3 [tokens, slots, hidden]");
  if (file.states.shape[0] != file.ids.shape[0])
    return wrong(file.states, "hidden_states",
                 fmt::format("a row for each of {} token_ids", file.ids.shape[0]));
  if (fp8 && (file.scales.dtype != "F32" ||
              file.scales.shape != std::vector<int64_t>{file.ids.shape[0], 1, 1}))
    return wrong(file.scales, "hidden_states_scales",
                 fmt::format("F32 [{}, 1, 1] beside F8_E4M3", file.ids.shape[0]));
  return file;
}

template <typename T>
absl::StatusOr<std::vector<T>> ReadTensor(const File& file, const SafetensorsEntry& entry) {
  std::vector<T> values(static_cast<size_t>(entry.size_bytes) / sizeof(T));
  STATETAP_RETURN_IF_ERROR(file.ReadAt(entry.offset, std::as_writable_bytes(std::span(values))));
  return values;
}

// bf16. Of fp8 as hs_connectors gives it to a trainer: the product of code and scale, both in bf16.
absl::StatusOr<std::vector<uint16_t>> ReadStates(const File& file, const ForeignFile& header) {
  if (header.states.dtype == "BF16") return ReadTensor<uint16_t>(file, header.states);
  STATETAP_ASSIGN_OR_RETURN(const auto codes, ReadTensor<uint8_t>(file, header.states));
  STATETAP_ASSIGN_OR_RETURN(const auto scales, ReadTensor<float>(file, header.scales));
  std::vector<uint16_t> values;
  values.reserve(codes.size());
  for (const float exact : scales) {
    const float scale = Bf16ToFloat(FloatToBf16(exact));
    for (const size_t end = values.size() + codes.size() / scales.size(); values.size() < end;)
      values.push_back(FloatToBf16(Fp8ToFloat(codes[values.size()]) * scale));
  }
  return values;
}

}  // namespace

absl::StatusOr<ForeignStates> ForeignStates::Open(const fs::path& folder) {
  std::error_code error;
  ForeignStates out;
  out.folder_ =
      fs::is_directory(folder / "hidden_states", error) ? folder / "hidden_states" : folder;
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(out.folder_, error))
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path());
  if (paths.empty())
    return absl::InvalidArgumentError(
        fmt::format("--with {}: no safetensors file is there{}", folder.string(),
                    error ? fmt::format(" ({})", error.message()) : ""));
  std::ranges::sort(paths);
  for (const fs::path& path : paths) {
    STATETAP_ASSIGN_OR_RETURN(const ForeignFile header, ReadHeader(path));
    STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForRead(path));
    STATETAP_ASSIGN_OR_RETURN(const std::vector<int64_t> ids,
                              ReadTensor<int64_t>(file, header.ids));
    out.files_.emplace(std::vector<int32_t>(ids.begin(), ids.end()), path.filename());
    out.unused_.insert(path.filename());
  }
  return out;
}

// What begins `ids` is at or before it in the order of the map, and whatever lies between the two
// begins with it too.
ForeignStates::Files::const_iterator ForeignStates::LongestThatBegins(
    std::vector<int32_t> ids) const {
  while (!ids.empty()) {
    auto found = files_.upper_bound(ids);
    if (found == files_.begin()) break;
    const std::vector<int32_t>& tokens = (--found)->first;
    const auto same = static_cast<size_t>(std::ranges::mismatch(tokens, ids).in1 - tokens.begin());
    if (same == tokens.size()) return tokens.empty() ? files_.end() : found;
    ids.resize(same);
  }
  return files_.end();
}

absl::StatusOr<std::optional<SampleStates>> ForeignStates::Find(const std::vector<int32_t>& ids,
                                                                const std::vector<int>& boundaries,
                                                                int layers) {
  const auto found = LongestThatBegins(ids);
  if (found == files_.end()) return std::nullopt;
  const fs::path path = folder_ / found->second;
  STATETAP_ASSIGN_OR_RETURN(const ForeignFile header, ReadHeader(path));
  const auto slots = static_cast<size_t>(header.states.shape[1]);
  const auto hidden = static_cast<size_t>(header.states.shape[2]);
  if (slots != boundaries.size())
    return absl::InvalidArgumentError(fmt::format(
        "{}: hidden_states has {} slots, the boundaries are {}; say with --boundaries which its "
        "slots are",
        path.string(), slots, fmt::join(boundaries, ",")));
  STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForRead(path));
  STATETAP_ASSIGN_OR_RETURN(const std::vector<uint16_t> values, ReadStates(file, header));
  SampleStates sample{
      .hidden = static_cast<int>(hidden), .layers = layers, .boundaries = boundaries};
  sample.record.id = found->second;
  sample.record.input_ids = found->first;
  sample.states.resize(slots);
  for (size_t at = 0; at < values.size(); at += hidden) {
    auto& states = sample.states[at / hidden % slots];
    states.insert(states.end(), values.begin() + static_cast<ptrdiff_t>(at),
                  values.begin() + static_cast<ptrdiff_t>(at + hidden));
  }
  unused_.erase(found->second);
  return sample;
}

std::vector<std::string> ForeignStates::Unused() const { return {unused_.begin(), unused_.end()}; }

}  // namespace statetap
