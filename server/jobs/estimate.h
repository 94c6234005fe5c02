// What a job would come to, before it is made: tokens, bytes, seconds. Nothing is stored.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/jobs/admission.h"
#include "statetap/v1/model.pb.h"

namespace statetap {

// How long answers were in a job, by source. Answers that hit their limit count with the length
// they had.
class AnswerLengths {
 public:
  static absl::StatusOr<AnswerLengths> OfJob(const JobStore& store, const JobRecord& job);
  // The mean of min(length, room) over the answers of `source`, or of all where it has none; and
  // the share of them that `room` cuts. REQUIRES: room >= 1.
  struct Expected {
    double tokens, cut;
  };
  Expected Of(const std::string& source, int64_t room) const;
  int64_t answers() const { return static_cast<int64_t>(all_.lengths.size()); }
  int64_t capped() const { return capped_; }  // of them, those that ended at a limit

 private:
  struct Lengths {
    std::vector<int64_t> lengths;    // ascending
    std::vector<double> sums = {0};  // of the first i
    void Sort();
    Expected At(int64_t room) const;
  };
  int64_t capped_ = 0;
  Lengths all_;
  std::map<std::string, Lengths> by_source_;
};

// Takes the samples of a job that is not there, in batches. One thread.
class Estimator {
 public:
  // Errors of SampleAdmitter; NOT_FOUND for a pilot that is not there, FAILED_PRECONDITION for one
  // without generated answers. An empty pilot: answers are taken as long as the limits allow.
  static absl::StatusOr<Estimator> Begin(const JobStore& store, const ServedModel& model,
                                         const v1::JobOptions& options, const std::string& pilot);
  // Errors of SampleAdmitter, and of an id that came before with other content. With the same
  // content it is the same sample.
  absl::Status Add(const SampleBatch& samples);
  // `free_bytes`: where shards go.
  absl::StatusOr<v1::EstimateResponse> Finish(int64_t free_bytes) const;

 private:
  struct Prompt {
    int32_t tokens, max_new_tokens;
    int source;
  };
  Estimator(const JobStore& store, const ServedModel& model, SampleAdmitter admitter)
      : store_(&store), model_(&model), admitter_(std::move(admitter)) {}
  v1::LengthEstimate At(int32_t max_length) const;
  absl::Status FindRate(v1::EstimateResponse& response) const;

  const JobStore* store_;
  const ServedModel* model_;
  SampleAdmitter admitter_;
  std::optional<AnswerLengths> lengths_;
  std::optional<JobRecord> pilot_;
  struct Seen {
    std::string digest;
    int64_t line;
  };
  std::unordered_map<std::string, Seen> seen_;  // by id
  std::vector<std::string> sources_;
  std::map<std::string, int> source_index_;
  std::vector<Prompt> prompts_;
  int64_t refused_ = 0;  // whatever the length
};

}  // namespace statetap
