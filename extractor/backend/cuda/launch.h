// Launches that may begin before the kernel in front of them on the stream has ended (programmatic
// dependent launch): its blocks come to the multiprocessors early and load weights, then wait. And
// what launches are sized by.
#pragma once

#include <cuda_runtime.h>

#include "extractor/backend/cuda/check.h"

namespace statetap::cuda {

#if defined(__CUDACC__)
// What earlier kernels of the stream wrote is there behind this line, and what they read may be
// written. Every kernel that LaunchEarly launches calls it, on all threads, before it touches
// memory that is not a weight.
__device__ inline void WaitForEarlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel's blocks may come as soon as this one's have all started.
__device__ inline void LetNextBegin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

// Of the thread's current device.
inline int Attribute(cudaDeviceAttr attribute) {
  int device, value;
  Check(cudaGetDevice(&device));
  Check(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
inline int Processors() { return Attribute(cudaDevAttrMultiProcessorCount); }
inline int SharedLimit() { return Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }  // bytes

// Whether the code that runs here was compiled with these two instructions. (Code for sm_80 runs on
// later GPUs too, without them: an early launch would be a race there.)
bool CanLaunchEarly();

template <typename... Params, typename... Args>
void LaunchEarly(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes,
                 cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = CanLaunchEarly() ? 1 : 0;
  Check(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

}  // namespace statetap::cuda
