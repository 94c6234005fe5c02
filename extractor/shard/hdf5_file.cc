#include "extractor/shard/hdf5_file.h"

#include <hdf5.h>

#include <algorithm>
#include <utility>

#include "extractor/shard/format.h"
#include "extractor/shard/hdf5_driver.h"
#include "extractor/shard/hdf5_id.h"

namespace statetap {
namespace {

Id AccessProperties(Hdf5Storage* storage) {
  Id access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  const bool made = access.ok() && UseStorage(access, storage) &&
                    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG) >= 0 &&
                    H5Pset_alignment(access, kChunkAlignment, kChunkAlignment) >= 0 &&
                    H5Pset_meta_block_size(access, hsize_t{1} << 14) >= 0;
  return made ? std::move(access) : Id();
}

absl::Status CheckLibrary() {
  hbool_t safe = 0;
  if (H5is_library_threadsafe(&safe) >= 0 && safe) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this HDF5 library is not thread safe; install one built with --enable-threadsafe");
}

std::string Text(std::string_view view) { return std::string(view); }

}  // namespace

Hdf5File::Hdf5File(std::unique_ptr<Open> open) : open_(std::move(open)) {}
Hdf5File::Hdf5File(Hdf5File&& other) noexcept = default;
Hdf5File& Hdf5File::operator=(Hdf5File&& other) noexcept = default;
Hdf5File::~Hdf5File() = default;

absl::StatusOr<Hdf5File> Hdf5File::Create(Hdf5Storage* storage) {
  Quiet();
  STATETAP_RETURN_IF_ERROR(CheckLibrary());
  const Id access = AccessProperties(storage);
  auto open = std::make_unique<Open>();
  if (access.ok())
    open->file = Id(H5Fcreate("shard", H5F_ACC_TRUNC, H5P_DEFAULT, access), H5Fclose);
  if (!open->file.ok()) return WriteFault("create", "a file");
  return Hdf5File(std::move(open));
}

absl::StatusOr<Hdf5File> Hdf5File::OpenForRead(Hdf5Storage* storage) {
  Quiet();
  STATETAP_RETURN_IF_ERROR(CheckLibrary());
  const Id access = AccessProperties(storage);
  auto open = std::make_unique<Open>();
  if (access.ok()) open->file = Id(H5Fopen("shard", H5F_ACC_RDONLY, access), H5Fclose);
  if (!open->file.ok()) return ReadFault("open", "the file");
  return Hdf5File(std::move(open));
}

absl::Status Hdf5File::Close() {
  Quiet();
  open_->rows.clear();
  return open_->file.Close() ? absl::OkStatus() : WriteFault("close", "the file");
}

absl::Status Hdf5File::MakeGroup(std::string_view path) {
  Quiet();
  const Id group(H5Gcreate2(open_->file, Text(path).c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                 H5Gclose);
  return group.ok() ? absl::OkStatus() : WriteFault("make group", path);
}

// ---- attributes ----

namespace {

absl::Status WriteAttribute(hid_t file, std::string_view name, hid_t type, hid_t space,
                            const void* value) {
  const Id attribute(H5Acreate_by_name(file, "/", Text(name).c_str(), type, space, H5P_DEFAULT,
                                       H5P_DEFAULT, H5P_DEFAULT),
                     H5Aclose);
  if (!attribute.ok() || H5Awrite(attribute, type, value) < 0)
    return WriteFault("write attribute", name);
  return absl::OkStatus();
}

struct OpenAttribute {
  Id attribute, type;
  int64_t values;  // 1 for a scalar
};
absl::StatusOr<OpenAttribute> FindAttribute(hid_t file, std::string_view name, H5T_class_t kind) {
  OpenAttribute found;
  found.attribute =
      Id(H5Aopen_by_name(file, "/", Text(name).c_str(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!found.attribute.ok()) return ReadFault("open attribute", name);
  found.type = Id(H5Aget_type(found.attribute), H5Tclose);
  const Id space(H5Aget_space(found.attribute), H5Sclose);
  if (!found.type.ok() || !space.ok()) return ReadFault("read attribute", name);
  found.values = H5Sget_simple_extent_npoints(space);
  if (H5Tget_class(found.type) != kind)
    return Unexpected(fmt::format("attribute {}", name), "another type", "the format's");
  return found;
}

absl::StatusOr<OpenAttribute> FindScalar(hid_t file, std::string_view name, H5T_class_t kind) {
  STATETAP_ASSIGN_OR_RETURN(OpenAttribute found, FindAttribute(file, name, kind));
  if (found.values != 1)
    return Unexpected(fmt::format("attribute {}", name), fmt::format("{} values", found.values),
                      "one");
  return found;
}

}  // namespace

absl::Status Hdf5File::SetAttribute(std::string_view name, std::string_view value) {
  Quiet();
  const Id space(H5Screate(H5S_SCALAR), H5Sclose), type = StringType();
  const std::string text = Text(value);
  const char* pointer = text.c_str();
  return WriteAttribute(open_->file, name, type, space, &pointer);
}
absl::Status Hdf5File::SetAttribute(std::string_view name, int64_t value) {
  Quiet();
  const Id space(H5Screate(H5S_SCALAR), H5Sclose);
  return WriteAttribute(open_->file, name, H5T_STD_I64LE, space, &value);
}
absl::Status Hdf5File::SetAttribute(std::string_view name, double value) {
  Quiet();
  const Id space(H5Screate(H5S_SCALAR), H5Sclose);
  return WriteAttribute(open_->file, name, H5T_IEEE_F64LE, space, &value);
}
absl::Status Hdf5File::SetAttribute(std::string_view name, std::span<const int64_t> values) {
  Quiet();
  const hsize_t count = values.size();
  const Id space(H5Screate_simple(1, &count, nullptr), H5Sclose);
  const int64_t none = 0;  // HDF5 wants a pointer for no values, too
  return WriteAttribute(open_->file, name, H5T_STD_I64LE, space,
                        values.empty() ? &none : values.data());
}

bool Hdf5File::HasAttribute(std::string_view name) const {
  Quiet();
  return H5Aexists(open_->file, Text(name).c_str()) > 0;
}
absl::StatusOr<std::string> Hdf5File::StringAttribute(std::string_view name) const {
  Quiet();
  STATETAP_ASSIGN_OR_RETURN(const OpenAttribute found, FindScalar(open_->file, name, H5T_STRING));
  if (!IsVariableString(found.type))
    return Unexpected(fmt::format("attribute {}", name), "a fixed string", "a variable one");
  char* text = nullptr;
  if (H5Aread(found.attribute, StringType(), &text) < 0) return ReadFault("read attribute", name);
  std::string value = text == nullptr ? "" : text;
  H5free_memory(text);
  return value;
}
absl::StatusOr<int64_t> Hdf5File::IntAttribute(std::string_view name) const {
  Quiet();
  STATETAP_ASSIGN_OR_RETURN(const OpenAttribute found, FindScalar(open_->file, name, H5T_INTEGER));
  int64_t value = 0;
  if (H5Aread(found.attribute, H5T_NATIVE_INT64, &value) < 0)
    return ReadFault("read attribute", name);
  return value;
}
absl::StatusOr<double> Hdf5File::DoubleAttribute(std::string_view name) const {
  Quiet();
  STATETAP_ASSIGN_OR_RETURN(const OpenAttribute found, FindScalar(open_->file, name, H5T_FLOAT));
  double value = 0;
  if (H5Aread(found.attribute, H5T_NATIVE_DOUBLE, &value) < 0)
    return ReadFault("read attribute", name);
  return value;
}
absl::StatusOr<std::vector<int64_t>> Hdf5File::IntsAttribute(std::string_view name,
                                                             int64_t max_values) const {
  Quiet();
  STATETAP_ASSIGN_OR_RETURN(const OpenAttribute found,
                            FindAttribute(open_->file, name, H5T_INTEGER));
  if (found.values < 0 || found.values > max_values)
    return Unexpected(fmt::format("attribute {}", name), fmt::format("{} values", found.values),
                      fmt::format("at most {}", max_values));
  std::vector<int64_t> values(static_cast<size_t>(found.values));
  if (!values.empty() && H5Aread(found.attribute, H5T_NATIVE_INT64, values.data()) < 0)
    return ReadFault("read attribute", name);
  return values;
}

}  // namespace statetap
