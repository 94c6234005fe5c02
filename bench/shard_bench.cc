// What shards cost beside plain files of the same bytes: samples of 2,048 tokens at Kimi-K2.5's
// four boundaries (117 MB each), eight of them (0.94 GB), each side synced, the two alternating,
// the median of five.
//   write             the writer with its digests, against pwrite of the same bytes into one file
//   write-statistics  with statistics too
//   write-fp8         states as e4m3 (half the bytes; no baseline of its own)
//   write-four        four shards at once with statistics, a thread each, as a job does whose
//                     samples come faster than one takes them; against four one after another
//   read              every sample's states from the shard, against one safetensors file a sample
//                     whose tensors are read by their offsets (in C++, without Python's part)
// Reads come from the page cache on both sides: the disk is not what is measured there.
//
//   shard_bench [--work FOLDER] [--samples N] [--tokens N] [--rounds N] [--cases write,…]
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "bench/case_options.h"
#include "bench/compare.h"
#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/shard/shard_reader.h"

namespace statetap::bench {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

class ShardBench {
 public:
  ShardBench(const CaseOptions& options, fs::path folder)
      : options_(options), folder_(std::move(folder)) {
    config_.hidden = 7168;
    config_.layers = 61;
    config_.boundaries = {2, 30, 58, 61};
    std::mt19937 random(1);
    const auto tokens = static_cast<size_t>(options.tokens);
    states_.resize(config_.boundaries.size());
    for (auto& rows : states_) {
      rows.resize(tokens * static_cast<size_t>(config_.hidden));
      for (uint16_t& value : rows) value = static_cast<uint16_t>((random() & 0x83ff) | 0x3c00);
    }
    record_.input_ids.assign(tokens, 7);
    record_.loss_mask.assign(tokens, 1);
    record_.logprobs.assign(tokens, -1.0f);
    record_.entropies.assign(tokens, 1.0f);
    record_.finish_reason = "stop";
  }

  absl::Status Run() {
    using Statistics = ShardWriter::Statistics;
    const auto write = [&](Statistics statistics, StatesDtype dtype) {
      return [this, statistics, dtype] { return WriteShard("bench.h5", statistics, dtype); };
    };
    const auto plain = [this] { return WritePlain(); };
    STATETAP_RETURN_IF_ERROR(
        Case("write", write(Statistics::kLeaveOut, StatesDtype::kBf16), "pwrite", plain));
    STATETAP_RETURN_IF_ERROR(
        Case("write-statistics", write(Statistics::kCompute, StatesDtype::kBf16), "pwrite", plain));
    STATETAP_RETURN_IF_ERROR(
        Case("write-fp8", write(Statistics::kCompute, StatesDtype::kFp8), "", nullptr));
    const auto four = [this](std::launch launch) {
      return [this, launch] { return WriteShards(4, launch); };
    };
    STATETAP_RETURN_IF_ERROR(Case("write-four", four(std::launch::async), "one after another",
                                  four(std::launch::deferred)));
    if (!HasCase(options_.cases, "read")) return absl::OkStatus();
    STATETAP_RETURN_IF_ERROR(
        WriteShard("read.h5", Statistics::kLeaveOut, StatesDtype::kBf16, Keep::kYes).status());
    for (int i = 0; i < options_.samples; ++i) STATETAP_RETURN_IF_ERROR(WriteSafetensors(i));
    return Case(
        "read", [this] { return ReadShard(); }, "safetensors",
        [this] { return ReadSafetensors(); });
  }

 private:
  enum class Keep { kYes, kNo };
  int64_t StatesBytes() const {
    return int64_t{options_.samples} * options_.tokens * 2 * config_.hidden *
           static_cast<int64_t>(config_.boundaries.size());
  }
  // GB/s of states, whatever they take as stored.
  double Rate(Clock::time_point since) const {
    return static_cast<double>(StatesBytes()) /
           std::chrono::duration<double>(Clock::now() - since).count() / 1e9;
  }

  absl::StatusOr<double> WriteShard(const std::string& name, ShardWriter::Statistics statistics,
                                    StatesDtype dtype, Keep keep = Keep::kNo) {
    ShardConfig config = config_;
    config.dtype = dtype;
    const auto begin = Clock::now();
    STATETAP_ASSIGN_OR_RETURN(
        const auto writer, ShardWriter::Create(folder_ / name, config, {.statistics = statistics}));
    const std::vector<std::span<const uint16_t>> states(states_.begin(), states_.end());
    SampleRecord record = record_;
    for (int i = 0; i < options_.samples; ++i) {
      record.id = std::to_string(i);
      STATETAP_RETURN_IF_ERROR(writer->Append(record, states));
    }
    STATETAP_RETURN_IF_ERROR(writer->Commit().status());
    const double rate = Rate(begin);
    if (keep == Keep::kNo) fs::remove(folder_ / name);
    return rate;
  }

  absl::StatusOr<double> WriteShards(int shards, std::launch launch) {
    const auto begin = Clock::now();
    std::vector<std::future<absl::StatusOr<double>>> writing;
    for (int i = 0; i < shards; ++i) {
      writing.push_back(std::async(launch, [this, i] {
        return WriteShard(fmt::format("bench-{}.h5", i), ShardWriter::Statistics::kCompute,
                          StatesDtype::kBf16);
      }));
    }
    absl::Status status;
    for (auto& shard : writing) status.Update(shard.get().status());
    STATETAP_RETURN_IF_ERROR(status);
    return shards * Rate(begin);
  }

  // The same bytes in the same order, 1 MiB a call as the shard's chunks are.
  absl::StatusOr<double> WritePlain() {
    const auto begin = Clock::now();
    STATETAP_ASSIGN_OR_RETURN(const File file, File::Create(folder_ / "plain"));
    int64_t at = 0;
    const auto put = [&](std::span<const std::byte> bytes) -> absl::Status {
      constexpr size_t kPiece = size_t{1} << 20;
      for (; !bytes.empty(); bytes = bytes.subspan(std::min(kPiece, bytes.size()))) {
        const auto piece = bytes.first(std::min(kPiece, bytes.size()));
        STATETAP_RETURN_IF_ERROR(file.WriteAt(at, piece));
        at += static_cast<int64_t>(piece.size());
      }
      return absl::OkStatus();
    };
    for (int i = 0; i < options_.samples; ++i) {
      for (const auto& rows : states_)
        STATETAP_RETURN_IF_ERROR(put(std::as_bytes(std::span(rows))));
      STATETAP_RETURN_IF_ERROR(put(std::as_bytes(std::span(record_.input_ids))));
      STATETAP_RETURN_IF_ERROR(put(std::as_bytes(std::span(record_.loss_mask))));
      STATETAP_RETURN_IF_ERROR(put(std::as_bytes(std::span(record_.logprobs))));
      STATETAP_RETURN_IF_ERROR(put(std::as_bytes(std::span(record_.entropies))));
    }
    STATETAP_RETURN_IF_ERROR(file.Sync());
    const double rate = Rate(begin);
    fs::remove(folder_ / "plain");
    return rate;
  }

  fs::path SafetensorsPath(int sample) const {
    return folder_ / fmt::format("hs_{}.safetensors", sample);
  }
  absl::Status WriteSafetensors(int sample) {
    Json header = Json::object();
    int64_t at = 0;
    for (size_t b = 0; b < states_.size(); ++b) {
      const auto bytes = static_cast<int64_t>(states_[b].size() * sizeof(uint16_t));
      header[std::to_string(config_.boundaries[b])] = {{"dtype", "BF16"},
                                                       {"shape", {options_.tokens, config_.hidden}},
                                                       {"data_offsets", {at, at + bytes}}};
      at += bytes;
    }
    const std::string text = DumpJson(header);
    const auto length = static_cast<uint64_t>(text.size());
    STATETAP_ASSIGN_OR_RETURN(const File file, File::Create(SafetensorsPath(sample)));
    STATETAP_RETURN_IF_ERROR(file.WriteAt(0, std::as_bytes(std::span(&length, 1))));
    STATETAP_RETURN_IF_ERROR(file.WriteAt(8, std::as_bytes(std::span(text))));
    auto begin = static_cast<int64_t>(8 + length);
    for (const auto& rows : states_) {
      STATETAP_RETURN_IF_ERROR(file.WriteAt(begin, std::as_bytes(std::span(rows))));
      begin += static_cast<int64_t>(rows.size() * sizeof(uint16_t));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<double> ReadSafetensors() {
    const auto begin = Clock::now();
    for (int i = 0; i < options_.samples; ++i) {
      STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForRead(SafetensorsPath(i)));
      uint64_t length = 0;
      STATETAP_RETURN_IF_ERROR(file.ReadAt(0, std::as_writable_bytes(std::span(&length, 1))));
      std::string text(length, '\0');
      STATETAP_RETURN_IF_ERROR(file.ReadAt(8, std::as_writable_bytes(std::span(text))));
      STATETAP_ASSIGN_OR_RETURN(const Json header, ParseJson(text));
      for (const auto& [name, tensor] : header.items()) {
        const auto offset = tensor["data_offsets"][0].get<int64_t>();
        STATETAP_RETURN_IF_ERROR(file.ReadAt(8 + static_cast<int64_t>(length) + offset,
                                             std::as_writable_bytes(std::span(buffer_))));
      }
    }
    return Rate(begin);
  }

  absl::StatusOr<double> ReadShard() {
    const auto begin = Clock::now();
    STATETAP_ASSIGN_OR_RETURN(const auto reader, ShardReader::Open(folder_ / "read.h5"));
    for (const SampleEntry& entry : reader->samples()) {
      for (int b = 0; b < static_cast<int>(states_.size()); ++b)
        STATETAP_RETURN_IF_ERROR(reader->ReadStates(b, entry.first_row, buffer_));
    }
    return Rate(begin);
  }

  absl::Status Case(const std::string& name, const Measure& ours, const std::string& baseline_name,
                    const Measure& baseline) {
    if (!HasCase(options_.cases, name)) return absl::OkStatus();
    buffer_.resize(states_[0].size());
    return Compare({.bench = "shard_bench",
                    .name = name,
                    .baseline = baseline_name,
                    .rounds = options_.rounds},
                   ours, baseline);
  }

  const CaseOptions options_;
  const fs::path folder_;
  ShardConfig config_;
  SampleRecord record_;
  std::vector<std::vector<uint16_t>> states_;
  std::vector<uint16_t> buffer_;
};

}  // namespace
}  // namespace statetap::bench

int main(int argc, char** argv) {
  statetap::bench::CaseOptions options{
      .cases = "write,write-statistics,write-fp8,write-four,read", .samples = 8, .tokens = 2048};
  for (int i = 1; i + 1 < argc; i += 2) options.Take(argv[i], argv[i + 1]);
  const absl::Status status =
      statetap::bench::RunInFolder<statetap::bench::ShardBench>("shard-bench", options);
  if (status.ok()) return 0;
  fmt::print(stderr, "shard_bench: {}\n", statetap::MessageOf(status));
  return 1;
}
