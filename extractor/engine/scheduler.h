// Which tokens run in the next step. Pure: no device, no thread.
//
// Sequences that decode come first, one token each, then prompts in the order of admission, in
// chunks that fill the step. KV pages are taken as a sequence grows; when they run out the youngest
// sequence gives its pages back and computes its rows again later (they were handed out already and
// are not handed out twice).
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "extractor/backend/backend.h"
#include "extractor/engine/hidden_state_sink.h"

namespace statetap {

struct Sequence {
  SampleTask task;
  std::vector<int32_t> tokens;  // prompt and answer so far
  std::optional<FinishReason>
      end;                // known once the last token is there; its own row is still to come
  int computed = 0;       // tokens whose keys are cached
  int handed_out = 0;     // rows that the sink has or gets next
  bool given_up = false;  // the sink has heard so: nothing more comes
  std::vector<int32_t> pages;
  bool complete() const { return end && computed == static_cast<int>(tokens.size()); }
};

// Part of a step: rows [first_row, first_row + count) are tokens [first_token, …) of the sequence.
struct ScheduledRows {
  std::shared_ptr<Sequence> sequence;
  int first_row, first_token, count;
  int first_logit = 0, num_logits = 0;  // logit rows of it
  int first_scored = 0;                 // the token that the first of them scores or draws
  bool samples = false;                 // its last logit row draws a token
};

struct ScheduledStep {
  StepPlan plan;
  std::vector<ScheduledRows> rows;
};

class Scheduler {
 public:
  struct Limits {
    int max_batch_tokens, max_running, num_pages;
  };
  explicit Scheduler(const Limits& limits);

  // True while the next step is not full and a short task would be in it.
  bool HasRoom() const;
  bool Idle() const { return running_.empty() && waiting_.empty(); }
  // REQUIRES: its longest form fits into the cache alone.
  void Admit(SampleTask task);
  // Rows for the next step; empty only when idle.
  ScheduledStep Next();
  // Gives up the sequence with this ticket; false where there is none. Its pages may be taken again
  // at the next Next().
  bool Remove(uint64_t ticket);
  // Takes back the sequences that are complete.
  std::vector<std::shared_ptr<Sequence>> TakeComplete();
  std::vector<uint64_t> Tickets() const;

 private:
  // Pages for the first `tokens` tokens of a sequence; false when there are not enough.
  bool Grow(Sequence& sequence, int tokens);
  void Release(Sequence& sequence);
  void StartWaiting();
  Sequence* PreemptYoungest();
  std::vector<std::pair<std::shared_ptr<Sequence>, int>> Choose();
  void Schedule(const std::shared_ptr<Sequence>& of, int count, ScheduledStep& step);

  Limits limits_;
  std::vector<int32_t> free_pages_;
  std::vector<std::shared_ptr<Sequence>> running_;  // in the order of admission
  std::deque<std::shared_ptr<Sequence>> waiting_;   // admitted, without pages
};

}  // namespace statetap
