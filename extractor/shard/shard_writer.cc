#include "extractor/shard/shard_writer.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "extractor/base/digest.h"
#include "extractor/base/file.h"
#include "extractor/base/log.h"
#include "extractor/base/worker_pool.h"
#include "extractor/shard/footer.h"
#include "extractor/shard/format.h"
#include "extractor/shard/fp8.h"
#include "extractor/shard/sample_check.h"
#include "extractor/shard/shard_reader.h"
#include "extractor/shard/tables.h"

namespace statetap {
namespace {

// Below this more threads cost more than they save.
constexpr int64_t kBytesForThreads = int64_t{1} << 19;
constexpr int64_t kSomeSamples = 8;

// One that writes and, where the machine has cores to spare, one for each boundary of the usual
// four.
int NumThreads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 2, 5);
}

class Writer : public ShardWriter {
 public:
  Writer(File file, std::filesystem::path path, ShardConfig config, const Options& options)
      : file_(std::move(file)),
        path_(std::move(path)),
        config_(std::move(config)),
        options_(options),
        bulk_(BulkDatasetsOf(config_, options.rows_per_chunk)),
        statistics_(config_.boundaries.size(), BoundaryStatistics(config_.hidden)) {
    if (options.kept_statistics.size() == statistics_.size()) statistics_ = options.kept_statistics;
  }
  ~Writer() override {
    if (!committed_) Discard();
  }

  absl::Status Begin();
  absl::Status Append(const SampleRecord& sample,
                      std::span<const std::span<const uint16_t>> states) override;
  absl::StatusOr<ShardSummary> Commit() override;
  int64_t states_bytes() const override { return rows_ * StatesRowBytes(config_); }
  int64_t samples() const override { return static_cast<int64_t>(samples_.size()); }
  const std::vector<BoundaryStatistics>& statistics() const override { return statistics_; }

 private:
  absl::Status Store(const SampleRecord& sample, std::span<const std::span<const uint16_t>> states,
                     uint64_t* checksum);
  struct Encoded {
    std::vector<uint8_t> codes;
    std::vector<float> scales;
    std::vector<uint16_t> decoded;
    double squared_error = 0;
  };
  void Encode(std::span<const std::span<const uint16_t>> states);
  absl::Status Reserve(BulkDataset* dataset, int64_t rows);
  void Run(std::span<const std::function<void()>> tasks, int64_t bytes);
  absl::Status FinishHdf5();
  absl::Status WriteFooter();
  absl::StatusOr<ShardSummary> Reopen() const;
  std::vector<int64_t> SamplesToReadBack() const;
  absl::Status Publish() const;
  absl::StatusOr<ShardSummary> CommitSteps();
  absl::Status Fail(const absl::Status& status);
  void Discard();

  File file_;  // "<path>.partial"
  const std::filesystem::path path_;
  const ShardConfig config_;
  const Options options_;
  MemoryStorage storage_;  // what HDF5 writes, until Commit
  std::optional<Hdf5File> hdf5_;
  std::vector<BulkDataset> bulk_;  // as BulkDatasetsOf
  std::vector<SampleEntry> samples_;
  std::vector<BoundaryStatistics> statistics_;
  std::vector<Encoded> encoded_;  // of the sample at hand, by boundary; kept for its memory
  WorkerPool threads_{NumThreads()};
  int64_t rows_ = 0;
  absl::Status failed_;
  bool committed_ = false;
};

absl::Status Writer::Begin() {
  STATETAP_ASSIGN_OR_RETURN(hdf5_, Hdf5File::Create(&storage_));
  for (const std::string_view group : {kStatesGroup, kTokensGroup, kSamplesGroup, kStatsGroup})
    STATETAP_RETURN_IF_ERROR(hdf5_->MakeGroup(group));
  if (config_.dtype == StatesDtype::kFp8) STATETAP_RETURN_IF_ERROR(hdf5_->MakeGroup(kScalesGroup));
  for (const BulkDataset& dataset : bulk_)
    STATETAP_RETURN_IF_ERROR(hdf5_->CreateRows(dataset.path, dataset.shape));
  return absl::OkStatus();
}

absl::Status Writer::Append(const SampleRecord& sample,
                            std::span<const std::span<const uint16_t>> states) {
  STATETAP_RETURN_IF_ERROR(failed_);
  STATETAP_RETURN_IF_ERROR(
      WithContext(CheckSample(sample, config_, states), fmt::format("sample \"{}\"", sample.id)));
  const auto tokens = static_cast<int64_t>(sample.input_ids.size());
  SampleEntry entry{.id = sample.id,
                    .source = sample.source,
                    .meta_json = sample.meta_json,
                    .split = sample.split,
                    .digest = sample.digest,
                    .finish_reason = sample.finish_reason,
                    .first_row = rows_,
                    .rows = tokens,
                    .prompt_tokens = sample.prompt_tokens,
                    .truncated = sample.truncated,
                    .source_index = sample.source_index};
  const absl::Status written = Store(sample, states, &entry.checksum);
  if (!written.ok()) return Fail(written);
  rows_ += tokens;
  samples_.push_back(std::move(entry));
  return absl::OkStatus();
}

// To fp8, a boundary on each thread.
void Writer::Encode(std::span<const std::span<const uint16_t>> states) {
  encoded_.resize(states.size());
  const auto hidden = static_cast<size_t>(config_.hidden);
  const auto encode = [&](int64_t begin, int64_t end, int) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      Encoded& to = encoded_[i];
      to.scales.clear();
      to.squared_error = 0;
      to.codes.resize(states[i].size());
      to.decoded.resize(states[i].size());
      for (size_t at = 0; at < states[i].size(); at += hidden) {
        const Fp8Row row =
            EncodeFp8Row(states[i].subspan(at, hidden), std::span(to.codes).subspan(at, hidden),
                         std::span(to.decoded).subspan(at, hidden));
        to.scales.push_back(row.scale);
        to.squared_error += row.squared_error;
      }
    }
  };
  threads_.ParallelFor(static_cast<int64_t>(states.size()), encode);
}

// HDF5 is asked for space first, by this thread alone. What remains is independent: one write a
// dataset, statistics a boundary, the checksum.
absl::Status Writer::Store(const SampleRecord& sample,
                           std::span<const std::span<const uint16_t>> states, uint64_t* checksum) {
  const auto tokens = static_cast<int64_t>(sample.input_ids.size());
  const std::vector<float> none(sample.input_ids.size(), std::numeric_limits<float>::quiet_NaN());
  const auto filled = [&](const std::vector<float>& values) {
    return std::as_bytes(std::span(values.empty() ? none : values));
  };
  std::vector<std::span<const std::byte>> rows;  // as bulk_
  std::vector<std::span<const uint16_t>> readers_will_see(states.begin(), states.end());
  if (config_.dtype == StatesDtype::kFp8) {
    Encode(states);
    for (size_t i = 0; i < encoded_.size(); ++i) {
      rows.push_back(std::as_bytes(std::span(encoded_[i].codes)));
      readers_will_see[i] = encoded_[i].decoded;
    }
  } else {
    for (const auto& of_boundary : states) rows.push_back(std::as_bytes(of_boundary));
  }
  rows.push_back(std::as_bytes(std::span(sample.input_ids)));
  rows.push_back(std::as_bytes(std::span(sample.loss_mask)));
  rows.push_back(filled(sample.logprobs));
  rows.push_back(filled(sample.entropies));
  for (const Encoded& of_boundary : encoded_)
    rows.push_back(std::as_bytes(std::span(of_boundary.scales)));

  std::vector<absl::Status> statuses(rows.size());
  std::vector<std::function<void()>> tasks;
  for (size_t i = 0; i < rows.size(); ++i) {
    STATETAP_RETURN_IF_ERROR(Reserve(&bulk_[i], rows_ + tokens));
    tasks.emplace_back(
        [this, i, &rows, &statuses] { statuses[i] = WriteRows(file_, bulk_[i], rows_, rows[i]); });
  }
  const std::vector<TokenClass> classes =
      TokenClassesOf(sample.input_ids, sample.loss_mask, config_.first_special);
  if (options_.statistics == Statistics::kCompute) {
    for (size_t i = 0; i < states.size(); ++i)
      tasks.emplace_back([this, i, &states, &classes] {
        statistics_[i].Add(states[i], classes,
                           i == 0 ? std::span<const uint16_t>() : states[i - 1]);
      });
  }
  tasks.emplace_back([&] { *checksum = SampleChecksum(sample, readers_will_see); });
  Run(tasks, tokens * 2 * config_.hidden * static_cast<int64_t>(states.size()));
  for (const absl::Status& status : statuses) STATETAP_RETURN_IF_ERROR(status);
  for (size_t i = 0; i < encoded_.size(); ++i)
    statistics_[i].squared_error +=
        options_.from_fp8 ? std::numeric_limits<double>::quiet_NaN() : encoded_[i].squared_error;
  return absl::OkStatus();
}

// Space for the rows up to `rows`. HDF5 hears of it only where a chunk begins.
absl::Status Writer::Reserve(BulkDataset* dataset, int64_t rows) {
  dataset->shape.rows = rows;
  const auto chunks = static_cast<int64_t>(dataset->chunk_offsets.size());
  if (rows <= chunks * dataset->shape.rows_per_chunk) return absl::OkStatus();
  return hdf5_->ExtendRows(dataset->path, rows, &dataset->chunk_offsets);
}

// One thread takes tasks from the front, where the writes are, the others from the back: two writes
// into one file would wait for each other.
void Writer::Run(std::span<const std::function<void()>> tasks, int64_t bytes) {
  if (bytes < kBytesForThreads) {
    for (const auto& task : tasks) task();
    return;
  }
  std::mutex mutex;
  size_t front = 0, back = tasks.size();
  const auto work = [&](bool from_front) {
    for (;;) {
      size_t next;
      {
        const std::lock_guard lock(mutex);
        if (front == back) return;
        next = from_front ? front++ : --back;
      }
      tasks[next]();
    }
  };
  threads_.ParallelFor(threads_.num_threads(), [&](int64_t begin, int64_t end, int) {
    for (int64_t side = begin; side < end; ++side) work(side == 0);
  });
}

absl::StatusOr<ShardSummary> Writer::Commit() {
  STATETAP_RETURN_IF_ERROR(failed_);
  absl::StatusOr<ShardSummary> summary = CommitSteps();
  if (!summary.ok()) return Fail(summary.status());
  committed_ = true;
  failed_ = absl::FailedPreconditionError(fmt::format("{} is committed", path_.string()));
  summary->path = path_;
  return summary;
}

absl::StatusOr<ShardSummary> Writer::CommitSteps() {
  if (samples_.empty()) {
    return absl::FailedPreconditionError(
        fmt::format("{}: a shard without samples is not written", path_.string()));
  }
  STATETAP_RETURN_IF_ERROR(FinishHdf5());
  STATETAP_RETURN_IF_ERROR(storage_.CopyTo(file_));
  STATETAP_RETURN_IF_ERROR(WriteFooter());
  STATETAP_RETURN_IF_ERROR(file_.Sync());
  STATETAP_ASSIGN_OR_RETURN(ShardSummary summary, Reopen());
  STATETAP_RETURN_IF_ERROR(Publish());
  return summary;
}

absl::Status Writer::FinishHdf5() {
  for (BulkDataset& dataset : bulk_) {
    STATETAP_RETURN_IF_ERROR(
        hdf5_->ExtendRows(dataset.path, dataset.shape.rows, &dataset.chunk_offsets));
  }
  STATETAP_RETURN_IF_ERROR(WriteSampleTable(&*hdf5_, samples_));
  for (size_t i = 0; i < statistics_.size(); ++i)
    STATETAP_RETURN_IF_ERROR(
        WriteStatistics(&*hdf5_, config_.boundaries[i], config_.dtype, statistics_[i]));
  STATETAP_RETURN_IF_ERROR(WriteConfig(&*hdf5_, config_));
  return hdf5_->Close();
}

absl::Status Writer::WriteFooter() {
  ShardFooter footer{.hdf5_bytes = storage_.Size(), .datasets = bulk_};
  // Space that the last chunks have beyond their rows reads as zero once the file is long enough.
  if (ftruncate(file_.descriptor(), footer.hdf5_bytes) != 0)
    return ErrnoStatus(errno, "cannot extend", file_.path());
  STATETAP_ASSIGN_OR_RETURN(footer.structure_digest, StructureDigest(file_, footer));
  const std::string bytes = EncodeFooter(footer);
  return file_.WriteAt(footer.hdf5_bytes, std::as_bytes(std::span(bytes)));
}

absl::StatusOr<ShardSummary> Writer::Reopen() const {
  STATETAP_ASSIGN_OR_RETURN(const auto reader, ShardReader::Open(file_.path()));
  FileStorage storage(file_, storage_.Size());
  STATETAP_ASSIGN_OR_RETURN(const Hdf5File hdf5, Hdf5File::OpenForRead(&storage));
  for (const BulkDataset& dataset : bulk_) {
    STATETAP_ASSIGN_OR_RETURN(const auto offsets, hdf5.ChunkOffsets(dataset.path));
    if (offsets != dataset.chunk_offsets) {
      return absl::DataLossError(fmt::format("{}: HDF5 places the chunks of {} elsewhere now",
                                             file_.path().string(), dataset.path));
    }
  }
  for (const int64_t sample : SamplesToReadBack()) {
    STATETAP_ASSIGN_OR_RETURN(const bool sound, reader->VerifySample(sample));
    if (!sound) {
      return absl::DataLossError(fmt::format("{}: sample \"{}\" reads back with another checksum",
                                             file_.path().string(),
                                             samples_[static_cast<size_t>(sample)].id));
    }
  }
  STATETAP_ASSIGN_OR_RETURN(const int64_t bytes, file_.Size());
  return ShardSummary{
      .samples = samples(), .rows = rows_, .bytes = bytes, .digest = reader->digest()};
}

std::vector<int64_t> Writer::SamplesToReadBack() const {
  std::vector<int64_t> chosen;
  if (options_.read_back == ReadBack::kAll) {
    for (int64_t sample = 0; sample < samples(); ++sample) chosen.push_back(sample);
    return chosen;
  }
  const int64_t step = std::max<int64_t>(1, samples() / kSomeSamples);
  int64_t rows = 0;
  for (int64_t sample = samples() - 1; sample >= 0; sample -= step) {  // the last one always
    rows += samples_[static_cast<size_t>(sample)].rows;
    if (!chosen.empty() && rows > rows_ / 50) break;
    chosen.push_back(sample);
  }
  return chosen;
}

absl::Status Writer::Publish() const {
  if (std::filesystem::exists(path_))
    return absl::AlreadyExistsError(fmt::format("{} is there already", path_.string()));
  if (std::rename(file_.path().c_str(), path_.c_str()) != 0)
    return ErrnoStatus(errno, "cannot rename to", path_);
  absl::Status synced = SyncFolder(path_.parent_path().empty() ? "." : path_.parent_path());
  if (!synced.ok()) std::remove(path_.c_str());  // reported as failed, so it must not be there
  return synced;
}

absl::Status Writer::Fail(const absl::Status& status) {
  failed_ = status;
  Discard();
  return status;
}

// Gives the space back at once, although the descriptor stays open.
void Writer::Discard() {
  std::error_code ignored;
  if (ftruncate(file_.descriptor(), 0) != 0)
    LogWarning("cannot empty {}, which is given up", file_.path().string());
  std::filesystem::remove(file_.path(), ignored);
}

}  // namespace

int64_t ExpectedShardBytes(const ShardConfig& config, int64_t rows, int64_t samples,
                           int64_t shard_bytes) {
  constexpr int64_t kTextOfSample = 256 + 64;  // and its columns of numbers
  const int64_t statistics = static_cast<int64_t>(config.boundaries.size()) *
                             (5 * 8 * config.hidden + 8 * kRmsBins * (1 + kTokenClasses));
  const int64_t states = rows * StatesRowBytes(config);
  const int64_t shards = std::max<int64_t>(1, (states + shard_bytes - 1) / shard_bytes);
  const int64_t rows_of_shard = (rows + shards - 1) / shards;
  int64_t bytes = statistics;
  for (const BulkDataset& dataset : BulkDatasetsOf(config, 0)) {
    const int64_t chunks =
        (rows_of_shard + dataset.shape.rows_per_chunk - 1) / dataset.shape.rows_per_chunk;
    bytes += chunks * dataset.shape.chunk_bytes();
  }
  return shards * bytes + samples * kTextOfSample;
}

absl::StatusOr<std::unique_ptr<ShardWriter>> ShardWriter::Create(const std::filesystem::path& path,
                                                                 const ShardConfig& config,
                                                                 const Options& options) {
  if (path.extension() != kShardEnding) {
    return absl::InvalidArgumentError(
        fmt::format("{} does not end in {}", path.string(), kShardEnding));
  }
  STATETAP_RETURN_IF_ERROR(CheckConfig(config));
  if (options.rows_per_chunk < 0)
    return absl::InvalidArgumentError(fmt::format("rows_per_chunk is {}", options.rows_per_chunk));
  std::error_code error;
  if (std::filesystem::exists(path, error))
    return absl::AlreadyExistsError(fmt::format("{} is there already", path.string()));
  std::filesystem::path partial = path;
  partial += kPartialEnding;
  STATETAP_ASSIGN_OR_RETURN(File file, File::Create(partial));
  auto writer = std::make_unique<Writer>(std::move(file), path, config, options);
  STATETAP_RETURN_IF_ERROR(writer->Begin());
  return writer;
}

}  // namespace statetap
