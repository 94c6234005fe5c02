// From what a client sends to what the engine runs: rendering, tokens, masks, digests, refusals.
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "extractor/base/worker_pool.h"
#include "server/jobs/job_plan.h"
#include "server/store/job_store.h"

namespace statetap {

// The samples of a job that an input gives (see TextsOf), ids and splits left out: rendered,
// overrides checked, held against the length limit (or not).
enum class Lengths { kCheck, kIgnore };
std::vector<SampleRow> AdmitSample(const v1::SampleInput& sample, const JobPlan& plan,
                                   const ServedModel& model, Lengths lengths = Lengths::kCheck);

using SampleBatch = google::protobuf::RepeatedPtrField<v1::SampleInput>;

// The front of an upload and of an estimate: the first sample settles the plan, batches are
// admitted on all cores. One thread.
class SampleAdmitter {
 public:
  // INVALID_ARGUMENT for options that cannot be, as far as they are known before the first sample.
  static absl::StatusOr<SampleAdmitter> Begin(const ServedModel& model,
                                              const v1::JobOptions& options);

  static constexpr int kMaxBatch = 10000;
  // Each with its id and split. INVALID_ARGUMENT for more than kMaxBatch samples, and for one of
  // another mode than the first where the options name none.
  absl::StatusOr<std::vector<SampleRow>> Admit(const SampleBatch& samples, Lengths lengths);
  // REQUIRES: a sample came.
  const JobPlan& plan() const { return *plan_; }

 private:
  SampleAdmitter(const ServedModel& model, const v1::JobOptions& options);
  absl::Status ResolveMode(const v1::SampleInput& sample);
  std::string IdOf(const v1::SampleInput& sample, const std::string& digest);

  const ServedModel* model_;
  v1::JobOptions given_;
  std::optional<JobPlan> plan_;
  std::unique_ptr<WorkerPool> workers_;
  std::map<std::string, int64_t> repeats_;  // of digests that serve as ids
};

// Removes an unpublished job with its destructor.
class UnpublishedJob {
 public:
  UnpublishedJob(JobStore& store, int64_t key) : store_(&store), key_(key) {}
  UnpublishedJob(UnpublishedJob&& other) noexcept
      : store_(std::exchange(other.store_, nullptr)), key_(other.key_) {}
  UnpublishedJob& operator=(UnpublishedJob&&) = delete;
  ~UnpublishedJob() {
    if (store_ != nullptr) store_->AbandonJob(key_).IgnoreError();  // else the next start does
  }
  int64_t key() const { return key_; }
  // Somebody else answers for it from now on.
  int64_t Release() {
    store_ = nullptr;
    return key_;
  }

 private:
  JobStore* store_;
  int64_t key_;
};

// One upload. The job appears with Finish; a destroyed Admission leaves nothing. One thread.
class Admission {
 public:
  // Errors of these two: SampleAdmitter's and the store's.
  static absl::StatusOr<Admission> Begin(JobStore& store, const ServedModel& model,
                                         const v1::JobOptions& options);
  Admission(Admission&&) noexcept = default;
  absl::Status Add(const SampleBatch& samples);
  // INVALID_ARGUMENT where no sample came; RESOURCE_EXHAUSTED where what is certain to be stored
  // (of prompts to be answered the prompts alone) needs more than `free_bytes`.
  absl::StatusOr<JobStore::Published> Finish(
      int64_t free_bytes = std::numeric_limits<int64_t>::max());
  int64_t duplicates() const { return duplicates_; }

 private:
  Admission(JobStore& store, const ServedModel& model, std::string name, SampleAdmitter admitter)
      : store_(&store), model_(&model), name_(std::move(name)), admitter_(std::move(admitter)) {}

  JobStore* store_;
  const ServedModel* model_;
  std::string name_;
  SampleAdmitter admitter_;
  std::optional<UnpublishedJob> open_;
  int64_t duplicates_ = 0;
  int64_t tokens_ = 0, samples_ = 0;  // certain to be stored
};

}  // namespace statetap
