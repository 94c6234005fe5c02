#include "extractor/shard/footer.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "extractor/base/digest.h"
#include "extractor/shard/format.h"

namespace statetap {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

// The last 56 bytes of the file.
struct Trailer {
  uint64_t hdf5_bytes, table_bytes, structure_digest, table_digest;
  uint64_t trailer_digest;  // of the four above
  char magic[16];
};
static_assert(sizeof(Trailer) == 56);
constexpr std::string_view kMagic("statetap-shard-1", 16);
constexpr size_t kTrailerDigested = offsetof(Trailer, trailer_digest);

constexpr size_t kMaxPath = 64;

template <typename T>
void Put(std::string* to, T value) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// Takes values off the front of the table.
class TableReader {
 public:
  explicit TableReader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  bool Take(T* value) {
    if (bytes_.size() < sizeof(T)) return false;
    std::memcpy(value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
    return true;
  }
  bool Take(size_t size, std::string* text) {
    if (bytes_.size() < size) return false;
    *text = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return true;
  }
  size_t left() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
};

std::span<const std::byte> BytesOf(std::string_view text) { return std::as_bytes(std::span(text)); }

bool TakeDataset(TableReader* table, int64_t hdf5_bytes, BulkDataset* dataset) {
  uint32_t path_size = 0;
  uint8_t type = 0;
  Hdf5RowsShape& shape = dataset->shape;
  if (!table->Take(&path_size) || path_size > kMaxPath || !table->Take(path_size, &dataset->path) ||
      !table->Take(&type) || !table->Take(&shape.rows) || !table->Take(&shape.width) ||
      !table->Take(&shape.rows_per_chunk))
    return false;
  if (type > static_cast<uint8_t>(Hdf5Type::kE4m3)) return false;
  shape.type = static_cast<Hdf5Type>(type);
  if (shape.width < 0 || shape.width > kMaxHidden || shape.rows < 0 || shape.rows > hdf5_bytes ||
      shape.rows_per_chunk < 1 || shape.rows_per_chunk > hdf5_bytes / shape.row_bytes())
    return false;
  const int64_t chunks = (shape.rows + shape.rows_per_chunk - 1) / shape.rows_per_chunk;
  if (static_cast<uint64_t>(chunks) > table->left() / sizeof(int64_t)) return false;
  dataset->chunk_offsets.resize(static_cast<size_t>(chunks));
  for (int64_t& offset : dataset->chunk_offsets) {
    if (!table->Take(&offset) || offset < 0 || offset > hdf5_bytes - shape.chunk_bytes())
      return false;
  }
  return true;
}

struct Extent {
  int64_t begin, end;
};

// By offset, neighbours joined. Empty where two overlap.
std::vector<Extent> ChunkExtents(const ShardFooter& footer, bool* overlap) {
  std::vector<Extent> chunks;
  for (const BulkDataset& dataset : footer.datasets) {
    for (const int64_t offset : dataset.chunk_offsets)
      chunks.push_back({offset, offset + dataset.shape.chunk_bytes()});
  }
  std::sort(chunks.begin(), chunks.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  std::vector<Extent> joined;
  *overlap = false;
  for (const Extent& chunk : chunks) {
    if (!joined.empty() && chunk.begin < joined.back().end) *overlap = true;
    if (!joined.empty() && chunk.begin == joined.back().end) {
      joined.back().end = chunk.end;
    } else {
      joined.push_back(chunk);
    }
  }
  return joined;
}

absl::Status NoFooter(const File& file, std::string_view what) {
  return absl::DataLossError(
      fmt::format("{} is not a complete shard: {}. It was cut, damaged or changed by another "
                  "program, or it is another kind of file",
                  file.path().string(), what));
}

}  // namespace

std::string EncodeFooter(const ShardFooter& footer) {
  std::string table;
  Put(&table, static_cast<uint32_t>(footer.datasets.size()));
  for (const BulkDataset& dataset : footer.datasets) {
    Put(&table, static_cast<uint32_t>(dataset.path.size()));
    table += dataset.path;
    Put(&table, static_cast<uint8_t>(dataset.shape.type));
    Put(&table, dataset.shape.rows);
    Put(&table, dataset.shape.width);
    Put(&table, dataset.shape.rows_per_chunk);
    for (const int64_t offset : dataset.chunk_offsets) Put(&table, offset);
  }
  Trailer trailer{.hdf5_bytes = static_cast<uint64_t>(footer.hdf5_bytes),
                  .table_bytes = table.size(),
                  .structure_digest = footer.structure_digest,
                  .table_digest = Xxh3Of(BytesOf(table))};
  trailer.trailer_digest = Xxh3Of(std::as_bytes(std::span(&trailer, 1)).first(kTrailerDigested));
  std::copy(kMagic.begin(), kMagic.end(), trailer.magic);
  Put(&table, trailer);
  return table;
}

absl::StatusOr<ShardFooter> ReadFooter(const File& file) {
  STATETAP_ASSIGN_OR_RETURN(const int64_t size, file.Size());
  if (size < static_cast<int64_t>(sizeof(Trailer))) return NoFooter(file, "it is too short");
  Trailer trailer;
  const int64_t before_trailer = size - static_cast<int64_t>(sizeof(Trailer));
  const auto trailer_bytes = std::as_writable_bytes(std::span(&trailer, 1));
  STATETAP_RETURN_IF_ERROR(file.ReadAt(before_trailer, trailer_bytes));
  if (std::string_view(trailer.magic, sizeof(trailer.magic)) != kMagic)
    return NoFooter(file, "it does not end as a shard does");
  if (Xxh3Of(trailer_bytes.first(kTrailerDigested)) != trailer.trailer_digest)
    return NoFooter(file, "the digest of its trailer is wrong");
  const auto available = static_cast<uint64_t>(before_trailer);
  if (trailer.table_bytes > available || trailer.hdf5_bytes != available - trailer.table_bytes)
    return NoFooter(file, "its parts do not add up to its size");

  std::string table(trailer.table_bytes, '\0');
  STATETAP_RETURN_IF_ERROR(file.ReadAt(static_cast<int64_t>(trailer.hdf5_bytes),
                                       std::as_writable_bytes(std::span(table))));
  if (Xxh3Of(BytesOf(table)) != trailer.table_digest)
    return NoFooter(file, "the digest of its chunk table is wrong");
  ShardFooter footer{.hdf5_bytes = static_cast<int64_t>(trailer.hdf5_bytes),
                     .structure_digest = trailer.structure_digest};
  TableReader reader(table);
  uint32_t count = 0;
  bool sound = reader.Take(&count) && count <= 2 * kMaxBoundaries + 4;
  for (uint32_t i = 0; sound && i < count; ++i)
    sound = TakeDataset(&reader, footer.hdf5_bytes, &footer.datasets.emplace_back());
  bool overlap = false;
  if (sound) ChunkExtents(footer, &overlap);
  if (!sound || overlap || reader.left() != 0)
    return NoFooter(file, "its chunk table is not sound");
  return footer;
}

absl::StatusOr<uint64_t> StructureDigest(const File& file, const ShardFooter& footer) {
  bool overlap = false;
  std::vector<Extent> chunks = ChunkExtents(footer, &overlap);
  chunks.push_back({footer.hdf5_bytes, footer.hdf5_bytes});
  Xxh3 digest;
  std::vector<std::byte> buffer(1 << 16);
  int64_t offset = 0;
  for (const Extent& chunk : chunks) {
    while (offset < chunk.begin) {
      const auto size =
          static_cast<size_t>(std::min(chunk.begin - offset, static_cast<int64_t>(buffer.size())));
      STATETAP_RETURN_IF_ERROR(file.ReadAt(offset, std::span(buffer).first(size)));
      digest.Update(std::span(buffer).first(size));
      offset += static_cast<int64_t>(size);
    }
    offset = chunk.end;
  }
  return digest.Digest();
}

}  // namespace statetap
