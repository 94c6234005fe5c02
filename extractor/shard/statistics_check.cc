#include "extractor/shard/statistics_check.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

namespace statetap {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;

// Sums of the same rows in other groups: docs/shard-format.md promises 1e-9 of a channel's rms.
constexpr double kRounding = 1e-8;

class Comparison {
 public:
  Comparison(const ShardReader& shard, int boundary) : shard_(shard), boundary_(boundary) {}

  void Same(std::string_view figure, double stored, double made, double tolerance = 0) {
    if (!status_.ok() || !Differ(stored, made, tolerance)) return;
    status_ = absl::DataLossError(
        fmt::format("{}: {} of boundary {} is {} in its statistics, {} of its states",
                    shard_.path().string(), figure, boundary_, stored, made));
  }
  // `scale` gives what a difference of channel c is small against.
  template <typename Scale>
  void SameChannels(std::string_view figure, std::span<const double> stored,
                    std::span<const double> made, Scale scale) {
    for (size_t c = 0; c < stored.size(); ++c) {
      if (Differ(stored[c], made[c], kRounding * scale(c)))
        return Same(fmt::format("{} of channel {}", figure, c), stored[c], made[c]);
    }
  }
  const absl::Status& status() const { return status_; }

 private:
  static bool Differ(double stored, double made, double tolerance) {
    return stored != made && !(std::abs(stored - made) <= tolerance);  // infinities, NaN
  }

  const ShardReader& shard_;
  const int boundary_;
  absl::Status status_;
};

void CompareRows(const BoundaryStatistics& stored, const BoundaryStatistics& made,
                 Comparison& comparison) {
  comparison.Same("count", static_cast<double>(stored.count), static_cast<double>(made.count));
  comparison.Same("nonfinite", static_cast<double>(stored.nonfinite),
                  static_cast<double>(made.nonfinite));
}

void CompareValues(const BoundaryStatistics& stored, const BoundaryStatistics& made,
                   Comparison& comparison) {
  const auto count = static_cast<double>(std::max<int64_t>(1, made.count));
  const auto squares = [&](size_t c) { return made.m2[c] + count * made.mean[c] * made.mean[c]; };
  const auto exact = [](size_t) { return 0.0; };
  comparison.Same("zero_rows", static_cast<double>(stored.zero_rows),
                  static_cast<double>(made.zero_rows));
  comparison.SameChannels("mean", stored.mean, made.mean,
                          [&](size_t c) { return std::sqrt(squares(c) / count); });
  comparison.SameChannels("m2", stored.m2, made.m2, squares);
  comparison.SameChannels("min", stored.min, made.min, exact);
  comparison.SameChannels("max", stored.max, made.max, exact);
  comparison.SameChannels("abs_max", stored.abs_max, made.abs_max, exact);
  for (int bin = 0; bin < kRmsBins; ++bin)
    comparison.Same(fmt::format("row_rms_histogram bin {}", bin),
                    static_cast<double>(stored.row_rms_histogram[bin]),
                    static_cast<double>(made.row_rms_histogram[bin]));
}

void CompareClasses(const BoundaryStatistics& stored, const BoundaryStatistics& made,
                    Comparison& comparison) {
  if (stored.AllClasses().count == 0) return;
  for (size_t i = 0; i < kTokenClasses; ++i) {
    const ClassStatistics &was = stored.by_class[i], &is = made.by_class[i];
    const std::string_view name = NameOf(static_cast<TokenClass>(i));
    const auto compared = static_cast<double>(is.compared);
    comparison.Same(fmt::format("count of class {}", name), static_cast<double>(was.count),
                    static_cast<double>(is.count));
    comparison.Same(fmt::format("compared rows of class {}", name),
                    static_cast<double>(was.compared), compared);
    comparison.Same(fmt::format("cosine of class {}", name), was.cosine, is.cosine,
                    kRounding * compared);
  }
}

}  // namespace

absl::Status AddStoredStates(const ShardReader& shard, int64_t sample, const SampleRecord& record,
                             std::span<BoundaryStatistics> statistics) {
  const SampleEntry& entry = shard.samples()[static_cast<size_t>(sample)];
  const int64_t hidden = shard.config().hidden;
  const int64_t piece_rows = std::max<int64_t>(1, kPieceBytes / (2 * hidden));
  const std::vector<TokenClass> classes =
      TokenClassesOf(record.input_ids, record.loss_mask, shard.config().first_special);
  std::vector<uint16_t> states, before;
  for (int64_t row = 0; row < entry.rows; row += piece_rows) {
    const int64_t rows = std::min(piece_rows, entry.rows - row);
    const auto of_piece =
        std::span(classes).subspan(classes.empty() ? 0 : static_cast<size_t>(row),
                                   classes.empty() ? 0 : static_cast<size_t>(rows));
    before.clear();
    for (size_t b = 0; b < statistics.size(); ++b) {
      states.resize(static_cast<size_t>(rows * hidden));
      STATETAP_RETURN_IF_ERROR(
          shard.ReadStates(static_cast<int>(b), entry.first_row + row, states));
      statistics[b].Add(states, of_piece, before);
      std::swap(states, before);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckStatistics(const ShardReader& shard) {
  const ShardConfig& config = shard.config();
  if (config.dtype == StatesDtype::kNone) return absl::OkStatus();
  STATETAP_ASSIGN_OR_RETURN(const std::vector<BoundaryStatistics> stored, shard.ReadStatistics());
  if (stored.front().count + stored.front().nonfinite == 0) return absl::OkStatus();
  std::vector<BoundaryStatistics> made(stored.size(), BoundaryStatistics(config.hidden));
  for (size_t i = 0; i < shard.samples().size(); ++i) {
    const auto sample = static_cast<int64_t>(i);
    STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard.ReadRecord(sample));
    STATETAP_RETURN_IF_ERROR(AddStoredStates(shard, sample, record, made));
  }
  for (size_t b = 0; b < made.size(); ++b) {
    Comparison comparison(shard, config.boundaries[b]);
    CompareRows(stored[b], made[b], comparison);
    if (config.dtype == StatesDtype::kBf16) {
      CompareValues(stored[b], made[b], comparison);
      CompareClasses(stored[b], made[b], comparison);
    }
    STATETAP_RETURN_IF_ERROR(comparison.status());
  }
  return absl::OkStatus();
}

}  // namespace statetap
