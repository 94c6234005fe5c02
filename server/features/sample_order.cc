#include "server/features/sample_order.h"

#include <algorithm>
#include <array>
#include <utility>

#include "extractor/base/digest.h"

namespace statetap {
namespace {

constexpr int64_t kPage = 256;
constexpr int64_t kBigPage = 4096;

// Spreads the samples evenly and depends on the seed and the sample alone: leaving one out does not
// move the others.
uint64_t ShuffleKey(uint64_t seed, const OrderedSample& sample) {
  const std::array<uint64_t, 3> of = {seed, sample.job, static_cast<uint64_t>(sample.sample.index)};
  return Xxh3Of(std::as_bytes(std::span(of)));
}

absl::StatusOr<std::vector<JobRecord>> JobsOf(const JobStore& store, const v1::StreamStart& start) {
  std::vector<std::string> names(start.jobs().begin(), start.jobs().end());
  if (names.empty()) names.push_back(start.job());
  if (!start.job().empty() && !start.jobs().empty())
    return absl::InvalidArgumentError("jobs: give either job or jobs, not both");
  std::vector<JobRecord> jobs;
  for (const std::string& name : names) {
    STATETAP_ASSIGN_OR_RETURN(JobRecord job, store.GetJob(name));
    const bool again =
        std::ranges::any_of(jobs, [&](const JobRecord& known) { return known.key == job.key; });
    if (again) return absl::InvalidArgumentError(fmt::format("jobs: {} is named twice", name));
    jobs.push_back(std::move(job));
  }
  return jobs;
}

absl::Status CheckSplit(const v1::StreamStart& start) {
  const int world = start.world(), rank = start.rank();
  if (world < 0)
    return absl::InvalidArgumentError(
        fmt::format("world: {} is not possible; give the number of ranks", world));
  if (rank < 0 || rank >= std::max(world, 1)) {
    return absl::InvalidArgumentError(fmt::format("rank: {} is not in 0 to {}, one less than world",
                                                  rank, std::max(world, 1) - 1));
  }
  return absl::OkStatus();
}

}  // namespace

std::string GroupOf(const std::string& group) { return group.empty() ? "default" : group; }

absl::StatusOr<SampleOrder> SampleOrder::Of(const JobStore& store, const v1::StreamStart& start) {
  SampleOrder order(store);
  STATETAP_RETURN_IF_ERROR(CheckSplit(start));
  if (start.order() < 0 || start.order() > v1::STREAM_ORDER_SHUFFLED)
    return absl::InvalidArgumentError(
        fmt::format("order: {} is unknown; stored (1) or shuffled (2)", +start.order()));
  auto where = SampleFilter::Parse(start.where());
  if (!where.ok()) return WithContext(where.status(), "where");
  order.where_ = *std::move(where);
  STATETAP_ASSIGN_OR_RETURN(order.jobs_, JobsOf(store, start));
  order.group_ = GroupOf(start.group());
  order.follow_ = start.follow();
  order.shuffled_ = start.order() == v1::STREAM_ORDER_SHUFFLED;
  order.equal_counts_ = start.equal_counts();
  order.seed_ = start.seed();
  order.rank_ = start.rank();
  order.world_ = std::max(start.world(), 1);
  return order;
}

absl::StatusOr<bool> SampleOrder::AllEnded() const {
  for (const JobRecord& job : jobs_) {
    STATETAP_ASSIGN_OR_RETURN(const JobRecord now, store_->GetJob(job.key));
    if (!HasEnded(now.state)) return false;
  }
  return true;
}

absl::StatusOr<std::vector<IndexedSample>> SampleOrder::Page(size_t job, int64_t shard, int64_t row,
                                                             int64_t limit) const {
  return store_->InStoredOrder(jobs_[job].key, group_, shard, row, limit, where_);
}

absl::StatusOr<SampleOrder::Part> SampleOrder::Collect() const {
  std::vector<OrderedSample> all;
  for (size_t job = 0; job < jobs_.size(); ++job) {
    int64_t shard = 0, row = -1;
    while (true) {
      STATETAP_ASSIGN_OR_RETURN(const auto page, Page(job, shard, row, kBigPage));
      if (page.empty()) break;
      for (const IndexedSample& sample : page) all.push_back({job, sample});
      shard = page.back().shard;
      row = page.back().row;
    }
  }
  if (shuffled_) {
    const auto key = [&](const OrderedSample& sample) {
      return std::tuple(ShuffleKey(seed_, sample), sample.job, sample.sample.index);
    };
    std::ranges::sort(all, {}, key);
  }
  Part part;
  const auto count = static_cast<int64_t>(all.size());
  part.left_out = equal_counts_ ? count % world_ : 0;
  for (int64_t place = 0; place < count - part.left_out; ++place) {
    if (IsMine(place)) part.samples.push_back(all[static_cast<size_t>(place)]);
  }
  return part;
}

absl::StatusOr<std::vector<OrderedSample>> SampleOrder::Next() {
  return needs_all() ? NextOfAll() : NextAsStored();
}

absl::StatusOr<std::vector<OrderedSample>> SampleOrder::NextOfAll() {
  if (!all_) {
    STATETAP_ASSIGN_OR_RETURN(const bool ended, AllEnded());
    if (follow_ && !ended) return std::vector<OrderedSample>();
    STATETAP_ASSIGN_OR_RETURN(Part part, Collect());
    all_ = std::move(part.samples);
  }
  std::vector<OrderedSample> next;
  while (next_of_all_ < all_->size() && static_cast<int64_t>(next.size()) < kPage) {
    const OrderedSample& sample = (*all_)[next_of_all_++];
    if (!sample.sample.acknowledged) next.push_back(sample);
  }
  if (next.empty()) job_ = jobs_.size();
  return next;
}

absl::StatusOr<std::vector<OrderedSample>> SampleOrder::NextAsStored() {
  std::vector<OrderedSample> next;
  while (next.empty() && job_ < jobs_.size()) {
    // Ended is looked at before the last look for samples: none can come between.
    STATETAP_ASSIGN_OR_RETURN(const JobRecord now, store_->GetJob(jobs_[job_].key));
    STATETAP_ASSIGN_OR_RETURN(const auto page, Page(job_, shard_, row_, kPage));
    for (const IndexedSample& sample : page) {
      if (IsMine(place_++) && !sample.acknowledged) next.push_back({job_, sample});
      shard_ = sample.shard;
      row_ = sample.row;
    }
    if (!page.empty()) continue;
    if (follow_ && !HasEnded(now.state)) break;
    ++job_;
    shard_ = 0;
    row_ = -1;
  }
  return next;
}

void SampleOrder::Rewind() {
  job_ = 0;
  shard_ = 0;
  row_ = -1;
  place_ = 0;
  next_of_all_ = 0;
}

absl::StatusOr<v1::StreamDescription> SampleOrder::Describe() const {
  v1::StreamDescription description;
  for (const JobRecord& job : jobs_) description.add_jobs(job.id);
  STATETAP_ASSIGN_OR_RETURN(const bool complete, AllEnded());
  description.set_complete(complete);
  STATETAP_ASSIGN_OR_RETURN(const Part part, Collect());
  description.set_samples(static_cast<int64_t>(part.samples.size()));
  description.set_left_out(part.left_out);
  int64_t acknowledged = 0, tokens = 0;
  for (const OrderedSample& sample : part.samples) {
    acknowledged += sample.sample.acknowledged ? 1 : 0;
    tokens += sample.sample.rows;
  }
  description.set_acknowledged(acknowledged);
  description.set_tokens(tokens);
  return description;
}

}  // namespace statetap
