// The web page: jobs with their progress, shards, statistics, samples with their mask, rejects; for
// those who have the server's token pause, resume and cancel. HTML made here; a few lines of script
// bring a page that changes up to date.
#pragma once

#include <span>
#include <string>

#include "server/features/shard_cache.h"
#include "server/jobs/job_runner.h"
#include "server/web/http_message.h"
#include "server/web/page_access.h"

namespace statetap {

class Pages {
 public:
  // `token`: what has to be shown to the page before it changes anything; empty: it only reads.
  Pages(const JobStore& store, JobRunner& runner, const ServedModel& model,
        const ShardFolders& folders, ShardCache& shards, const std::string& token)
      : store_(store),
        runner_(runner),
        model_(model),
        folders_(folders),
        shards_(shards),
        access_(token) {}

  // GET "/", "/job?id=", "/samples?job=&after=", "/sample?job=&id=", "/page.js"; POST "/unlock",
  // "/lock", "/act". 404 for other paths and for jobs and samples that are not there; 403 for a
  // change that is not allowed, 409 for one that the job's state does not allow. Thread safe.
  HttpReply Handle(const HttpRequest& request);

 private:
  enum class Live { kNo, kYes };  // whether it brings itself up to date
  struct Page {
    std::string title;
    Live live;
    std::string body;
  };
  HttpReply Whole(int status, const Page& page, const HttpRequest& request) const;
  HttpReply NotShown(const absl::Status& status, const HttpRequest& request) const;
  HttpReply Post(const HttpRequest& request);
  absl::Status Act(const std::string& what, const std::string& job);
  Page Jobs();
  absl::StatusOr<Page> Job(const std::string& id, bool may_change);
  absl::StatusOr<Page> Samples(const std::string& job, const std::string& after);
  absl::StatusOr<Page> Sample(const std::string& job, const std::string& id);
  std::string Actions(const JobRecord& job) const;
  std::string ShardsTable(std::span<const ShardRow> shards);
  std::string RejectedTable(const JobRecord& job);
  std::string JobFacts(const JobRecord& job, std::span<const ShardRow> shards);
  absl::StatusOr<std::string> Tokens(const SampleRecord& record);

  const JobStore& store_;
  JobRunner& runner_;
  const ServedModel& model_;
  const ShardFolders& folders_;
  ShardCache& shards_;
  const PageAccess access_;
};

}  // namespace statetap
