#include "extractor/shard/hdf5_driver.h"

#include <functional>
#include <new>

#if H5_VERSION_GE(1, 14, 0)
#include <H5FDdevelop.h>
#endif

namespace statetap {
namespace {

// HDF5 copies it bytewise into and out of property lists.
struct DriverInfo {
  Hdf5Storage* storage;
};

// HDF5 sees the first member.
struct OpenStorage {
  H5FD_t base;
  Hdf5Storage* storage;
  haddr_t end_of_allocation;
};

hid_t DriverId();
OpenStorage* Of(H5FD_t* file) { return reinterpret_cast<OpenStorage*>(file); }
const OpenStorage* Of(const H5FD_t* file) { return reinterpret_cast<const OpenStorage*>(file); }

H5FD_t* OpenFile(const char*, unsigned flags, hid_t access_properties, haddr_t) {
  const auto* info = static_cast<const DriverInfo*>(H5Pget_driver_info(access_properties));
  if (info == nullptr) return nullptr;
  auto* opened = new (std::nothrow) OpenStorage{};
  if (opened == nullptr) return nullptr;
  opened->storage = info->storage;
  if ((flags & H5F_ACC_TRUNC) != 0) opened->storage->Resize(0);
  return &opened->base;
}

herr_t CloseFile(H5FD_t* file) {
  delete Of(file);
  return 0;
}

// Two opens are one file when they share the storage.
int Compare(const H5FD_t* a, const H5FD_t* b) {
  const std::less<const Hdf5Storage*> less;
  if (less(Of(a)->storage, Of(b)->storage)) return -1;
  return less(Of(b)->storage, Of(a)->storage) ? 1 : 0;
}

herr_t Query(const H5FD_t*, unsigned long* flags) {
  if (flags != nullptr) {
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA |
             H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  }
  return 0;
}

haddr_t EndOfAllocation(const H5FD_t* file, H5FD_mem_t) { return Of(file)->end_of_allocation; }
herr_t SetEndOfAllocation(H5FD_t* file, H5FD_mem_t, haddr_t end) {
  Of(file)->end_of_allocation = end;
  return 0;
}
haddr_t EndOfFile(const H5FD_t* file, H5FD_mem_t) {
  return static_cast<haddr_t>(Of(file)->storage->Size());
}

herr_t Read(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t offset, size_t size, void* to) {
  const absl::Status status =
      Of(file)->storage->Read(static_cast<int64_t>(offset), {static_cast<std::byte*>(to), size});
  return status.ok() ? 0 : -1;
}
// No exception may pass through the library, which is C.
herr_t Write(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t offset, size_t size, const void* from) try {
  const absl::Status status = Of(file)->storage->Write(static_cast<int64_t>(offset),
                                                       {static_cast<const std::byte*>(from), size});
  return status.ok() ? 0 : -1;
} catch (const std::bad_alloc&) {
  return -1;
}
herr_t Truncate(H5FD_t* file, hid_t, hbool_t) {
  Of(file)->storage->Resize(static_cast<int64_t>(Of(file)->end_of_allocation));
  return 0;
}

H5FD_class_t MakeClass() {
  H5FD_class_t driver{};
#if H5_VERSION_GE(1, 14, 0)
  driver.version = H5FD_CLASS_VERSION;
  driver.value =
      static_cast<H5FD_class_value_t>(600);  // 512 to 65,535 are for unregistered drivers
#endif
  driver.name = "statetap-storage";
  driver.maxaddr = (haddr_t{1} << 62) - 1;
  driver.fc_degree = H5F_CLOSE_STRONG;
  driver.fapl_size = sizeof(DriverInfo);
  driver.open = OpenFile;
  driver.close = CloseFile;
  driver.cmp = Compare;
  driver.query = Query;
  driver.get_eoa = EndOfAllocation;
  driver.set_eoa = SetEndOfAllocation;
  driver.get_eof = EndOfFile;
  driver.read = Read;
  driver.write = Write;
  driver.truncate = Truncate;
  for (H5FD_mem_t& kind : driver.fl_map) kind = H5FD_MEM_DEFAULT;
  return driver;
}

hid_t DriverId() {
  static const H5FD_class_t driver = MakeClass();
  static const hid_t id = H5FDregister(&driver);
  return id;
}

}  // namespace

bool UseStorage(hid_t access_properties, Hdf5Storage* storage) {
  const DriverInfo info{storage};
  return DriverId() >= 0 && H5Pset_driver(access_properties, DriverId(), &info) >= 0;
}

}  // namespace statetap
