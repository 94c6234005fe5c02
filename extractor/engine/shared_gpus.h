// More ranks than GPUs: that works, and is seldom meant.
#pragma once

#include <functional>
#include <string>

namespace statetap {

// What to warn of where `ranks` share `gpus`, with the most ranks that the model splits over
// (`splits`) and that have a GPU each. Empty: each has its own.
std::string SharedGpus(int ranks, int gpus, const std::function<bool(int ranks)>& splits);

}  // namespace statetap
