// Steps that only decode, as CUDA graphs: a layer is some twenty small kernels, and launching them
// one by one takes the host longer than they run.
//
// A kind of step (how many rows, how wide a page table, which boundaries) runs plainly the first
// time, so that what is made on first use is made; the second time it is recorded, and launched as
// a graph from then on. What differs between steps of a kind lies in memory at fixed addresses.
#pragma once

#include <cuda_runtime.h>

#include <compare>
#include <map>
#include <memory>
#include <vector>

#include "extractor/backend/step_plan.h"

namespace statetap::cuda {

// Rows and page-table width that a step is rounded up to, so that there are few kinds.
int RoundedRows(int rows);
int RoundedPages(int pages);

// Whether every row is a token that was just drawn, each of another sequence and each sampled from.
bool OnlyDecodes(const StepPlan& plan);

// `plan` with RoundedRows rows (at most max_rows), a sequence each, and a page table of
// RoundedPages: the rows that are added are the last one again, so they write what it writes.
// REQUIRES: OnlyDecodes(plan).
void RoundUp(const StepPlan& plan, int max_rows, StepPlan& rounded);

class StepGraphs {
 public:
  struct Kind {
    int rows, pages_per_seq;
    std::vector<int> boundaries;
    auto operator<=>(const Kind&) const = default;
  };
  enum class Mode { kRun, kRecord, kReplay };

  // What to do with the ops of this step. kRecord: they are recorded from here on.
  Mode Begin(const Kind& kind, cudaStream_t stream);
  // After the ops: launches what was recorded, now or earlier.
  void Launch(cudaStream_t stream);
  // Forgets all: memory has moved. A recording that was not launched is dropped.
  void Clear();

 private:
  struct Destroy {
    void operator()(CUgraphExec_st* graph) const;
  };
  struct Step {
    int seen = 0;
    std::unique_ptr<CUgraphExec_st, Destroy> graph;
  };
  std::map<Kind, Step> steps_;
  Step* current_ = nullptr;
};

}  // namespace statetap::cuda
