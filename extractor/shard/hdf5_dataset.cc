// Hdf5File's datasets: those read and written whole, and those whose rows go another way.
#include <algorithm>

#include "extractor/shard/hdf5_id.h"

namespace statetap {

namespace {

std::string Text(std::string_view view) { return std::string(view); }

// No times in the file: the same samples give the same bytes.
Id DatasetProperties() {
  Id properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (!properties.ok() || H5Pset_obj_track_times(properties, false) < 0) return {};
  return properties;
}

absl::Status WriteDataset(hid_t file, std::string_view path, hid_t type, hid_t space,
                          const void* values) {
  const Id properties = DatasetProperties();
  const Id dataset(
      H5Dcreate2(file, Text(path).c_str(), type, space, H5P_DEFAULT, properties, H5P_DEFAULT),
      H5Dclose);
  if (!dataset.ok() || H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) < 0)
    return WriteFault("write", path);
  return absl::OkStatus();
}

struct OpenDataset {
  Id dataset, type, space, properties;
  int dimensions;
  int64_t values;
};

absl::StatusOr<OpenDataset> FindDataset(hid_t file, std::string_view path) {
  const Id access(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose);
  const auto refuse = [](const char*, const char*, const char*, const char*, unsigned*, hid_t,
                         void*) -> herr_t { return -1; };
  if (!access.ok() || H5Pset_elink_cb(access, refuse, nullptr) < 0) return ReadFault("open", path);
  OpenDataset found;
  found.dataset = Id(H5Dopen2(file, Text(path).c_str(), access), H5Dclose);
  if (!found.dataset.ok()) return ReadFault("open", path);
  found.type = Id(H5Dget_type(found.dataset), H5Tclose);
  found.space = Id(H5Dget_space(found.dataset), H5Sclose);
  found.properties = Id(H5Dget_create_plist(found.dataset), H5Pclose);
  if (!found.type.ok() || !found.space.ok() || !found.properties.ok())
    return ReadFault("describe", path);
  const H5D_layout_t layout = H5Pget_layout(found.properties);
  if (layout == H5D_VIRTUAL || H5Pget_external_count(found.properties) != 0 ||
      H5Pget_nfilters(found.properties) != 0)
    return Unexpected(path, "a filter, or data that lie elsewhere", "plain data");
  found.dimensions = H5Sget_simple_extent_ndims(found.space);
  found.values = H5Sget_simple_extent_npoints(found.space);
  if (found.dimensions < 0 || found.values < 0) return ReadFault("describe", path);
  return found;
}

}  // namespace

absl::Status Hdf5File::WriteValues(std::string_view path, Hdf5Type type, const void* values,
                                   int64_t count) {
  Quiet();
  const auto length = static_cast<hsize_t>(count);
  const Id space(count == kScalar ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &length, nullptr),
                 H5Sclose);
  return WriteDataset(open_->file, path, TypeId(type), space, values);
}

absl::Status Hdf5File::ReadValues(std::string_view path, Hdf5Type type, void* to,
                                  int64_t count) const {
  Quiet();
  STATETAP_ASSIGN_OR_RETURN(const OpenDataset found, FindDataset(open_->file, path));
  const Id expected = TypeId(type);
  if (H5Tequal(found.type, expected) <= 0) return Unexpected(path, "another type", "the format's");
  const bool scalar = count == kScalar;
  if (found.dimensions != (scalar ? 0 : 1) || found.values != (scalar ? 1 : count)) {
    return Unexpected(path,
                      fmt::format("{} values in {} dimensions", found.values, found.dimensions),
                      scalar ? "one value" : fmt::format("a list of {}", count));
  }
  if (found.values == 0) return absl::OkStatus();
  if (H5Dread(found.dataset, expected, H5S_ALL, H5S_ALL, H5P_DEFAULT, to) < 0)
    return ReadFault("read", path);
  return absl::OkStatus();
}

bool Hdf5File::HasDataset(std::string_view path) const {
  Quiet();
  return H5Lexists(open_->file, Text(path).c_str(), H5P_DEFAULT) > 0;
}

absl::StatusOr<int64_t> Hdf5File::LengthOf(std::string_view path) const {
  Quiet();
  STATETAP_ASSIGN_OR_RETURN(const OpenDataset found, FindDataset(open_->file, path));
  if (found.dimensions != 1)
    return Unexpected(path, fmt::format("{} dimensions", found.dimensions), "one");
  return found.values;
}

absl::Status Hdf5File::WriteStrings(std::string_view path, std::span<const std::string> values) {
  Quiet();
  std::vector<const char*> pointers;
  for (const std::string& value : values) pointers.push_back(value.c_str());
  const hsize_t length = values.size();
  const Id space(H5Screate_simple(1, &length, nullptr), H5Sclose);
  return WriteDataset(open_->file, path, StringType(), space, pointers.data());
}

// In batches: a file in which many entries share one huge string is noticed before it fills the
// memory.
absl::StatusOr<std::vector<std::string>> Hdf5File::ReadStrings(std::string_view path, int64_t count,
                                                               int64_t max_bytes) const {
  Quiet();
  STATETAP_ASSIGN_OR_RETURN(const OpenDataset found, FindDataset(open_->file, path));
  if (!IsVariableString(found.type) || found.dimensions != 1 || found.values != count)
    return Unexpected(path, "another type or length", fmt::format("a list of {} strings", count));
  constexpr hsize_t kBatch = 1024;
  const Id type = StringType();
  std::vector<std::string> values;
  values.reserve(static_cast<size_t>(count));
  std::vector<char*> batch;
  int64_t bytes = 0;
  for (hsize_t begin = 0; begin < static_cast<hsize_t>(count); begin += kBatch) {
    const hsize_t size = std::min(kBatch, static_cast<hsize_t>(count) - begin);
    const Id memory(H5Screate_simple(1, &size, nullptr), H5Sclose);
    H5Sselect_hyperslab(found.space, H5S_SELECT_SET, &begin, nullptr, &size, nullptr);
    batch.assign(size, nullptr);
    const bool read =
        H5Dread(found.dataset, type, memory, found.space, H5P_DEFAULT, batch.data()) >= 0;
    for (const char* text : batch) {
      values.emplace_back(text == nullptr ? "" : text);
      bytes += static_cast<int64_t>(values.back().size());
    }
    H5Dvlen_reclaim(type, memory, H5P_DEFAULT, batch.data());
    if (!read) return ReadFault("read", path);
    if (bytes > max_bytes)
      return Unexpected(path, "more text", fmt::format("at most {} bytes", max_bytes));
  }
  return values;
}

// ---- rows, which are written and read elsewhere ----

namespace {

// The file offset of the chunk that begins at `row`, or -1.
int64_t ChunkOffset(hid_t dataset, const Hdf5RowsShape& shape, int64_t row) {
  const hsize_t corner[2] = {static_cast<hsize_t>(row), 0};
  unsigned filters = 0;
  haddr_t offset = HADDR_UNDEF;
  hsize_t bytes = 0;
  if (H5Dget_chunk_info_by_coord(dataset, corner, &filters, &offset, &bytes) < 0) return -1;
  if (offset == HADDR_UNDEF || bytes != static_cast<hsize_t>(shape.chunk_bytes())) return -1;
  return static_cast<int64_t>(offset);
}

absl::Status AddOffsets(hid_t dataset, const Hdf5RowsShape& shape, std::string_view path,
                        int64_t rows, std::vector<int64_t>* offsets) {
  while (static_cast<int64_t>(offsets->size()) * shape.rows_per_chunk < rows) {
    const int64_t row = static_cast<int64_t>(offsets->size()) * shape.rows_per_chunk;
    const int64_t offset = ChunkOffset(dataset, shape, row);
    if (offset < 0) return ReadFault(fmt::format("place row {} of", row), path);
    offsets->push_back(offset);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Hdf5File::CreateRows(std::string_view path, const Hdf5RowsShape& shape) {
  Quiet();
  const int dimensions = shape.width == 0 ? 1 : 2;
  const auto width = static_cast<hsize_t>(shape.width);
  const hsize_t now[2] = {0, width}, most[2] = {H5S_UNLIMITED, width};
  const hsize_t chunk[2] = {static_cast<hsize_t>(shape.rows_per_chunk), width};
  const Id space(H5Screate_simple(dimensions, now, most), H5Sclose);
  const Id properties = DatasetProperties();
  if (!properties.ok() || H5Pset_chunk(properties, dimensions, chunk) < 0 ||
      H5Pset_alloc_time(properties, H5D_ALLOC_TIME_EARLY) < 0 ||
      H5Pset_fill_time(properties, H5D_FILL_TIME_NEVER) < 0)
    return WriteFault("describe", path);
  Open::Rows rows{.shape = shape};
  rows.dataset = Id(H5Dcreate2(open_->file, Text(path).c_str(), TypeId(shape.type), space,
                               H5P_DEFAULT, properties, H5P_DEFAULT),
                    H5Dclose);
  if (!rows.dataset.ok()) return WriteFault("make", path);
  open_->rows.emplace(path, std::move(rows));
  return absl::OkStatus();
}

absl::Status Hdf5File::ExtendRows(std::string_view path, int64_t rows,
                                  std::vector<int64_t>* chunk_offsets) {
  Quiet();
  const Open::Rows& made = open_->rows.find(path)->second;
  const hsize_t extent[2] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(made.shape.width)};
  if (H5Dset_extent(made.dataset, extent) < 0) return WriteFault("extend", path);
  return AddOffsets(made.dataset, made.shape, path, rows, chunk_offsets);
}

absl::StatusOr<Hdf5RowsShape> Hdf5File::RowsShape(std::string_view path) const {
  Quiet();
  STATETAP_ASSIGN_OR_RETURN(const OpenDataset found, FindDataset(open_->file, path));
  hsize_t extent[2] = {}, chunk[2] = {};
  if (found.dimensions < 1 || found.dimensions > 2 ||
      H5Pget_layout(found.properties) != H5D_CHUNKED ||
      H5Sget_simple_extent_dims(found.space, extent, nullptr) != found.dimensions ||
      H5Pget_chunk(found.properties, 2, chunk) != found.dimensions ||
      (found.dimensions == 2 && chunk[1] != extent[1]))
    return Unexpected(path, "another layout", "chunks of whole rows");
  for (const Hdf5Type type :
       {Hdf5Type::kU8, Hdf5Type::kI32, Hdf5Type::kF32, Hdf5Type::kBf16, Hdf5Type::kE4m3}) {
    if (H5Tequal(found.type, TypeId(type)) <= 0) continue;
    return Hdf5RowsShape{.type = type,
                         .rows = static_cast<int64_t>(extent[0]),
                         .width = static_cast<int64_t>(found.dimensions == 2 ? extent[1] : 0),
                         .rows_per_chunk = static_cast<int64_t>(chunk[0])};
  }
  return Unexpected(path, "another type", "the format's");
}

absl::StatusOr<std::vector<int64_t>> Hdf5File::ChunkOffsets(std::string_view path) const {
  Quiet();
  STATETAP_ASSIGN_OR_RETURN(const Hdf5RowsShape shape, RowsShape(path));
  STATETAP_ASSIGN_OR_RETURN(const OpenDataset found, FindDataset(open_->file, path));
  std::vector<int64_t> offsets;
  STATETAP_RETURN_IF_ERROR(AddOffsets(found.dataset, shape, path, shape.rows, &offsets));
  return offsets;
}

}  // namespace statetap
