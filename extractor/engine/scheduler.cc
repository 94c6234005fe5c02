#include "extractor/engine/scheduler.h"

#include <algorithm>
#include <set>

namespace statetap {
namespace {

int PagesFor(int tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

// Logit rows of tokens [first, first + count): scores of given tokens, then a draw after the last.
void AddLogitRows(const Sequence& sequence, ScheduledRows& rows, StepPlan& plan) {
  const SampleTask& task = sequence.task;
  rows.first_logit = static_cast<int>(plan.logit_rows.size());
  const auto add = [&](int token, int32_t given) {
    if (plan.logit_rows.size() == static_cast<size_t>(rows.first_logit))
      rows.first_scored = token + 1;
    plan.logit_rows.push_back(rows.first_row + token - rows.first_token);
    plan.draws.push_back({task.sampling.temperature, task.sampling.top_p, task.sampling.seed,
                          task.sampling.key, token + 1, given});
  };
  const int end = rows.first_token + rows.count, given = static_cast<int>(task.input_ids.size());
  if (task.generate ? task.prompt_scores : task.token_scores) {
    for (int token = std::max(rows.first_token, sequence.handed_out);
         token < std::min(end, given - 1); ++token) {
      add(token, task.input_ids[static_cast<size_t>(token) + 1]);
    }
  }
  rows.samples = task.generate && !sequence.end && end == static_cast<int>(sequence.tokens.size());
  if (rows.samples) add(end - 1, -1);
  rows.num_logits = static_cast<int>(plan.logit_rows.size()) - rows.first_logit;
}

}  // namespace

Scheduler::Scheduler(const Limits& limits) : limits_(limits) {
  for (int page = limits.num_pages - 1; page >= 0; --page) free_pages_.push_back(page);
}

bool Scheduler::HasRoom() const {
  if (!waiting_.empty() || static_cast<int>(running_.size()) >= limits_.max_running) return false;
  size_t left = 0;
  for (const auto& sequence : running_)
    left += sequence->tokens.size() - static_cast<size_t>(sequence->computed);
  return left < static_cast<size_t>(limits_.max_batch_tokens);
}

void Scheduler::Admit(SampleTask task) {
  auto sequence = std::make_shared<Sequence>();
  sequence->tokens = task.input_ids;
  if (!task.generate) sequence->end = FinishReason::kPrefill;
  sequence->task = std::move(task);
  waiting_.push_back(std::move(sequence));
  StartWaiting();
}

bool Scheduler::Grow(Sequence& sequence, int tokens) {
  const int wanted = PagesFor(tokens) - static_cast<int>(sequence.pages.size());
  if (wanted > static_cast<int>(free_pages_.size())) return false;
  for (int i = 0; i < wanted; ++i) {
    sequence.pages.push_back(free_pages_.back());
    free_pages_.pop_back();
  }
  return true;
}

void Scheduler::Release(Sequence& sequence) {
  free_pages_.insert(free_pages_.end(), sequence.pages.rbegin(), sequence.pages.rend());
  sequence.pages.clear();
  sequence.computed = 0;
}

void Scheduler::StartWaiting() {
  // Room for all that is known of it, and of those that started before, and one token more of each,
  // so that starting it does not push another one out at once.
  const auto wants = [](const Sequence& sequence) {
    return PagesFor(static_cast<int>(sequence.tokens.size()) + 1) -
           static_cast<int>(sequence.pages.size());
  };
  int free = static_cast<int>(free_pages_.size());
  for (const auto& sequence : running_) free -= wants(*sequence);
  while (!waiting_.empty() && static_cast<int>(running_.size()) < limits_.max_running) {
    free -= wants(*waiting_.front());
    if (!running_.empty() && free < 0) return;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

Sequence* Scheduler::PreemptYoungest() {
  Release(*running_.back());
  waiting_.push_front(std::move(running_.back()));
  running_.pop_back();
  return waiting_.front().get();
}

void Scheduler::Schedule(const std::shared_ptr<Sequence>& of, int count, ScheduledStep& step) {
  const Sequence& sequence = *of;
  StepPlan& plan = step.plan;
  ScheduledRows rows{of, plan.num_tokens(), sequence.computed, count};
  for (int i = 0; i < count; ++i) {
    plan.ids.push_back(sequence.tokens[static_cast<size_t>(sequence.computed + i)]);
    plan.positions.push_back(sequence.computed + i);
    plan.sequence.push_back(plan.num_seqs);
  }
  ++plan.num_seqs;
  const bool drawn = sequence.computed >= static_cast<int>(sequence.task.input_ids.size());
  plan.decodes.push_back(drawn && count == 1);
  AddLogitRows(sequence, rows, plan);
  step.rows.push_back(rows);
}

// How many tokens of which sequence run next, pages taken. First those that decode, then those that
// read their prompt.
std::vector<std::pair<std::shared_ptr<Sequence>, int>> Scheduler::Choose() {
  std::vector<std::pair<std::shared_ptr<Sequence>, int>> chosen;
  int budget = limits_.max_batch_tokens;
  for (const bool decodes : {true, false}) {
    for (size_t i = 0; i < running_.size() && budget > 0;
         ++i) {  // by index: the youngest may leave on the way
      const std::shared_ptr<Sequence> sequence = running_[i];
      const int left = static_cast<int>(sequence->tokens.size()) - sequence->computed;
      if (left == 0 || (left == 1) != decodes) continue;
      const int count = std::min(left, budget);
      bool fits = Grow(*sequence, sequence->computed + count);
      while (!fits && running_.back() != sequence) {
        Sequence* youngest = PreemptYoungest();
        const auto found = std::find_if(chosen.begin(), chosen.end(),
                                        [&](const auto& c) { return c.first.get() == youngest; });
        if (found != chosen.end()) {
          budget += found->second;
          chosen.erase(found);
        }
        fits = Grow(*sequence, sequence->computed + count);
      }
      if (!fits) continue;
      chosen.emplace_back(sequence, count);
      budget -= count;
    }
  }
  return chosen;
}

ScheduledStep Scheduler::Next() {
  StartWaiting();
  ScheduledStep step;
  for (const auto& [sequence, count] : Choose()) Schedule(sequence, count, step);
  StepPlan& plan = step.plan;
  std::set<int> boundaries;
  size_t pages = 0;
  for (const ScheduledRows& rows : step.rows) {
    boundaries.insert(rows.sequence->task.boundaries.begin(), rows.sequence->task.boundaries.end());
    pages = std::max(pages, rows.sequence->pages.size());
  }
  plan.boundaries.assign(boundaries.begin(), boundaries.end());
  plan.pages_per_seq = static_cast<int>(pages);
  for (const ScheduledRows& rows : step.rows) {
    plan.page_table.insert(plan.page_table.end(), rows.sequence->pages.begin(),
                           rows.sequence->pages.end());
    plan.page_table.resize(plan.page_table.size() + pages - rows.sequence->pages.size(), -1);
  }
  return step;
}

bool Scheduler::Remove(uint64_t ticket) {
  const auto has = [&](const auto& sequence) { return sequence->task.ticket == ticket; };
  if (const auto found = std::find_if(running_.begin(), running_.end(), has);
      found != running_.end()) {
    Release(**found);
    (*found)->given_up = true;
    running_.erase(found);
    return true;
  }
  const auto found = std::find_if(waiting_.begin(), waiting_.end(), has);
  if (found == waiting_.end()) return false;
  (*found)->given_up = true;
  waiting_.erase(found);
  return true;
}

std::vector<std::shared_ptr<Sequence>> Scheduler::TakeComplete() {
  std::vector<std::shared_ptr<Sequence>> complete;
  for (auto& sequence : running_) {
    if (!sequence->complete()) continue;
    Release(*sequence);
    complete.push_back(std::move(sequence));
  }
  std::erase(running_, nullptr);
  return complete;
}

std::vector<uint64_t> Scheduler::Tickets() const {
  std::vector<uint64_t> tickets;
  for (const auto& sequence : running_) tickets.push_back(sequence->task.ticket);
  for (const auto& sequence : waiting_) tickets.push_back(sequence->task.ticket);
  return tickets;
}

}  // namespace statetap
