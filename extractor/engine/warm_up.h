// Steps that no sample asked for, so that no sample's step meets anything for the first time:
// algorithms to choose, kernels to load, memory to grow.
#pragma once

#include <vector>

#include "extractor/backend/step_plan.h"
#include "extractor/engine/scheduler.h"

namespace statetap {

// Prompts that fill a step, of as many sequences as run at once, and a step in which each of these
// decodes; then the same with half of the tokens and half of the sequences, and so on down to one.
// Pure; the pages are those that a new scheduler gives, to be run while no sequence has any.
// `longest`: tokens of a sequence that fit, at least 1. `boundaries`: captured in each step.
std::vector<StepPlan> WarmUpSteps(const Scheduler::Limits& limits, int longest, int vocab,
                                  const std::vector<int>& boundaries);

}  // namespace statetap
