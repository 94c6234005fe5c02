// What hdf5_file.cc and hdf5_dataset.cc share: ids with owners, types, and HDF5's errors as
// statuses.
#pragma once

#include <hdf5.h>

#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "extractor/shard/hdf5_file.h"

namespace statetap {

// Owns one id of HDF5.
class Id {
 public:
  Id() = default;
  Id(hid_t id, herr_t (*close)(hid_t)) : id_(id), close_(close) {}
  Id(Id&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Id& operator=(Id&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Id() { Close(); }
  bool Close() { return id_ < 0 || close_(std::exchange(id_, -1)) >= 0; }
  bool ok() const { return id_ >= 0; }
  operator hid_t() const { return id_; }  // NOLINT: as HDF5 takes it

 private:
  hid_t id_ = -1;
  herr_t (*close_)(hid_t) = nullptr;
};

// Silences HDF5 in this thread: it prints its errors unless each thread says otherwise. Every
// method of Hdf5File begins with it.
void Quiet();

// INTERNAL and DATA_LOSS with the innermost cause that HDF5 noted.
absl::Status WriteFault(std::string_view what, std::string_view name);
absl::Status ReadFault(std::string_view what, std::string_view name);
absl::Status Unexpected(std::string_view name, std::string_view found, std::string_view expected);

Id TypeId(Hdf5Type type);
Id StringType();
bool IsVariableString(hid_t type);

struct Hdf5File::Open {
  struct Rows {
    Id dataset;
    Hdf5RowsShape shape;
  };
  Id file;
  std::map<std::string, Rows, std::less<>> rows;  // those made by CreateRows
};

}  // namespace statetap
