#include "extractor/backend/cuda/gemm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "extractor/backend/cuda/check.h"
#include "extractor/base/once_map.h"

namespace statetap::cuda {
namespace {

constexpr int kCandidates = 16;
std::atomic<int64_t> num_met = 0;

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

// Numbers of rows that an algorithm is to be good at.
std::vector<int> TypicalRows(Phase phase) {
  switch (phase) {
    case Phase::kPrompt: return {2048, 8192, 32768};
    case Phase::kOwnRows: return {256, 1024, 4096};
    case Phase::kDecode: return {64};
  }
  return {};
}

// Memory that comes and goes without waiting for the device, where another rank may be waited for.
class Lent {
 public:
  Lent(int64_t bytes, cudaStream_t stream) : stream_(stream) {
    Check(cudaMallocAsync(&memory_, static_cast<size_t>(bytes), stream));
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  ~Lent() { cudaFreeAsync(memory_, stream_); }
  void* get() const { return memory_; }

 private:
  cudaStream_t stream_;
  void* memory_ = nullptr;
};

// Elements from the first to behind the last of a batch of matrices.
int64_t Extent(int64_t rows, int64_t stride, int64_t columns, int batch, int64_t batch_step) {
  return (rows - 1) * stride + columns + (batch - 1) * batch_step;
}

}  // namespace

Gemm::Gemm() : workspace_(kWorkspaceBytes) {
  cublasLtHandle_t handle;
  Check(cublasLtCreate(&handle));
  handle_.reset(handle);
  int device;
  Check(cudaGetDevice(&device));
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, device));
  gpu_ = properties.name;
}

std::vector<cublasLtMatmulAlgo_t> Gemm::Offered(const GemmParams& p, int most) const {
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
  Descriptors d(p, p.m);
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_.get(), &d.operation, &d.w, &d.x, &d.y, &d.y,
                                     &preference, most, results.data(), &found);
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  if (status != CUBLAS_STATUS_SUCCESS) return algorithms;
  for (int i = 0; i < found; ++i) algorithms.push_back(results[static_cast<size_t>(i)].algo);
  return algorithms;
}

Gemm::Plan Gemm::Choose(const GemmParams& params) const {
  // Those that run at every number of rows.
  using Rows = std::array<int, 7>;
  const Rows rows = params.phase == Phase::kDecode ? Rows{1, 2, 16, 37, 64, 256, kMaxDecodeRows}
                                                   : Rows{1, 2, 37, 256, 1000, 8192, 32768};
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (const int typical : TypicalRows(params.phase)) {
    GemmParams p = params;
    p.m = typical;
    for (const cublasLtMatmulAlgo_t& algorithm : Offered(p, kCandidates)) {
      const auto same = [&](const cublasLtMatmulAlgo_t& other) {
        return std::memcmp(&other, &algorithm, sizeof(algorithm)) == 0;
      };
      const auto runs = [&](int m) {
        Descriptors d(params, m);
        cublasLtMatmulHeuristicResult_t checked;
        return cublasLtMatmulAlgoCheck(handle_.get(), &d.operation, &d.w, &d.x, &d.y, &d.y,
                                       &algorithm, &checked) == CUBLAS_STATUS_SUCCESS &&
               checked.workspaceSize <= kWorkspaceBytes;
      };
      if (std::none_of(algorithms.begin(), algorithms.end(), same) &&
          std::all_of(rows.begin(), rows.end(), runs))
        algorithms.push_back(algorithm);
    }
  }
  if (algorithms.empty()) return {true, {}};
  // Rows that decode have kernels of their own in the sizes that matter.
  if (params.phase == Phase::kDecode || algorithms.size() == 1) return {false, algorithms[0]};
  // The least product of the times at these numbers of rows.
  std::vector<double> costs(algorithms.size(), 1);
  for (const int typical : TypicalRows(params.phase)) {
    GemmParams p = params;
    p.m = typical;
    const std::vector<float> took = Try(algorithms, p);
    for (size_t i = 0; i < costs.size(); ++i) costs[i] *= took[i];
  }
  const auto best = std::min_element(costs.begin(), costs.end()) - costs.begin();
  return {false, algorithms[static_cast<size_t>(best)]};
}

std::vector<float> Gemm::Try(const std::vector<cublasLtMatmulAlgo_t>& algorithms,
                             const GemmParams& params) const {
  constexpr int kRounds = 5, kRuns = 2;
  const Stream stream;
  const int64_t x_bytes =
                    Extent(params.m, params.x_stride, params.k, params.batch, params.x_batch) *
                    int64_t{sizeof(bf16)},
                y_bytes =
                    Extent(params.m, params.y_stride, params.n, params.batch, params.y_batch) *
                    static_cast<int64_t>(params.fp32_out ? sizeof(float) : sizeof(bf16));
  const Lent x(x_bytes, stream.get()), y(y_bytes, stream.get()),
      workspace(kWorkspaceBytes, stream.get());
  // The weights themselves again and again, as rows: a value that repeats takes less power.
  const int64_t w_bytes = Extent(params.w_by_k ? params.k : params.n, params.w_stride,
                                 params.w_by_k ? params.n : params.k, 1, 0) *
                          int64_t{sizeof(bf16)};
  for (int64_t done = 0; done < x_bytes; done += w_bytes) {
    Check(cudaMemcpyAsync(static_cast<std::byte*>(x.get()) + done, params.w,
                          static_cast<size_t>(std::min(w_bytes, x_bytes - done)),
                          cudaMemcpyDeviceToDevice, stream.get()));
  }
  Check(cudaMemsetAsync(y.get(), 0, static_cast<size_t>(y_bytes), stream.get()));
  GemmParams p = params;
  p.x = static_cast<const bf16*>(x.get());
  p.y = y.get();
  Event begin(/*timed=*/true), end(/*timed=*/true);
  std::vector<float> best(algorithms.size(), INFINITY);
  for (int round = 0; round <= kRounds; ++round) {
    for (size_t i = 0; i < algorithms.size(); ++i) {
      begin.Record(stream.get());
      for (int run = 0; run < kRuns; ++run) RunBy(algorithms[i], p, workspace.get(), stream.get());
      end.Record(stream.get());
      const float took = end.Since(begin);
      if (round > 0) best[i] = std::min(best[i], took);  // the first one loads kernels
    }
  }
  return best;
}

const Gemm::Plan& Gemm::PlanFor(const GemmParams& p, cudaStream_t stream) {
  const auto [align_w, align_x, align_y] = Alignments(p);
  const int flags = (p.w_by_k ? 1 : 0) | (p.fp32_out ? 2 : 0) | (p.accumulate ? 4 : 0) |
                    static_cast<int>(p.phase) << 3 |
                    static_cast<int>(align_w << 5 | align_x << 10 | align_y << 15);
  const Key key{p.n, p.k, p.x_stride, p.w_stride, p.y_stride, p.batch, p.x_batch, p.y_batch, flags};
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  // One rank tries and the others wait for its choice: on one GPU they would disturb each other.
  // What this rank has enqueued may be waiting for kernels of a rank that comes here to wait, so
  // that has to end first: whoever tries then waits for nobody.
  Check(cudaStreamSynchronize(stream));
  static OnceMap<std::pair<std::string, Key>, Plan> of_process;  // by kind of GPU
  const Plan plan = of_process.Get({gpu_, key}, [&] { return Choose(p); });
  ++num_met;
  return plans_.emplace(key, plan).first->second;
}

int64_t Gemm::NumMet() { return num_met; }

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
  const Plan& plan = PlanFor(p, stream);
  if (plan.plain) return PlainGemm(p, stream);
  RunBy(plan.algorithm, p, workspace_.as<void>(), stream);
}

void Gemm::RunBy(const cublasLtMatmulAlgo_t& algorithm, const GemmParams& p, void* workspace,
                 cudaStream_t stream) const {
  Descriptors d(p, p.m);
  const float one = 1, beta = p.accumulate ? 1 : 0;
  Check(cublasLtMatmul(handle_.get(), &d.operation, &one, p.w, &d.w, p.x, &d.x, &beta, p.y, &d.y,
                       p.y, &d.y, &algorithm, workspace, kWorkspaceBytes, stream));
}

}  // namespace statetap::cuda
