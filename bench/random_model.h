// Kimi-K2.5 at full width with random weights, made on the devices: a checkpoint of it is 595 GB.
#pragma once

#include "extractor/model/layout.h"
#include "extractor/model/weights.h"

namespace statetap::bench {

ModelConfig KimiK25(int layers);

// The weights of rank `rank`, random INT4 experts and bf16 matrices, on a CUDA backend whose device
// is current. What every rank has whole is the same on each of them.
ModelWeights RandomWeights(Backend& backend, const ModelConfig& config,
                           const ParallelLayout& layout, int rank);

}  // namespace statetap::bench
