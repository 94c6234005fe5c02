#include "extractor/backend/cuda/step_graphs.h"

#include <algorithm>

#include "extractor/backend/cuda/check.h"
#include "extractor/base/log.h"

namespace statetap::cuda {
namespace {

constexpr size_t kMostKinds = 32;  // a graph takes some megabytes of the GPU

}  // namespace

int RoundedRows(int rows) {
  for (const int most : {1, 2, 4}) {
    if (rows <= most) return most;
  }
  const int step = rows <= 64 ? 8 : rows <= 128 ? 16 : 32;
  return (rows + step - 1) / step * step;
}

int RoundedPages(int pages) {
  int rounded = 8;
  while (rounded < pages) rounded *= 2;
  return rounded;
}

bool OnlyDecodes(const StepPlan& plan) {
  const auto rows = plan.ids.size();
  if (rows == 0 || plan.logit_rows.size() != rows) return false;
  std::vector<uint8_t> met(static_cast<size_t>(plan.num_seqs), 0);
  for (size_t t = 0; t < rows; ++t) {
    const auto sequence = static_cast<size_t>(plan.sequence[t]);
    if (sequence >= plan.decodes.size() || plan.decodes[sequence] == 0 || met[sequence] != 0 ||
        plan.logit_rows[t] != static_cast<int32_t>(t))
      return false;
    met[sequence] = 1;
  }
  return true;
}

void RoundUp(const StepPlan& plan, int max_rows, StepPlan& rounded) {
  const int rows = std::max(plan.num_tokens(), std::min(RoundedRows(plan.num_tokens()), max_rows));
  const auto count = static_cast<size_t>(rows);
  const auto pages = static_cast<size_t>(plan.pages_per_seq);
  rounded = {};
  rounded.num_seqs = rows;
  rounded.pages_per_seq = RoundedPages(plan.pages_per_seq);
  const auto stride = static_cast<size_t>(rounded.pages_per_seq);
  rounded.page_table.assign(count * stride, -1);
  rounded.decodes.assign(count, 1);
  rounded.boundaries = plan.boundaries;
  for (size_t t = 0; t < count; ++t) {
    const size_t from = std::min(t, plan.ids.size() - 1);
    rounded.ids.push_back(plan.ids[from]);
    rounded.positions.push_back(plan.positions[from]);
    rounded.sequence.push_back(static_cast<int32_t>(t));
    rounded.logit_rows.push_back(static_cast<int32_t>(t));
    rounded.draws.push_back(plan.draws[from]);
    const auto table = plan.page_table.begin() +
                       static_cast<int64_t>(static_cast<size_t>(plan.sequence[from]) * pages);
    std::copy_n(table, pages, rounded.page_table.begin() + static_cast<int64_t>(t * stride));
  }
}

void StepGraphs::Destroy::operator()(CUgraphExec_st* graph) const {
  const cudaError_t code = cudaGraphExecDestroy(graph);
  if (code != cudaSuccess && code != cudaErrorCudartUnloading)
    LogError("cudaGraphExecDestroy: {}", cudaGetErrorString(code));
}

StepGraphs::Mode StepGraphs::Begin(const Kind& kind, cudaStream_t stream) {
  if (steps_.size() >= kMostKinds && !steps_.contains(kind)) Clear();
  current_ = &steps_[kind];
  if (current_->graph != nullptr) return Mode::kReplay;
  if (++current_->seen == 1) return Mode::kRun;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  return Mode::kRecord;
}

void StepGraphs::Launch(cudaStream_t stream) {
  if (current_->graph == nullptr) {
    cudaGraph_t recorded = nullptr;
    Check(cudaStreamEndCapture(stream, &recorded));
    cudaGraphExec_t graph = nullptr;
    const cudaError_t code = cudaGraphInstantiate(&graph, recorded, 0);
    (void)cudaGraphDestroy(recorded);
    Check(code);
    current_->graph.reset(graph);
  }
  Check(cudaGraphLaunch(current_->graph.get(), stream));
}

void StepGraphs::Clear() {
  current_ = nullptr;
  steps_.clear();
}

}  // namespace statetap::cuda
