// Which GPUs, joined how: makes the ranks.
#include "extractor/backend/cuda/cuda_backend.h"

#include <algorithm>
#include <set>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/rank.h"

namespace statetap::cuda {
namespace {

// Empty: every GPU reads every other's memory. Else which two do not.
std::string NoPeers(const std::vector<int>& devices) {
  const int used = *std::max_element(devices.begin(), devices.end()) + 1;
  for (int device = 0; device < used; ++device) {
    for (int peer = 0; peer < used; ++peer) {
      int can = 1;
      if (peer != device) Check(cudaDeviceCanAccessPeer(&can, device, peer));
      if (can == 0) {
        return "GPUs " + std::to_string(device) + " and " + std::to_string(peer) +
               " cannot read each other's memory";
      }
    }
  }
  return "";
}

void EnablePeers(const std::vector<int>& devices) {
  const int used = *std::max_element(devices.begin(), devices.end()) + 1;
  for (int device = 0; device < used; ++device) {
    Check(cudaSetDevice(device));
    for (int peer = 0; peer < used; ++peer) {
      if (peer == device) continue;
      const cudaError_t code = cudaDeviceEnablePeerAccess(peer, 0);
      if (code == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
      } else {
        Check(code);
      }
    }
  }
}

}  // namespace

std::shared_ptr<DeviceGroup> MakeGroup(const std::vector<int>& devices, CudaOptions::Comm comm) {
  const std::string no_peers = comm == CudaOptions::Comm::kNccl ? "" : NoPeers(devices);
  if (comm == CudaOptions::Comm::kAuto)
    comm = no_peers.empty() ? CudaOptions::Comm::kPeer : CudaOptions::Comm::kNccl;
  if (comm == CudaOptions::Comm::kPeer) {
    if (!no_peers.empty()) Fail("--comm peer: " + no_peers + "; --comm nccl needs no such access");
    EnablePeers(devices);
    const bool apart = std::set<int>(devices.begin(), devices.end()).size() == devices.size();
    return std::make_shared<PeerGroup>(static_cast<int>(devices.size()), apart);
  }
#ifdef STATETAP_NCCL
  return MakeNcclGroup(devices);
#else
  Fail("--comm nccl: this build has no NCCL" +
       (no_peers.empty() ? "; --comm peer needs none" : ", and " + no_peers));
#endif
}

}  // namespace statetap::cuda

namespace statetap {

int NumGpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

bool HasNccl() {
#ifdef STATETAP_NCCL
  return true;
#else
  return false;
#endif
}

std::vector<std::unique_ptr<Backend>> MakeCudaBackends(int world, const CudaOptions& options) {
  using cuda::Check;
  const int gpus = NumGpus();
  if (gpus == 0) cuda::Fail("no GPU can be used");
  std::vector<int> devices;
  for (int rank = 0; rank < world; ++rank) devices.push_back(rank % gpus);
  const std::shared_ptr<cuda::DeviceGroup> group = cuda::MakeGroup(devices, options.comm);
  std::vector<std::unique_ptr<Backend>> ranks;
  for (int rank = 0; rank < world; ++rank) {
    const int device = devices[static_cast<size_t>(rank)];
    Check(cudaSetDevice(device));
    ranks.push_back(std::make_unique<cuda::CudaBackend>(rank, device, group, options));
  }
  return ranks;
}

}  // namespace statetap
