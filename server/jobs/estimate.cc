#include "server/jobs/estimate.h"

#include <algorithm>

namespace statetap {
namespace {

constexpr int32_t kShortestColumn = 512;

double SecondsOf(const JobRecord& job) {
  const int64_t ended = job.ended_ms == 0 ? NowUnixMs() : job.ended_ms;
  return job.started_ms == 0 ? 0 : static_cast<double>(ended - job.started_ms) / 1000;
}

}  // namespace

void AnswerLengths::Lengths::Sort() {
  std::sort(lengths.begin(), lengths.end());
  sums.assign(1, 0);
  for (const int64_t length : lengths) sums.push_back(sums.back() + static_cast<double>(length));
}

AnswerLengths::Expected AnswerLengths::Lengths::At(int64_t room) const {
  const auto first_cut = std::upper_bound(lengths.begin(), lengths.end(), room);
  const auto whole = static_cast<size_t>(first_cut - lengths.begin());
  const auto cut = static_cast<double>(lengths.size() - whole);
  const auto count = static_cast<double>(lengths.size());
  return {(sums[whole] + cut * static_cast<double>(room)) / count, cut / count};
}

absl::StatusOr<AnswerLengths> AnswerLengths::OfJob(const JobStore& store, const JobRecord& job) {
  AnswerLengths lengths;
  constexpr int64_t kPage = 4096;
  for (int64_t after = -1;;) {
    STATETAP_ASSIGN_OR_RETURN(const auto page, store.Stored(job.key, after, kPage));
    for (const SampleListing& listing : page) {
      if (listing.stored.generated == 0) continue;
      lengths.all_.lengths.push_back(listing.stored.generated);
      lengths.capped_ += listing.stored.finish == "length" ? 1 : 0;
      lengths.by_source_[listing.sample.source].lengths.push_back(listing.stored.generated);
    }
    if (static_cast<int64_t>(page.size()) < kPage) break;
    after = page.back().sample.index;
  }
  if (lengths.answers() == 0) {
    return absl::FailedPreconditionError(
        fmt::format("pilot: job {} has no generated answer to learn lengths from", job.id));
  }
  lengths.all_.Sort();
  for (auto& [source, of_source] : lengths.by_source_) of_source.Sort();
  return lengths;
}

AnswerLengths::Expected AnswerLengths::Of(const std::string& source, int64_t room) const {
  const auto found = by_source_.find(source);
  return (found == by_source_.end() ? all_ : found->second).At(room);
}

absl::StatusOr<Estimator> Estimator::Begin(const JobStore& store, const ServedModel& model,
                                           const v1::JobOptions& options,
                                           const std::string& pilot) {
  STATETAP_ASSIGN_OR_RETURN(SampleAdmitter admitter, SampleAdmitter::Begin(model, options));
  Estimator estimator(store, model, std::move(admitter));
  if (pilot.empty()) return estimator;
  STATETAP_ASSIGN_OR_RETURN(estimator.pilot_, store.GetJob(pilot));
  if (options.mode() != v1::JOB_MODE_PREFILL) {
    STATETAP_ASSIGN_OR_RETURN(estimator.lengths_, AnswerLengths::OfJob(store, *estimator.pilot_));
  }
  return estimator;
}

absl::Status Estimator::Add(const SampleBatch& samples) {
  // Lengths are looked at later, for every column of the table.
  STATETAP_ASSIGN_OR_RETURN(const std::vector<SampleRow> rows,
                            admitter_.Admit(samples, Lengths::kIgnore));
  for (const SampleRow& row : rows) {
    const auto [seen, is_new_id] = seen_.emplace(row.id, Seen{row.digest, row.source_line});
    if (!is_new_id) {
      if (seen->second.digest == row.digest) continue;
      return DifferentContent(row.id, seen->second.line, row.source_line);
    }
    if (row.rejection) {
      ++refused_;
      continue;
    }
    const auto [source, is_new] =
        source_index_.emplace(row.source, static_cast<int>(sources_.size()));
    if (is_new) sources_.push_back(row.source);
    const int32_t most =
        row.max_new_tokens > 0 ? row.max_new_tokens : admitter_.plan().options.max_new_tokens();
    prompts_.push_back({static_cast<int32_t>(row.ids.size()), most, source->second});
  }
  return absl::OkStatus();
}

v1::LengthEstimate Estimator::At(int32_t max_length) const {
  v1::LengthEstimate out;
  out.set_max_length(max_length);
  out.set_rejected(refused_);
  double answers = 0, cut = 0;
  int64_t prompt_tokens = 0;
  for (const Prompt& prompt : prompts_) {
    const int64_t left = max_length - prompt.tokens;
    if (left < (admitter_.plan().text.generate ? 1 : 0)) {
      const bool truncates = !admitter_.plan().text.generate &&
                             admitter_.plan().options.too_long() == v1::TOO_LONG_TRUNCATE;
      if (truncates) {
        out.set_samples(out.samples() + 1);
        prompt_tokens += max_length;
        cut += 1;
      } else {
        out.set_rejected(out.rejected() + 1);
      }
      continue;
    }
    out.set_samples(out.samples() + 1);
    prompt_tokens += prompt.tokens;
    if (!admitter_.plan().text.generate) continue;
    const int64_t room =
        prompt.max_new_tokens > 0 ? std::min<int64_t>(left, prompt.max_new_tokens) : left;
    if (!lengths_) {
      answers += static_cast<double>(room);
      continue;
    }
    const AnswerLengths::Expected expected =
        lengths_->Of(sources_[static_cast<size_t>(prompt.source)], room);
    answers += expected.tokens;
    cut += expected.cut;
  }
  out.set_prompt_tokens(prompt_tokens);
  out.set_answer_tokens(answers);
  out.set_cut(cut);
  out.set_bytes(ShardBytes(admitter_.plan(), *model_, prompt_tokens + static_cast<int64_t>(answers),
                           out.samples()));
  return out;
}

// Of the pilot, else of the newest job of the same mode that has stored anything.
absl::Status Estimator::FindRate(v1::EstimateResponse& response) const {
  std::vector<JobRecord> jobs;
  if (pilot_) {
    jobs.push_back(*pilot_);
  } else {
    STATETAP_ASSIGN_OR_RETURN(jobs, store_->ListJobs());
  }
  for (const JobRecord& job : jobs) {
    v1::JobOptions options;
    if (!options.ParseFromString(job.options) || options.mode() != admitter_.plan().options.mode())
      continue;
    const double seconds = SecondsOf(job);
    if (job.tokens == 0 || seconds <= 0) continue;
    response.set_tokens_per_second(static_cast<double>(job.tokens) / seconds);
    response.set_rate_from(job.id);
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::EstimateResponse> Estimator::Finish(int64_t free_bytes) const {
  if (seen_.empty())
    return absl::InvalidArgumentError("samples: none came; there is nothing to estimate");
  v1::EstimateResponse response;
  STATETAP_RETURN_IF_ERROR(FindRate(response));
  const double rate = response.tokens_per_second();
  const auto at = [&](int32_t max_length) {
    v1::LengthEstimate estimate = At(max_length);
    const double tokens = static_cast<double>(estimate.prompt_tokens()) + estimate.answer_tokens();
    if (rate > 0) estimate.set_seconds(tokens / rate);
    return estimate;
  };
  *response.mutable_estimate() = at(admitter_.plan().options.max_length());
  for (int64_t length = kShortestColumn; length < model_->max_seq_len; length *= 2)
    *response.add_by_max_length() = at(static_cast<int32_t>(length));
  *response.add_by_max_length() = at(model_->max_seq_len);
  response.set_pilot_answers(lengths_ ? lengths_->answers() : 0);
  response.set_pilot_capped(lengths_ ? lengths_->capped() : 0);
  response.set_free_bytes(free_bytes);
  return response;
}

}  // namespace statetap
