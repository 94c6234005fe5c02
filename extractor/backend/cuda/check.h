// A CUDA call that failed is a fault: it throws, with the caller's line. Seen by nvcc, so no fmt
// here.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <source_location>
#include <stdexcept>
#include <string>

namespace statetap::cuda {

class GpuError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void Fail(const std::string& what,
                       std::source_location where = std::source_location::current());

inline void Check(cudaError_t code, std::source_location where = std::source_location::current()) {
  if (code != cudaSuccess) Fail(std::string("CUDA: ") + cudaGetErrorString(code), where);
}

inline void Check(cublasStatus_t code,
                  std::source_location where = std::source_location::current()) {
  if (code != CUBLAS_STATUS_SUCCESS) Fail("cuBLASLt: status " + std::to_string(code), where);
}

// After a launch: was it refused?
inline void CheckLaunch(std::source_location where = std::source_location::current()) {
  Check(cudaGetLastError(), where);
}

}  // namespace statetap::cuda
