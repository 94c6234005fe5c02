// The HDF5 file driver that reads and writes an Hdf5Storage. For hdf5_file.cc alone.
#pragma once

#include <hdf5.h>

#include "extractor/shard/hdf5_file.h"

namespace statetap {

// Makes a file-access property list open files on `storage`. False where HDF5 refuses.
bool UseStorage(hid_t access_properties, Hdf5Storage* storage);

}  // namespace statetap
