// What the shard format needs of HDF5: owners for its ids, its errors as statuses, and its file I/O
// in our hands. <hdf5.h> is included by the files hdf5_*.cc and nowhere else.
//
// HDF5 never touches a file here: it reads and writes through an Hdf5Storage. So a full disk is
// met by our own write, which names the file, and never inside the library, where a failed flush
// leaves a file that cannot be closed.
//
// The library holds one lock over all files of the process: no bulk data goes through it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/file.h"
#include "extractor/base/status.h"

namespace statetap {

// The bytes of an HDF5 file. Offsets are those of the file.
class Hdf5Storage {
 public:
  virtual ~Hdf5Storage() = default;
  virtual absl::Status Read(int64_t offset, std::span<std::byte> to) const = 0;
  virtual absl::Status Write(int64_t offset, std::span<const std::byte> from) = 0;
  virtual int64_t Size() const = 0;
  virtual void Resize(int64_t size) = 0;
};

// Keeps what HDF5 writes in pages; what it never wrote reads as zero. Bulk data does not come here.
class MemoryStorage : public Hdf5Storage {
 public:
  absl::Status Read(int64_t offset, std::span<std::byte> to) const override;
  absl::Status Write(int64_t offset, std::span<const std::byte> from) override;
  int64_t Size() const override { return size_; }
  void Resize(int64_t size) override { size_ = size; }
  // Writes the pages to the same offsets of `file`.
  absl::Status CopyTo(const File& file) const;

 private:
  static constexpr int64_t kPageBytes = 4096;
  using Page = std::array<std::byte, kPageBytes>;
  std::map<int64_t, std::unique_ptr<Page>> pages_;  // by number
  int64_t size_ = 0;
};

// The first `size` bytes of a file, for reading. `file` must outlive it.
class FileStorage : public Hdf5Storage {
 public:
  FileStorage(const File& file, int64_t size) : file_(file), size_(size) {}
  absl::Status Read(int64_t offset, std::span<std::byte> to) const override;
  absl::Status Write(int64_t offset, std::span<const std::byte> from) override;
  int64_t Size() const override { return size_; }
  void Resize(int64_t) override {}

 private:
  const File& file_;
  int64_t size_;
};

enum class Hdf5Type : uint8_t { kU8, kI32, kI64, kU64, kF32, kF64, kBf16, kE4m3 };
int SizeOf(Hdf5Type type);
template <typename T>
struct Hdf5TypeOf;
template <>
struct Hdf5TypeOf<uint8_t> {
  static constexpr auto value = Hdf5Type::kU8;
};
template <>
struct Hdf5TypeOf<int32_t> {
  static constexpr auto value = Hdf5Type::kI32;
};
template <>
struct Hdf5TypeOf<int64_t> {
  static constexpr auto value = Hdf5Type::kI64;
};
template <>
struct Hdf5TypeOf<uint64_t> {
  static constexpr auto value = Hdf5Type::kU64;
};
template <>
struct Hdf5TypeOf<float> {
  static constexpr auto value = Hdf5Type::kF32;
};
template <>
struct Hdf5TypeOf<double> {
  static constexpr auto value = Hdf5Type::kF64;
};

// Shape of a dataset whose rows are written and read outside HDF5.
struct Hdf5RowsShape {
  Hdf5Type type;
  int64_t rows = 0, width = 0;  // width 0: one value a row, a dataset of one dimension
  int64_t rows_per_chunk = 0;
  int64_t row_bytes() const { return SizeOf(type) * (width == 0 ? 1 : width); }
  int64_t chunk_bytes() const { return rows_per_chunk * row_bytes(); }
  friend bool operator==(const Hdf5RowsShape&, const Hdf5RowsShape&) = default;
};

// An open HDF5 file. Move-only; not thread safe. Errors are INTERNAL while writing and DATA_LOSS
// while reading, with HDF5's own words.
class Hdf5File {
 public:
  // `storage` must outlive the file. Chunks and other objects of 4 KiB and more are aligned to
  // 4 KiB; small ones share blocks of 64 KiB.
  static absl::StatusOr<Hdf5File> Create(Hdf5Storage* storage);
  static absl::StatusOr<Hdf5File> OpenForRead(Hdf5Storage* storage);
  Hdf5File(Hdf5File&& other) noexcept;
  Hdf5File& operator=(Hdf5File&& other) noexcept;
  ~Hdf5File();
  // Flushes to the storage.
  absl::Status Close();

  absl::Status MakeGroup(std::string_view path);

  // Attributes of the root group.
  absl::Status SetAttribute(std::string_view name, std::string_view value);
  absl::Status SetAttribute(std::string_view name, int64_t value);
  absl::Status SetAttribute(std::string_view name, double value);
  absl::Status SetAttribute(std::string_view name, std::span<const int64_t> values);
  absl::StatusOr<std::string> StringAttribute(std::string_view name) const;
  absl::StatusOr<int64_t> IntAttribute(std::string_view name) const;
  absl::StatusOr<double> DoubleAttribute(std::string_view name) const;
  absl::StatusOr<std::vector<int64_t>> IntsAttribute(std::string_view name,
                                                     int64_t max_values) const;
  bool HasAttribute(std::string_view name) const;

  // Whole datasets of one dimension; a scalar is a dataset without dimensions. Reading refuses
  // filters, external storage and external links: a shard has none, a hostile file may.
  template <typename T>
  absl::Status WriteArray(std::string_view path, std::span<const T> values) {
    return WriteValues(path, Hdf5TypeOf<T>::value, values.data(),
                       static_cast<int64_t>(values.size()));
  }
  template <typename T>
  absl::Status WriteScalar(std::string_view path, T value) {
    return WriteValues(path, Hdf5TypeOf<T>::value, &value, kScalar);
  }
  // DATA_LOSS where the dataset's type or length differ.
  template <typename T>
  absl::Status ReadArray(std::string_view path, std::span<T> to) const {
    return ReadValues(path, Hdf5TypeOf<T>::value, to.data(), static_cast<int64_t>(to.size()));
  }
  template <typename T>
  absl::StatusOr<T> ReadScalar(std::string_view path) const {
    T value;
    STATETAP_RETURN_IF_ERROR(ReadValues(path, Hdf5TypeOf<T>::value, &value, kScalar));
    return value;
  }
  absl::Status WriteStrings(std::string_view path, std::span<const std::string> values);
  // DATA_LOSS where there are not `count` strings, or they hold more than `max_bytes` in all.
  absl::StatusOr<std::vector<std::string>> ReadStrings(std::string_view path, int64_t count,
                                                       int64_t max_bytes) const;
  bool HasDataset(std::string_view path) const;  // REQUIRES: its group is there
  // Number of values of a dataset of one dimension.
  absl::StatusOr<int64_t> LengthOf(std::string_view path) const;

  // A chunked dataset with 0 rows, space allocated as it grows and never filled. `shape.rows` is
  // ignored.
  absl::Status CreateRows(std::string_view path, const Hdf5RowsShape& shape);
  // Grows the dataset to `rows`; `chunk_offsets` gets also the file offsets of the chunks added.
  absl::Status ExtendRows(std::string_view path, int64_t rows, std::vector<int64_t>* chunk_offsets);
  absl::StatusOr<Hdf5RowsShape> RowsShape(std::string_view path) const;
  // The file offsets of all chunks, as HDF5 has them. Takes time quadratic in their number.
  absl::StatusOr<std::vector<int64_t>> ChunkOffsets(std::string_view path) const;

 private:
  static constexpr int64_t kScalar = -1;
  struct Open;
  explicit Hdf5File(std::unique_ptr<Open> open);
  absl::Status WriteValues(std::string_view path, Hdf5Type type, const void* values, int64_t count);
  absl::Status ReadValues(std::string_view path, Hdf5Type type, void* to, int64_t count) const;

  std::unique_ptr<Open> open_;
};

}  // namespace statetap
