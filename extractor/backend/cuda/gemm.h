// Dense products by cuBLASLt: bf16 in, fp32 accumulation, bf16 or fp32 out.
//
// Algorithms are pinned: a shape gets one for the rows of prompts and one for rows that decode,
// chosen when the shape is first seen. A pinned algorithm with its fixed split of K gives a row the
// same bits whatever the number of rows, so within a phase a row does not depend on the step it
// runs in. For prompts the fastest of those that cuBLASLt offers is chosen, by trying them on
// memory of their own: one rank tries, and its choice holds for all ranks of the process on GPUs of
// this kind, as rows that two ranks compute must get the same bits. That takes seconds for a
// model's shapes: the engine has all of them met while it loads. Shapes that cuBLASLt does not take
// (odd sizes) run on a plain kernel.
#pragma once

#include <cublasLt.h>
#include <cuda_bf16.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "extractor/backend/cuda/owners.h"

namespace statetap::cuda {

using bf16 = __nv_bfloat16;

// What an algorithm is chosen for: the rows of a step of prompts, those of them whose residual
// stream this rank keeps, or rows that decode. Any number of rows runs in each; decoding rows go
// kMaxDecodeRows at a time, as a split of K wants room for each.
enum class Phase { kPrompt, kOwnRows, kDecode };
inline constexpr int kMaxDecodeRows = 512;

// For each batch entry: y[m][n] (+)= sum over k of x[m][k] · w[n][k], or · w[k][n].
struct GemmParams {
  const bf16* x;  // [m, k], rows x_stride apart
  int64_t x_stride;
  const bf16* w;  // [n, k], or [k, n] if w_by_k; rows w_stride apart
  int64_t w_stride;
  void* y;  // [m, n], rows y_stride apart
  int64_t y_stride;
  int m, n, k;
  bool w_by_k = false;
  bool fp32_out = false;
  bool accumulate = false;
  Phase phase = Phase::kPrompt;
  int batch = 1;
  int64_t x_batch = 0, w_batch = 0, y_batch = 0;  // elements between batch entries
};

// The plain kernel: one thread a value, k in ascending order.
void PlainGemm(const GemmParams& params, cudaStream_t stream);

class Gemm {
 public:
  Gemm();
  // Enqueues on `stream`; one stream at a time, as the workspace is shared.
  void Run(const GemmParams& params, cudaStream_t stream);

  // Shapes that the Gemms of this process have met so far, each counting its own: where none is
  // added nothing was chosen.
  static int64_t NumMet();

  // What cuBLASLt offers for params.m rows, best guess first, at most `most`; and a run by one.
  std::vector<cublasLtMatmulAlgo_t> Offered(const GemmParams& params, int most) const;
  void RunBy(const cublasLtMatmulAlgo_t& algorithm, const GemmParams& params, void* workspace,
             cudaStream_t stream) const;
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

 private:
  // Everything but m that an algorithm depends on. Of w_batch that is its alignment.
  using Key = std::tuple<int, int, int64_t, int64_t, int64_t, int, int64_t, int64_t, int>;
  struct Plan {
    bool plain = false;
    cublasLtMatmulAlgo_t algorithm;
  };
  using Plans = std::map<Key, Plan>;
  void RunOnce(const GemmParams& params, cudaStream_t stream);
  // Waits for `stream` and for the choice where this rank meets the shape for the first time.
  const Plan& PlanFor(const GemmParams& params, cudaStream_t stream);
  Plan Choose(const GemmParams& params) const;
  // Milliseconds of a few runs by each, on memory of their own.
  std::vector<float> Try(const std::vector<cublasLtMatmulAlgo_t>& algorithms,
                         const GemmParams& params) const;

  struct Destroy {
    void operator()(cublasLtContext* handle) const { cublasLtDestroy(handle); }
  };
  std::unique_ptr<cublasLtContext, Destroy> handle_;
  DeviceBuffer workspace_;
  std::string gpu_;  // its kind
  Plans plans_;      // of those of the process that this rank has met
};

}  // namespace statetap::cuda
