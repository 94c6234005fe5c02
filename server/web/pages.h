// The web page: jobs with their progress, shards, statistics, samples with their mask, rejects.
// Reads only. HTML made here; a few lines of script bring a page that changes up to date.
#pragma once

#include <string>

#include "server/features/shard_cache.h"
#include "server/jobs/job_runner.h"
#include "server/web/http_message.h"

namespace statetap {

class Pages {
 public:
  Pages(const JobStore& store, const JobRunner& runner, const ServedModel& model,
        const ShardFolders& folders, ShardCache& shards)
      : store_(store), runner_(runner), model_(model), folders_(folders), shards_(shards) {}

  // "/", "/job?id=", "/samples?job=&after=", "/sample?job=&id=", "/page.js". 404 for other paths
  // and for jobs and samples that are not there. Thread safe.
  HttpReply Get(const HttpRequest& request);

 private:
  std::string Jobs();
  absl::StatusOr<std::string> Job(const std::string& id);
  absl::StatusOr<std::string> Samples(const std::string& job, const std::string& after);
  absl::StatusOr<std::string> Sample(const std::string& job, const std::string& id);
  std::string ShardsTable(const JobRecord& job);
  std::string RejectedTable(const JobRecord& job);
  std::string JobFacts(const JobRecord& job);
  absl::StatusOr<std::string> Tokens(const SampleRecord& record);

  const JobStore& store_;
  const JobRunner& runner_;
  const ServedModel& model_;
  const ShardFolders& folders_;
  ShardCache& shards_;
};

}  // namespace statetap
