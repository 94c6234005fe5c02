// Copies a folder of shards with faults planted, each file whole and its statistics true to what it
// holds, as a broken capture would have written it:
//   alter_shards FROM TO [zero=BOUNDARY] [normed=MODEL] [scaled=SHARD:FACTOR]
// zero: a dead tap. normed: the final states behind the model's final norm. scaled: the states of
// one shard, counted from 0, another model's or precision's.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>

#include "extractor/base/file.h"
#include "extractor/checkpoint/checkpoint_index.h"
#include "extractor/shard/shard_reader.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
using Options = std::map<std::string, std::string>;

absl::StatusOr<std::vector<float>> NormWeight(const fs::path& model) {
  STATETAP_ASSIGN_OR_RETURN(const CheckpointIndex index, CheckpointIndex::Open(model));
  const TensorInfo& tensor = *index.Find("model.norm.weight");
  std::vector<uint16_t> bits(static_cast<size_t>(index.config().hidden));
  STATETAP_ASSIGN_OR_RETURN(const File file,
                            File::OpenForRead(index.files()[static_cast<size_t>(tensor.file)]));
  STATETAP_RETURN_IF_ERROR(file.ReadAt(tensor.offset, std::as_writable_bytes(std::span(bits))));
  std::vector<float> weight;
  for (const uint16_t word : bits) weight.push_back(Bf16ToFloat(word));
  return weight;
}

void Norm(std::span<uint16_t> states, const std::vector<float>& weight, double eps) {
  for (size_t at = 0; at < states.size(); at += weight.size()) {
    const auto row = states.subspan(at, weight.size());
    double squares = 0;
    for (const uint16_t word : row) squares += std::pow(Bf16ToFloat(word), 2);
    const double rms = std::sqrt(squares / static_cast<double>(row.size()) + eps);
    for (size_t c = 0; c < row.size(); ++c)
      row[c] = FloatToBf16(static_cast<float>(Bf16ToFloat(row[c]) / rms) * weight[c]);
  }
}

absl::Status Alter(const ShardReader& shard, const fs::path& to, const Options& options,
                   const std::vector<float>& norm, float factor) {
  const ShardConfig& config = shard.config();
  STATETAP_ASSIGN_OR_RETURN(const auto writer, ShardWriter::Create(to, config, {}));
  for (size_t i = 0; i < shard.samples().size(); ++i) {
    const SampleEntry& entry = shard.samples()[i];
    STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard.ReadRecord(static_cast<int64_t>(i)));
    std::vector<std::vector<uint16_t>> states;
    for (size_t b = 0; b < config.boundaries.size(); ++b) {
      auto& rows = states.emplace_back(static_cast<size_t>(entry.rows * config.hidden));
      STATETAP_RETURN_IF_ERROR(shard.ReadStates(static_cast<int>(b), entry.first_row, rows));
      const int boundary = config.boundaries[b];
      const auto zero = options.find("zero");
      if (zero != options.end() && zero->second == std::to_string(boundary))
        std::ranges::fill(rows, uint16_t{0});
      for (uint16_t& word : rows) word = FloatToBf16(Bf16ToFloat(word) * factor);
      if (boundary == config.layers && !norm.empty()) Norm(rows, norm, config.rms_norm_eps);
    }
    STATETAP_RETURN_IF_ERROR(writer->Append(
        record, std::vector<std::span<const uint16_t>>(states.begin(), states.end())));
  }
  return writer->Commit().status();
}

absl::Status Run(const fs::path& from, const fs::path& to, const Options& options) {
  std::vector<float> norm;
  if (const auto model = options.find("normed"); model != options.end()) {
    STATETAP_ASSIGN_OR_RETURN(norm, NormWeight(model->second));
  }
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(from))
    if (entry.path().extension() == ".h5") paths.push_back(entry.path());
  std::ranges::sort(paths);
  fs::create_directories(to);
  for (size_t i = 0; i < paths.size(); ++i) {
    float factor = 1;
    if (const auto scaled = options.find("scaled"); scaled != options.end()) {
      const size_t colon = scaled->second.find(':');
      if (std::stoul(scaled->second.substr(0, colon)) == i)
        factor = std::stof(scaled->second.substr(colon + 1));
    }
    STATETAP_ASSIGN_OR_RETURN(const auto shard, ShardReader::Open(paths[i]));
    STATETAP_RETURN_IF_ERROR(Alter(*shard, to / paths[i].filename(), options, norm, factor));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace statetap

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fputs("usage: alter_shards FROM TO [zero=BOUNDARY] [normed=MODEL] [scaled=SHARD:FACTOR]\n",
               stderr);
    return 2;
  }
  statetap::Options options;
  for (int i = 3; i < argc; ++i) {
    const std::string word = argv[i];
    options[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  }
  const absl::Status status = statetap::Run(argv[1], argv[2], options);
  if (!status.ok()) std::fprintf(stderr, "alter_shards: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
