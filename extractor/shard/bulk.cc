#include "extractor/shard/bulk.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "extractor/shard/format.h"

namespace statetap {
namespace {

constexpr int64_t kWritebackBytes = int64_t{1} << 20;

struct Piece {
  int64_t offset, bytes;
};

// The longest run of rows from `row` on, at most `rows`, that lies in one piece in the file.
Piece PieceFrom(const BulkDataset& dataset, int64_t row, int64_t rows) {
  const int64_t row_bytes = dataset.shape.row_bytes(), per_chunk = dataset.shape.rows_per_chunk;
  auto chunk = static_cast<size_t>(row / per_chunk);
  const int64_t within = row % per_chunk;
  const int64_t offset = dataset.chunk_offsets[chunk] + within * row_bytes;
  int64_t run = per_chunk - within;
  while (run < rows && dataset.chunk_offsets[chunk + 1] ==
                           dataset.chunk_offsets[chunk] + dataset.shape.chunk_bytes()) {
    ++chunk;
    run += per_chunk;
  }
  return {.offset = offset, .bytes = std::min(run, rows) * row_bytes};
}

absl::Status ForEachPiece(const BulkDataset& dataset, int64_t first_row, int64_t rows,
                          const std::function<absl::Status(const Piece&)>& visit) {
  while (rows > 0) {
    const Piece piece = PieceFrom(dataset, first_row, rows);
    STATETAP_RETURN_IF_ERROR(visit(piece));
    first_row += piece.bytes / dataset.shape.row_bytes();
    rows -= piece.bytes / dataset.shape.row_bytes();
  }
  return absl::OkStatus();
}

absl::Status CheckRows(const BulkDataset& dataset, int64_t first_row, int64_t rows) {
  if (first_row >= 0 && rows >= 0 && rows <= dataset.shape.rows &&
      first_row <= dataset.shape.rows - rows)
    return absl::OkStatus();
  return absl::OutOfRangeError(fmt::format("{}: {} rows from row {} asked for; it has {} rows",
                                           dataset.path, rows, first_row, dataset.shape.rows));
}

int64_t AlignedRowsUnit(int64_t row_bytes) {
  return kChunkAlignment / std::gcd(kChunkAlignment, row_bytes);
}

}  // namespace

int64_t RowsPerChunk(int64_t row_bytes, int64_t about_bytes) {
  const int64_t unit = AlignedRowsUnit(row_bytes);
  return std::max(unit, about_bytes / row_bytes / unit * unit);
}

int64_t AlignedRows(int64_t row_bytes, int64_t rows) {
  const int64_t unit = AlignedRowsUnit(row_bytes);
  return (rows + unit - 1) / unit * unit;
}

absl::Status WriteRows(const File& file, const BulkDataset& dataset, int64_t first_row,
                       std::span<const std::byte> from) {
  const int64_t rows = static_cast<int64_t>(from.size()) / dataset.shape.row_bytes();
  return ForEachPiece(dataset, first_row, rows, [&](const Piece& piece) -> absl::Status {
    const auto bytes = static_cast<size_t>(piece.bytes);
    STATETAP_RETURN_IF_ERROR(file.WriteAt(piece.offset, from.first(bytes)));
    // The disk works while the next rows are digested and copied.
    if (piece.bytes >= kWritebackBytes) file.StartWriteback(piece.offset, piece.bytes);
    from = from.subspan(bytes);
    return absl::OkStatus();
  });
}

absl::Status ReadRows(const File& file, const BulkDataset& dataset, int64_t first_row,
                      std::span<std::byte> to) {
  const int64_t row_bytes = dataset.shape.row_bytes();
  const int64_t rows = static_cast<int64_t>(to.size()) / row_bytes;
  if (rows * row_bytes != static_cast<int64_t>(to.size())) {
    return absl::OutOfRangeError(
        fmt::format("{}: {} bytes asked for, a row has {}", dataset.path, to.size(), row_bytes));
  }
  STATETAP_RETURN_IF_ERROR(CheckRows(dataset, first_row, rows));
  return ForEachPiece(dataset, first_row, rows, [&](const Piece& piece) -> absl::Status {
    const auto bytes = static_cast<size_t>(piece.bytes);
    STATETAP_RETURN_IF_ERROR(file.ReadAt(piece.offset, to.first(bytes)));
    to = to.subspan(bytes);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::vector<std::span<const std::byte>>> ViewRows(std::span<const std::byte> file,
                                                                 const BulkDataset& dataset,
                                                                 int64_t first_row, int64_t rows) {
  STATETAP_RETURN_IF_ERROR(CheckRows(dataset, first_row, rows));
  std::vector<std::span<const std::byte>> parts;
  const auto add = [&](const Piece& piece) -> absl::Status {
    const auto offset = static_cast<size_t>(piece.offset), bytes = static_cast<size_t>(piece.bytes);
    if (offset > file.size() || bytes > file.size() - offset)
      return absl::DataLossError(fmt::format("{}: the file ends at byte {} of {}", dataset.path,
                                             file.size(), piece.offset + piece.bytes));
    parts.push_back(file.subspan(offset, bytes));
    return absl::OkStatus();
  };
  STATETAP_RETURN_IF_ERROR(ForEachPiece(dataset, first_row, rows, add));
  return parts;
}

}  // namespace statetap
