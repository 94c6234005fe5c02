#include "extractor/backend/cuda/gemm.h"

#include <algorithm>
#include <array>

#include "extractor/backend/cuda/check.h"

namespace statetap::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr int kCandidates = 16;

// Descriptors on the stack: making them is cheaper than keeping them by m.
struct Descriptors {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t w, x, y;

  // cuBLASLt is column-major: yᵀ [n, m] = wᵀ-or-w · xᵀ.
  Descriptors(const GemmParams& p, int m) {
    Check(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t op_w = p.w_by_k ? CUBLAS_OP_N : CUBLAS_OP_T;
    Check(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_w,
                                         sizeof(op_w)));
    const auto n = static_cast<uint64_t>(p.n), k = static_cast<uint64_t>(p.k);
    Check(
        cublasLtMatrixLayoutInit(&w, CUDA_R_16BF, p.w_by_k ? n : k, p.w_by_k ? k : n, p.w_stride));
    Check(cublasLtMatrixLayoutInit(&x, CUDA_R_16BF, k, static_cast<uint64_t>(m), p.x_stride));
    Check(cublasLtMatrixLayoutInit(&y, p.fp32_out ? CUDA_R_32F : CUDA_R_16BF, n,
                                   static_cast<uint64_t>(m), p.y_stride));
    if (p.batch == 1) return;
    SetBatch(w, p.batch, p.w_batch);
    SetBatch(x, p.batch, p.x_batch);
    SetBatch(y, p.batch, p.y_batch);
  }

 private:
  static void SetBatch(cublasLtMatrixLayoutOpaque_t& layout, int32_t count, int64_t stride) {
    Check(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                           sizeof(count)));
    Check(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                           &stride, sizeof(stride)));
  }
};

// The largest power of two, at most 16, that divides a pointer and the byte steps from it.
uint32_t Alignment(const void* pointer, int64_t stride_bytes, int64_t batch_bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(pointer) | static_cast<uintptr_t>(stride_bytes) |
                    static_cast<uintptr_t>(batch_bytes) | 16u;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

std::array<uint32_t, 3> Alignments(const GemmParams& p) {
  const int64_t out = p.fp32_out ? 4 : 2;
  return {Alignment(p.w, p.w_stride * 2, p.w_batch * 2),
          Alignment(p.x, p.x_stride * 2, p.x_batch * 2),
          Alignment(p.y, p.y_stride * out, p.y_batch * out)};
}

int TypicalRows(Phase phase) {
  switch (phase) {
    case Phase::kPrompt: return 8192;
    case Phase::kOwnRows: return 1024;
    case Phase::kDecode: return 64;
  }
  return 0;
}

}  // namespace

Gemm::Gemm() : workspace_(kWorkspaceBytes) {
  cublasLtHandle_t handle;
  Check(cublasLtCreate(&handle));
  handle_.reset(handle);
}

Gemm::Plan Gemm::Choose(const GemmParams& p) const {
  cublasLtMatmulPreferenceOpaque_t preference;
  Check(cublasLtMatmulPreferenceInit(&preference));
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    Check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  const auto [align_w, align_x, align_y] = Alignments(p);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align_w);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align_x);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align_y);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align_y);

  Descriptors typical(p, TypicalRows(p.phase));
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> results;
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle_.get(), &typical.operation, &typical.w, &typical.x, &typical.y, &typical.y,
      &preference, kCandidates, results.data(), &found);
  if (status != CUBLAS_STATUS_SUCCESS) found = 0;
  // The first that runs at every number of rows.
  using Rows = std::array<int, 7>;
  const Rows rows = p.phase == Phase::kDecode ? Rows{1, 2, 16, 37, 64, 256, kMaxDecodeRows}
                                              : Rows{1, 2, 37, 256, 1000, 8192, 32768};
  for (int i = 0; i < found; ++i) {
    const auto& candidate = results[static_cast<size_t>(i)];
    const auto runs = [&](int m) {
      Descriptors d(p, m);
      cublasLtMatmulHeuristicResult_t checked;
      return cublasLtMatmulAlgoCheck(handle_.get(), &d.operation, &d.w, &d.x, &d.y, &d.y,
                                     &candidate.algo, &checked) == CUBLAS_STATUS_SUCCESS &&
             checked.workspaceSize <= kWorkspaceBytes;
    };
    if (std::all_of(rows.begin(), rows.end(), runs)) return {false, candidate.algo};
  }
  return {true, {}};
}

const Gemm::Plan& Gemm::PlanFor(const GemmParams& p) {
  const auto [align_w, align_x, align_y] = Alignments(p);
  const int flags = (p.w_by_k ? 1 : 0) | (p.fp32_out ? 2 : 0) | (p.accumulate ? 4 : 0) |
                    static_cast<int>(p.phase) << 3 |
                    static_cast<int>(align_w << 5 | align_x << 10 | align_y << 15);
  const Key key{p.n, p.k, p.x_stride, p.w_stride, p.y_stride, p.batch, p.x_batch, p.y_batch, flags};
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  return plans_.emplace(key, Choose(p)).first->second;
}

void Gemm::Run(const GemmParams& params, cudaStream_t stream) {
  GemmParams p = params;
  for (int left = params.m; left > 0; left -= p.m) {
    p.m = p.phase == Phase::kDecode ? std::min(left, kMaxDecodeRows) : left;
    RunOnce(p, stream);
    p.x += p.m * p.x_stride;
    const auto element = static_cast<int64_t>(p.fp32_out ? sizeof(float) : sizeof(bf16));
    p.y = static_cast<std::byte*>(p.y) + p.m * p.y_stride * element;
  }
}

void Gemm::RunOnce(const GemmParams& p, cudaStream_t stream) {
  if (p.n == 0 || p.batch == 0) return;
  const Plan& plan = PlanFor(p);
  if (plan.plain) return PlainGemm(p, stream);
  Descriptors d(p, p.m);
  const float one = 1, beta = p.accumulate ? 1 : 0;
  Check(cublasLtMatmul(handle_.get(), &d.operation, &one, p.w, &d.w, p.x, &d.x, &beta, p.y, &d.y,
                       p.y, &d.y, &plan.algorithm, workspace_.as<void>(), kWorkspaceBytes, stream));
}

}  // namespace statetap::cuda
