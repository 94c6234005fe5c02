// The fast backend: a GPU a rank, bf16 activations, fp32 accumulation. In builds with STATETAP_CUDA
// only. This header shows no CUDA type, so that any caller compiles without a toolkit.
#pragma once

#include <memory>
#include <vector>

#include "extractor/backend/backend.h"

namespace statetap {

struct CudaOptions {
  // Portable: mma.sync and cp.async, sm_80 and later. Hopper: wgmma and TMA, sm_90a.
  enum class Kernels { kAuto, kPortable, kHopper } kernels = Kernels::kAuto;
  // How ranks pass rows to each other: reading each other's memory, or NCCL. Auto: peer where the
  // GPUs can, NCCL otherwise. The bits are the same.
  enum class Comm { kAuto, kPeer, kNccl } comm = Comm::kAuto;
};

// GPUs that this process can use; 0 without a driver.
int NumGpus();
// NCCL was there when this was built.
bool HasNccl();

// `world` ranks as threads of this process. Rank r runs on GPU r mod NumGpus(): ranks may share
// one, but not over NCCL. Throws GpuError where a device fails or lacks what the kernels need.
std::vector<std::unique_ptr<Backend>> MakeCudaBackends(int world, const CudaOptions& options);

}  // namespace statetap
