#include "extractor/shard/shard_reader.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>

#include "extractor/base/digest.h"
#include "extractor/base/file.h"
#include "extractor/base/mapped_file.h"
#include "extractor/shard/footer.h"
#include "extractor/shard/format.h"
#include "extractor/shard/fp8.h"
#include "extractor/shard/tables.h"

namespace statetap {
namespace {

constexpr size_t kTokenColumns = 4;
constexpr int64_t kVerifyBytes = int64_t{4} << 20;

class Reader : public ShardReader {
 public:
  Reader(File file, ShardFooter footer) : file_(std::move(file)), footer_(std::move(footer)) {}

  absl::Status Load();

  const std::filesystem::path& path() const override { return file_.path(); }
  const ShardConfig& config() const override { return config_; }
  const std::vector<SampleEntry>& samples() const override { return samples_; }
  int64_t rows() const override { return footer_.datasets.front().shape.rows; }
  std::string digest() const override;
  absl::StatusOr<SampleRecord> ReadRecord(int64_t sample) const override;
  absl::Status ReadStates(int boundary_index, int64_t first_row,
                          std::span<uint16_t> to) const override;
  absl::StatusOr<StatesView> ViewStates(int boundary_index, int64_t first_row,
                                        int64_t rows) const override;
  absl::Status CheckViews() const override;
  absl::StatusOr<std::vector<BoundaryStatistics>> ReadStatistics() const override;
  absl::StatusOr<std::vector<int64_t>> Verify() const override;
  absl::StatusOr<bool> VerifySample(int64_t sample) const override;

 private:
  absl::Status CheckDatasets(const Hdf5File& hdf5) const;
  absl::Status CheckBoundary(int boundary_index) const;
  absl::StatusOr<std::shared_ptr<const MappedFile>> Mapping() const;  // made when first asked for
  absl::StatusOr<const SampleEntry*> EntryOf(int64_t sample) const;
  // Datasets behind those of the states: 0 ids, 1 mask, 2 logprobs, 3 entropies.
  template <typename T>
  absl::Status ReadTokens(int column, const SampleEntry& entry, std::vector<T>* to) const;
  absl::Status Named(const absl::Status& status) const {
    return WithContext(status, file_.path().string());
  }

  File file_;
  ShardFooter footer_;
  ShardConfig config_;
  std::vector<SampleEntry> samples_;
  mutable std::mutex mapping_mutex_;
  mutable std::shared_ptr<const MappedFile> mapping_;
};

absl::Status Reader::Load() {
  FileStorage storage(file_, footer_.hdf5_bytes);
  STATETAP_ASSIGN_OR_RETURN(Hdf5File hdf5, Hdf5File::OpenForRead(&storage));
  STATETAP_ASSIGN_OR_RETURN(config_, ReadConfig(hdf5));
  STATETAP_RETURN_IF_ERROR(CheckDatasets(hdf5));
  int64_t structure_bytes = footer_.hdf5_bytes;
  for (const BulkDataset& dataset : footer_.datasets)
    structure_bytes -=
        dataset.shape.chunk_bytes() * static_cast<int64_t>(dataset.chunk_offsets.size());
  STATETAP_ASSIGN_OR_RETURN(samples_, ReadSampleTable(hdf5, rows(), structure_bytes));
  return hdf5.Close();
}

// The chunk table and HDF5 must speak of the same datasets.
absl::Status Reader::CheckDatasets(const Hdf5File& hdf5) const {
  const std::vector<BulkDataset> expected = BulkDatasetsOf(config_, 0);
  if (footer_.datasets.size() != expected.size()) {
    return absl::DataLossError(fmt::format("{} datasets in the chunk table, {} in the attributes",
                                           footer_.datasets.size(), expected.size()));
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const BulkDataset& found = footer_.datasets[i];
    STATETAP_ASSIGN_OR_RETURN(const Hdf5RowsShape shape, hdf5.RowsShape(expected[i].path));
    const bool fits = found.path == expected[i].path && found.shape == shape &&
                      shape.type == expected[i].shape.type &&
                      shape.width == expected[i].shape.width && shape.rows == rows();
    if (!fits) {
      return absl::DataLossError(
          fmt::format("{}: type, shape or rows differ between attributes, dataset and chunk table",
                      expected[i].path));
    }
  }
  return absl::OkStatus();
}

std::string Reader::digest() const {
  std::vector<uint64_t> checksums;
  checksums.reserve(samples_.size());
  for (const SampleEntry& sample : samples_) checksums.push_back(sample.checksum);
  return HexOf(Xxh3Of(std::as_bytes(std::span(checksums))));
}

absl::StatusOr<const SampleEntry*> Reader::EntryOf(int64_t sample) const {
  if (sample >= 0 && sample < static_cast<int64_t>(samples_.size()))
    return &samples_[static_cast<size_t>(sample)];
  return absl::OutOfRangeError(fmt::format("{} has {} samples; number {} was asked for",
                                           file_.path().string(), samples_.size(), sample));
}

template <typename T>
absl::Status Reader::ReadTokens(int column, const SampleEntry& entry, std::vector<T>* to) const {
  to->resize(static_cast<size_t>(entry.rows));
  const size_t index = NumStatesDatasets(config_) + static_cast<size_t>(column);
  return Named(ReadRows(file_, footer_.datasets[index], entry.first_row,
                        std::as_writable_bytes(std::span(*to))));
}

absl::StatusOr<SampleRecord> Reader::ReadRecord(int64_t sample) const {
  STATETAP_ASSIGN_OR_RETURN(const SampleEntry* entry, EntryOf(sample));
  SampleRecord record{.id = entry->id,
                      .source = entry->source,
                      .meta_json = entry->meta_json,
                      .split = entry->split,
                      .digest = entry->digest,
                      .prompt_tokens = entry->prompt_tokens,
                      .finish_reason = entry->finish_reason,
                      .truncated = entry->truncated,
                      .source_index = entry->source_index};
  STATETAP_RETURN_IF_ERROR(ReadTokens(0, *entry, &record.input_ids));
  STATETAP_RETURN_IF_ERROR(ReadTokens(1, *entry, &record.loss_mask));
  STATETAP_RETURN_IF_ERROR(ReadTokens(2, *entry, &record.logprobs));
  STATETAP_RETURN_IF_ERROR(ReadTokens(3, *entry, &record.entropies));
  return record;
}

absl::Status Reader::CheckBoundary(int boundary_index) const {
  if (boundary_index < 0 || boundary_index >= static_cast<int>(config_.boundaries.size())) {
    return absl::OutOfRangeError(fmt::format("{} has {} boundaries; index {} was asked for",
                                             file_.path().string(), config_.boundaries.size(),
                                             boundary_index));
  }
  if (config_.dtype == StatesDtype::kNone) {
    return absl::FailedPreconditionError(
        fmt::format("{}: the states were evicted; capture them again with `statetap submit --from`",
                    file_.path().string()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const MappedFile>> Reader::Mapping() const {
  const std::lock_guard lock(mapping_mutex_);
  if (mapping_ == nullptr) {
    STATETAP_ASSIGN_OR_RETURN(mapping_, MappedFile::Map(file_));
  }
  return mapping_;
}

absl::StatusOr<StatesView> Reader::ViewStates(int boundary_index, int64_t first_row,
                                              int64_t rows) const {
  STATETAP_RETURN_IF_ERROR(CheckBoundary(boundary_index));
  if (config_.dtype == StatesDtype::kBf16) {
    STATETAP_ASSIGN_OR_RETURN(auto mapping, Mapping());
    auto parts = ViewRows(mapping->bytes(), footer_.datasets[static_cast<size_t>(boundary_index)],
                          first_row, rows);
    if (!parts.ok()) return Named(parts.status());
    return StatesView{*std::move(parts), std::move(mapping)};
  }
  const auto decoded =
      std::make_shared<std::vector<uint16_t>>(static_cast<size_t>(rows * config_.hidden));
  STATETAP_RETURN_IF_ERROR(ReadStates(boundary_index, first_row, *decoded));
  return StatesView{{std::as_bytes(std::span(*decoded))}, decoded};
}

absl::Status Reader::CheckViews() const {
  const std::lock_guard lock(mapping_mutex_);
  if (mapping_ == nullptr || !mapping_->damaged()) return absl::OkStatus();
  return absl::DataLossError(fmt::format(
      "{} was cut or cannot be read any more, while it was being sent", file_.path().string()));
}

absl::Status Reader::ReadStates(int boundary_index, int64_t first_row,
                                std::span<uint16_t> to) const {
  STATETAP_RETURN_IF_ERROR(CheckBoundary(boundary_index));
  const auto index = static_cast<size_t>(boundary_index);
  if (config_.dtype == StatesDtype::kBf16)
    return Named(ReadRows(file_, footer_.datasets[index], first_row, std::as_writable_bytes(to)));
  const auto hidden = static_cast<size_t>(config_.hidden);
  std::vector<uint8_t> codes(to.size());
  std::vector<float> scales(to.size() / hidden);
  STATETAP_RETURN_IF_ERROR(Named(ReadRows(file_, footer_.datasets[index], first_row,
                                          std::as_writable_bytes(std::span(codes)))));
  STATETAP_RETURN_IF_ERROR(
      Named(ReadRows(file_, footer_.datasets[index + config_.boundaries.size() + kTokenColumns],
                     first_row, std::as_writable_bytes(std::span(scales)))));
  for (size_t row = 0; row < scales.size(); ++row) {
    DecodeFp8Row(std::span(codes).subspan(row * hidden, hidden), scales[row],
                 to.subspan(row * hidden, hidden));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<BoundaryStatistics>> Reader::ReadStatistics() const {
  FileStorage storage(file_, footer_.hdf5_bytes);
  const auto read = [&]() -> absl::StatusOr<std::vector<BoundaryStatistics>> {
    STATETAP_ASSIGN_OR_RETURN(const Hdf5File hdf5, Hdf5File::OpenForRead(&storage));
    std::vector<BoundaryStatistics> statistics;
    for (const int boundary : config_.boundaries) {
      STATETAP_ASSIGN_OR_RETURN(BoundaryStatistics of_boundary,
                                ReadStatisticsOf(hdf5, boundary, config_));
      statistics.push_back(std::move(of_boundary));
    }
    return statistics;
  };
  auto statistics = read();
  if (!statistics.ok()) return Named(statistics.status());
  return statistics;
}

// In pieces, so that decoding a sample of many gigabytes needs 4 MiB. Over the mapping: what is
// sent next is in memory then. What cannot be read there reads as zeros and does not match.
absl::StatusOr<bool> Reader::VerifySample(int64_t sample) const {
  STATETAP_ASSIGN_OR_RETURN(const SampleEntry* entry, EntryOf(sample));
  STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, ReadRecord(sample));
  Xxh3 digest;
  digest.Update(std::as_bytes(std::span(record.input_ids)));
  digest.Update(std::as_bytes(std::span(record.loss_mask)));
  digest.Update(std::as_bytes(std::span(record.logprobs)));
  digest.Update(std::as_bytes(std::span(record.entropies)));
  const int64_t piece_rows = std::max<int64_t>(1, kVerifyBytes / (2 * config_.hidden));
  for (int boundary = 0; boundary < static_cast<int>(NumStatesDatasets(config_)); ++boundary) {
    for (int64_t row = 0; row < entry->rows; row += piece_rows) {
      const int64_t rows = std::min(piece_rows, entry->rows - row);
      STATETAP_ASSIGN_OR_RETURN(const StatesView view,
                                ViewStates(boundary, entry->first_row + row, rows));
      for (const auto& part : view.parts) digest.Update(part);
    }
  }
  return digest.Digest() == entry->checksum;
}

absl::StatusOr<std::vector<int64_t>> Reader::Verify() const {
  std::vector<int64_t> damaged;
  for (int64_t sample = 0; sample < static_cast<int64_t>(samples_.size()); ++sample) {
    STATETAP_ASSIGN_OR_RETURN(const bool sound, VerifySample(sample));
    if (!sound) damaged.push_back(sample);
  }
  return damaged;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardReader>> ShardReader::Open(const std::filesystem::path& path) {
  STATETAP_ASSIGN_OR_RETURN(File file, File::OpenForRead(path));
  STATETAP_ASSIGN_OR_RETURN(ShardFooter footer, ReadFooter(file));
  STATETAP_ASSIGN_OR_RETURN(const uint64_t structure, StructureDigest(file, footer));
  if (structure != footer.structure_digest) {
    return absl::DataLossError(
        fmt::format("{} is damaged: the digest of its structure (all but the rows) is {}, not {}",
                    path.string(), HexOf(structure), HexOf(footer.structure_digest)));
  }
  if (footer.datasets.empty())
    return absl::DataLossError(fmt::format("{} has an empty chunk table", path.string()));
  auto reader = std::make_unique<Reader>(std::move(file), std::move(footer));
  STATETAP_RETURN_IF_ERROR(WithContext(reader->Load(), path.string()));
  return reader;
}

uint64_t SampleChecksum(const SampleRecord& sample,
                        std::span<const std::span<const uint16_t>> states) {
  const std::vector<float> none(sample.input_ids.size(), std::numeric_limits<float>::quiet_NaN());
  const auto filled = [&](const std::vector<float>& values) {
    return std::as_bytes(std::span(values.empty() ? none : values));
  };
  Xxh3 digest;
  digest.Update(std::as_bytes(std::span(sample.input_ids)));
  digest.Update(std::as_bytes(std::span(sample.loss_mask)));
  digest.Update(filled(sample.logprobs));
  digest.Update(filled(sample.entropies));
  for (const auto& rows : states) digest.Update(std::as_bytes(rows));
  return digest.Digest();
}

absl::StatusOr<std::vector<SampleRecord>> ShardReader::ReadRecords() const {
  std::vector<SampleRecord> records;
  for (int64_t sample = 0; sample < std::ssize(samples()); ++sample) {
    STATETAP_ASSIGN_OR_RETURN(records.emplace_back(), ReadRecord(sample));
  }
  return records;
}

}  // namespace statetap
