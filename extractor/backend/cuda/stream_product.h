// Dense products of rows that decode, bf16: up to 16 rows the weights stream through the
// multiprocessors once, by mma.sync; above, tiles of both, by mma.sync or on Hopper wgmma.
//
// K is cut into kSegments of whole steps of 32; a segment is summed by the tensor cores in
// ascending order, the segments as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) in fp32. Neither
// depends on the number of rows or on the form that runs, so a row has the same bits in any
// company.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "extractor/backend/cuda/gemm.h"

namespace statetap::cuda {

inline constexpr int kSegments = 8;

// y[m][n] = sum over k of x[m][k] · w[n][k], w = rows of `w`, then rows of `w2`.
// kSwiGlu: y[m][n] = silu(w[n] · x[m]) · (w2[n] · x[m]).
enum class Epilogue { kBf16, kAdd, kFloat, kSwiGlu };  // kAdd: bf16 y += …
struct StreamProductParams {
  const bf16* x;  // [m, k], rows x_stride apart
  int64_t x_stride;
  const bf16* w;  // [n, k], rows w_stride apart
  const bf16* w2 = nullptr;
  int64_t w_stride;
  void* y;  // [m, n + n2], rows y_stride apart
  int64_t y_stride;
  int m, n, n2 = 0, k;  // kSwiGlu: n2 is not used
  Epilogue epilogue = Epilogue::kBf16;
  int batch = 1;
  int64_t x_batch = 0, w_batch = 0, y_batch = 0;  // elements between batch entries
};

// Whether shape and alignment suit: K in steps of 32, 16-byte rows.
bool Streamable(const StreamProductParams& params);

// Partial sums of one product at most: a wave of 132 of the widest tiles.
inline constexpr int kWideSums = 132 * 64 * 256;

// kHopper: the GPU has the instructions of sm_90a.
enum class Family { kPortable, kHopper };

// Room for products whose K several blocks share: partial sums and zeroed counters. One stream at a
// time. And which forms multiply more rows than 16.
class StreamWorkspace {
 public:
  explicit StreamWorkspace(Family family);
  Family family() const { return family_; }
  float* sums() const { return sums_.as<float>(); }
  int* arrived() const { return arrived_.as<int>(); }

 private:
  Family family_;
  DeviceBuffer sums_, arrived_;
};

// REQUIRES: Streamable(params).
void StreamProduct(const StreamProductParams& params, const StreamWorkspace& workspace,
                   cudaStream_t stream);

// Two products of as many rows in one launch: kFloat, then kSwiGlu. REQUIRES: both Streamable, no
// batch.
void StreamProductBoth(const StreamProductParams& first, const StreamProductParams& second,
                       const StreamWorkspace& workspace, cudaStream_t stream);

// The forms for more rows than 16 by wgmma (sm_90a): the same bits.
void HopperWideProduct(const StreamProductParams& params, const StreamWorkspace& workspace,
                       cudaStream_t stream);
void HopperWideProductBoth(const StreamProductParams& first, const StreamProductParams& second,
                           const StreamWorkspace& workspace, cudaStream_t stream);

}  // namespace statetap::cuda
