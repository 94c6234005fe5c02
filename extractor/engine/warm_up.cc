#include "extractor/engine/warm_up.h"

#include <algorithm>
#include <utility>

namespace statetap {

std::vector<StepPlan> WarmUpSteps(const Scheduler::Limits& limits, int longest, int vocab,
                                  const std::vector<int>& boundaries) {
  std::vector<StepPlan> plans;
  int sequences = std::min({limits.max_running, limits.max_batch_tokens, limits.num_pages});
  for (int tokens = limits.max_batch_tokens; tokens > 0; tokens /= 2) {
    // Tokens of one, in the pages that each has for itself; the last one is drawn.
    const auto room = static_cast<int>(
        std::min<int64_t>(longest, int64_t{limits.num_pages / sequences} * kPageTokens));
    Scheduler scheduler(limits);
    int next = 0;
    for (int i = 0; i < sequences; ++i) {
      const int share = tokens / sequences + (i < tokens % sequences ? 1 : 0);
      SampleTask task;
      for (int t = std::min(share, std::max(1, room - 1)); t > 0; --t)
        task.input_ids.push_back(next++ % vocab);  // all different, so that many experts are met
      task.generate = room > 1;
      task.boundaries = boundaries;
      scheduler.Admit(std::move(task));
    }
    ScheduledStep prompts = scheduler.Next();
    plans.push_back(std::move(prompts.plan));
    for (const ScheduledRows& rows : prompts.rows) {
      rows.sequence->computed = rows.count;
      rows.sequence->tokens.push_back(0);
    }
    if (room > 1) plans.push_back(scheduler.Next().plan);
    sequences = std::max(1, sequences / 2);
  }
  return plans;
}

}  // namespace statetap
