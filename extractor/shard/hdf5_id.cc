#include "extractor/shard/hdf5_id.h"

namespace statetap {
namespace {

// The innermost cause that HDF5 noted in this thread.
std::string Cause() {
  std::string cause;
  const auto take_first = [](unsigned depth, const H5E_error2_t* error, void* to) -> herr_t {
    if (depth == 0 && error->desc != nullptr) *static_cast<std::string*>(to) = error->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_first, &cause);
  return cause.empty() ? "no cause given" : cause;
}

// A float of one sign bit, `exponent` and `mantissa` bits.
Id MakeFloat(size_t exponent, size_t mantissa, size_t bias) {
  const size_t bits = 1 + exponent + mantissa;
  Id type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
  const bool made = type.ok() &&
                    H5Tset_fields(type, bits - 1, mantissa, exponent, 0, mantissa) >= 0 &&
                    H5Tset_precision(type, bits) >= 0 && H5Tset_size(type, bits / 8) >= 0 &&
                    H5Tset_ebias(type, bias) >= 0;
  return made ? std::move(type) : Id();
}

}  // namespace

void Quiet() { H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr); }

absl::Status WriteFault(std::string_view what, std::string_view name) {
  return absl::InternalError(fmt::format("HDF5 cannot {} {}: {}", what, name, Cause()));
}
absl::Status ReadFault(std::string_view what, std::string_view name) {
  return absl::DataLossError(fmt::format("HDF5 cannot {} {}: {}", what, name, Cause()));
}
absl::Status Unexpected(std::string_view name, std::string_view found, std::string_view expected) {
  return absl::DataLossError(fmt::format("{}: {} where {} is expected", name, found, expected));
}

Id TypeId(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kU8: return Id(H5Tcopy(H5T_STD_U8LE), H5Tclose);
    case Hdf5Type::kI32: return Id(H5Tcopy(H5T_STD_I32LE), H5Tclose);
    case Hdf5Type::kI64: return Id(H5Tcopy(H5T_STD_I64LE), H5Tclose);
    case Hdf5Type::kU64: return Id(H5Tcopy(H5T_STD_U64LE), H5Tclose);
    case Hdf5Type::kF32: return Id(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
    case Hdf5Type::kF64: return Id(H5Tcopy(H5T_IEEE_F64LE), H5Tclose);
    case Hdf5Type::kBf16: return MakeFloat(8, 7, 127);
    case Hdf5Type::kE4m3: return MakeFloat(4, 3, 7);
  }
  return {};
}

Id StringType() {
  Id type(H5Tcopy(H5T_C_S1), H5Tclose);
  const bool made =
      type.ok() && H5Tset_size(type, H5T_VARIABLE) >= 0 && H5Tset_cset(type, H5T_CSET_UTF8) >= 0;
  return made ? std::move(type) : Id();
}

bool IsVariableString(hid_t object_type) {
  return H5Tget_class(object_type) == H5T_STRING && H5Tis_variable_str(object_type) > 0;
}

int SizeOf(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kU8:
    case Hdf5Type::kE4m3: return 1;
    case Hdf5Type::kBf16: return 2;
    case Hdf5Type::kI32:
    case Hdf5Type::kF32: return 4;
    case Hdf5Type::kI64:
    case Hdf5Type::kU64:
    case Hdf5Type::kF64: return 8;
  }
  return 0;
}

}  // namespace statetap
