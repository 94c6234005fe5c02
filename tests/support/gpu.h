// For tests of the CUDA backend: skipping aloud, and rows to and from the device as bf16.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <vector>

#include "extractor/backend/cuda/cuda_backend.h"
#include "extractor/base/dtype.h"

// First line of a test.
#define SKIP_WITHOUT_GPU() \
  if (::statetap::NumGpus() == 0) GTEST_SKIP() << "no GPU can be used here: not tested"

namespace statetap::testing {

// The repository: where it was built, or where STATETAP_SOURCE_DIR says, for binaries that were
// carried to another machine.
inline std::filesystem::path SourceDir() {
  const char* elsewhere = std::getenv("STATETAP_SOURCE_DIR");
  return elsewhere != nullptr ? elsewhere : STATETAP_SOURCE_DIR;
}

// STATETAP_COMM=nccl: whatever can run over NCCL here does.
inline CudaOptions::Comm CommHere(int ranks) {
  const char* wanted = std::getenv("STATETAP_COMM");
  const bool nccl = wanted != nullptr && std::string_view(wanted) == "nccl";
  return nccl && HasNccl() && ranks <= NumGpus() ? CudaOptions::Comm::kNccl
                                                 : CudaOptions::Comm::kAuto;
}

inline void ExpectCuda(cudaError_t code) {
  ASSERT_EQ(code, cudaSuccess) << cudaGetErrorString(code);
}

// Device memory of a test. Starts as NaN everywhere (0xff), so that what an op does not write
// shows.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    ExpectCuda(cudaMalloc(&memory_, count * sizeof(T) + 1));
    Poison();
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { Set(values); }
  ~DeviceArray() { (void)cudaFree(memory_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void Poison() {
    ExpectCuda(cudaMemset(memory_, 0xff, count_ * sizeof(T)));
    ExpectCuda(cudaDeviceSynchronize());
  }
  void Set(const std::vector<T>& values) {
    ExpectCuda(
        cudaMemcpy(memory_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    ExpectCuda(cudaDeviceSynchronize());  // the backend's streams do not wait for the default one
  }
  std::vector<T> Get() const {
    std::vector<T> values(count_);
    ExpectCuda(cudaMemcpy(values.data(), memory_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  T* data() const { return static_cast<T*>(memory_); }

 private:
  void* memory_ = nullptr;
  size_t count_;
};

inline std::vector<uint16_t> ToBf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (const float value : values) bits.push_back(FloatToBf16(value));
  return bits;
}

inline std::vector<float> FromBf16(const std::vector<uint16_t>& bits) {
  std::vector<float> values;
  for (const uint16_t value : bits) values.push_back(Bf16ToFloat(value));
  return values;
}

}  // namespace statetap::testing
