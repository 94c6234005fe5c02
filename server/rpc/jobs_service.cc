#include "server/rpc/jobs_service.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <limits>
#include <map>
#include <thread>

#include "extractor/base/log.h"
#include "server/jobs/admission.h"
#include "server/rpc/convert.h"

namespace statetap {
namespace {

constexpr std::chrono::milliseconds kWatchInterval{100};

struct Page {
  int64_t after = -1, size = 1000;
};

absl::StatusOr<Page> PageOf(const v1::ListSamplesRequest& request) {
  Page page;
  if (request.page_size() < 0 || request.page_size() > 10000) {
    return absl::InvalidArgumentError(
        fmt::format("page_size: {} is not possible; give 1 to 10000", request.page_size()));
  }
  if (request.page_size() > 0) page.size = request.page_size();
  const std::string& token = request.page_token();
  if (token.empty()) return page;
  const auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), page.after);
  if (error != std::errc() || end != token.data() + token.size()) {
    return absl::InvalidArgumentError(fmt::format(
        "page_token: \"{}\" is not of an earlier answer; give its next_page_token, or nothing",
        token));
  }
  return page;
}

// Of a page's messages, so that a client with the usual limit of 4 MiB can take it.
constexpr size_t kPageBytes = size_t{3} << 20;
constexpr int64_t kReadAtOnce = 256;

// Calls `read(after, limit)` and `add(listing) → message` until the page is full. The next page's
// token; empty where this was the last one.
template <typename Message, typename Read, typename ToMessage>
absl::StatusOr<std::string> FillPage(Page page, const Read& read, const ToMessage& to_message,
                                     google::protobuf::RepeatedPtrField<Message>* to) {
  size_t bytes = 0;
  while (page.size > 0) {
    const int64_t wanted = std::min(page.size, kReadAtOnce);
    STATETAP_ASSIGN_OR_RETURN(const std::vector<SampleListing> listings, read(page.after, wanted));
    for (const SampleListing& listing : listings) {
      Message message = to_message(listing);
      bytes += message.ByteSizeLong() + 8;  // its tag and length
      if (bytes > kPageBytes && !to->empty()) return std::to_string(page.after);
      *to->Add() = std::move(message);
      page.after = listing.sample.index;
      --page.size;
    }
    if (static_cast<int64_t>(listings.size()) < wanted) return "";
  }
  return std::to_string(page.after);
}

template <typename T>
grpc::Status Reply(absl::StatusOr<T> value, T* response) {
  if (value.ok()) *response = *std::move(value);
  return ToGrpc(value.status());
}

}  // namespace

absl::StatusOr<v1::Job> JobsService::Describe(const JobRecord& job) const {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, context_.store.Shards(job.key));
  return ToProto(job, context_.runner.LiveOf(job.key), context_.model, context_.folders, shards);
}

absl::StatusOr<v1::Job> JobsService::DescribeNow(const JobRecord& job) const {
  STATETAP_ASSIGN_OR_RETURN(const JobRecord now, context_.store.GetJob(job.key));
  return Describe(now);
}

grpc::Status JobsService::Control(const v1::GetJobRequest& request, v1::Job* response,
                                  absl::Status (JobRunner::*act)(const JobRecord&)) {
  const absl::StatusOr<JobRecord> job = context_.store.GetJob(request.job());
  if (!job.ok()) return ToGrpc(job.status());
  const absl::Status status = (context_.runner.*act)(*job);
  return status.ok() ? Reply(DescribeNow(*job), response) : ToGrpc(status);
}

template <typename Response>
grpc::Status JobsService::ReplyOn(const v1::GetJobRequest& request,
                                  absl::StatusOr<Response> (JobsService::*act)(const JobRecord&)
                                      const,
                                  Response* response) const {
  const absl::StatusOr<JobRecord> job = context_.store.GetJob(request.job());
  return job.ok() ? Reply((this->*act)(*job), response) : ToGrpc(job.status());
}

absl::StatusOr<v1::RetryJobResponse> JobsService::Retry(const JobRecord& job) const {
  STATETAP_RETURN_IF_ERROR(context_.runner.engine_status());
  STATETAP_ASSIGN_OR_RETURN(const JobStore::Retried retried, context_.runner.Retry(job));
  v1::RetryJobResponse response;
  STATETAP_ASSIGN_OR_RETURN(*response.mutable_job(), DescribeNow(job));
  response.set_retried(retried.retried);
  response.set_kept(retried.kept);
  return response;
}

absl::StatusOr<v1::DeleteJobResponse> JobsService::Delete(const JobRecord& job) const {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> shards, context_.store.Shards(job.key));
  STATETAP_RETURN_IF_ERROR(context_.runner.Delete(job));
  context_.shards.Forget(job, shards);
  v1::DeleteJobResponse response;
  response.set_shards(static_cast<int64_t>(shards.size()));
  for (const ShardRow& shard : shards) response.set_bytes(response.bytes() + shard.bytes);
  LogInfo("{} \"{}\": deleted with {} shards, {} bytes", job.id, job.name, response.shards(),
          response.bytes());
  return response;
}

absl::StatusOr<v1::EvictJobResponse> JobsService::Evict(const JobRecord& job) const {
  STATETAP_RETURN_IF_ERROR(context_.runner.Evict(job));
  v1::EvictJobResponse response;
  STATETAP_ASSIGN_OR_RETURN(*response.mutable_job(), DescribeNow(job));
  response.set_bytes(job.bytes - response.job().bytes());
  return response;
}

absl::StatusOr<v1::ExcludeSamplesResponse> JobsService::Exclude(
    const v1::ExcludeSamplesRequest& request) {
  STATETAP_ASSIGN_OR_RETURN(const JobRecord job, context_.store.GetJob(request.job()));
  if (request.where().empty() == request.ids().empty())
    return absl::InvalidArgumentError("where, ids: give one of the two");
  STATETAP_ASSIGN_OR_RETURN(const SampleFilter filter, SampleFilter::Parse(request.where()));
  if (request.ids().empty() && filter.holds_for_all())
    return absl::InvalidArgumentError("where: it is blank; for every sample say tokens > 0");
  std::vector<int64_t> indices;
  for (const std::string& id : request.ids()) {
    STATETAP_ASSIGN_OR_RETURN(const IndexedSample sample, context_.store.FindStored(job.key, id));
    indices.push_back(sample.index);
  }
  if (request.ids().empty()) {
    STATETAP_ASSIGN_OR_RETURN(
        const auto listings,
        context_.store.Stored(job.key, -1, std::numeric_limits<int64_t>::max(), filter));
    for (const SampleListing& listing : listings) indices.push_back(listing.sample.index);
  }
  const auto exclusion =
      request.include() ? JobStore::Exclusion::kInclude : JobStore::Exclusion::kExclude;
  STATETAP_ASSIGN_OR_RETURN(const int64_t changed,
                            context_.store.MarkExcluded(job.key, indices, exclusion));
  v1::ExcludeSamplesResponse response;
  STATETAP_ASSIGN_OR_RETURN(*response.mutable_job(), DescribeNow(job));
  response.set_changed(changed);
  return response;
}

absl::StatusOr<v1::Job> JobsService::Upload(grpc::ServerContext& call,
                                            grpc::ServerReader<v1::CreateJobRequest>& reader) {
  STATETAP_RETURN_IF_ERROR(context_.runner.engine_status());
  std::optional<Admission> admission;
  v1::CreateJobRequest request;
  while (reader.Read(&request)) {
    if (context_.draining) return Draining();
    if (!admission) {
      STATETAP_ASSIGN_OR_RETURN(
          Admission begun, Admission::Begin(context_.store, context_.model, request.options()));
      admission.emplace(std::move(begun));
    } else if (request.has_options()) {
      return absl::InvalidArgumentError("options: only the first message may have them");
    }
    STATETAP_RETURN_IF_ERROR(admission->Add(request.samples()));
  }
  if (call.IsCancelled()) return absl::CancelledError("the upload broke off; nothing was kept");
  if (!admission) return absl::InvalidArgumentError("options: no message came");
  STATETAP_ASSIGN_OR_RETURN(const JobStore::Published published,
                            admission->Finish(context_.folders.FreeBytes()));
  if (!published.existed) STATETAP_RETURN_IF_ERROR(context_.runner.Submit(published.job));
  LogInfo("{} \"{}\": {} samples{}{}", published.job.id, published.job.name,
          published.job.counts.submitted, published.existed ? ", submitted before" : "",
          admission->duplicates() == 0
              ? ""
              : fmt::format(", {} of them given twice and counted once", admission->duplicates()));
  STATETAP_ASSIGN_OR_RETURN(v1::Job job, Describe(published.job));
  job.set_duplicates(admission->duplicates());
  job.set_existed(published.existed);
  return job;
}

grpc::Status JobsService::CreateJob(grpc::ServerContext* call,
                                    grpc::ServerReader<v1::CreateJobRequest>* reader,
                                    v1::Job* response) {
  return Reply(Upload(*call, *reader), response);
}

grpc::Status JobsService::GetJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                                 v1::Job* response) {
  return ReplyOn(*request, &JobsService::Describe, response);
}

grpc::Status JobsService::ListJobs(grpc::ServerContext*, const v1::ListJobsRequest*,
                                   v1::ListJobsResponse* response) {
  const absl::StatusOr<std::vector<JobRecord>> jobs = context_.store.ListJobs();
  if (!jobs.ok()) return ToGrpc(jobs.status());
  for (const JobRecord& job : *jobs) {
    absl::StatusOr<v1::Job> proto = Describe(job);
    if (!proto.ok()) return ToGrpc(proto.status());
    *response->add_jobs() = *std::move(proto);
  }
  return grpc::Status::OK;
}

grpc::Status JobsService::WatchJob(grpc::ServerContext* call, const v1::GetJobRequest* request,
                                   grpc::ServerWriter<v1::Job>* writer) {
  absl::StatusOr<JobRecord> job = context_.store.GetJob(request->job());
  std::string last;
  while (job.ok() && !call->IsCancelled()) {
    const absl::StatusOr<v1::Job> proto = Describe(*job);
    if (!proto.ok()) return ToGrpc(proto.status());
    std::string now = proto->SerializeAsString();
    if (now != last && !writer->Write(*proto)) return Cut(context_);
    if (HasEnded(job->state)) return grpc::Status::OK;
    if (context_.draining) return ToGrpc(Draining());
    last = std::move(now);
    std::this_thread::sleep_for(kWatchInterval);
    job = context_.store.GetJob(job->key);
  }
  return job.ok() ? Cut(context_) : ToGrpc(job.status());
}

grpc::Status JobsService::CancelJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                                    v1::Job* response) {
  return Control(*request, response, &JobRunner::Cancel);
}

grpc::Status JobsService::PauseJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                                   v1::Job* response) {
  return Control(*request, response, &JobRunner::Pause);
}

grpc::Status JobsService::ResumeJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                                    v1::Job* response) {
  return Control(*request, response, &JobRunner::Resume);
}

grpc::Status JobsService::RetryJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                                   v1::RetryJobResponse* response) {
  return ReplyOn(*request, &JobsService::Retry, response);
}

grpc::Status JobsService::DeleteJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                                    v1::DeleteJobResponse* response) {
  return ReplyOn(*request, &JobsService::Delete, response);
}

grpc::Status JobsService::EvictJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                                   v1::EvictJobResponse* response) {
  return ReplyOn(*request, &JobsService::Evict, response);
}

grpc::Status JobsService::ExcludeSamples(grpc::ServerContext*,
                                         const v1::ExcludeSamplesRequest* request,
                                         v1::ExcludeSamplesResponse* response) {
  return Reply(Exclude(*request), response);
}

grpc::Status JobsService::ListSamples(grpc::ServerContext*, const v1::ListSamplesRequest* request,
                                      v1::ListSamplesResponse* response) {
  const auto list = [&]() -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const JobRecord job, context_.store.GetJob(request->job()));
    STATETAP_ASSIGN_OR_RETURN(const Page page, PageOf(*request));
    STATETAP_ASSIGN_OR_RETURN(const SampleFilter filter, SampleFilter::Parse(request->where()));
    STATETAP_ASSIGN_OR_RETURN(const auto shards, context_.store.Shards(job.key));
    std::map<int64_t, std::string> names;
    for (const ShardRow& shard : shards)
      names[shard.seq] = std::filesystem::path(shard.path).filename().string();
    STATETAP_ASSIGN_OR_RETURN(*response->mutable_next_page_token(),
                              FillPage(
                                  page,
                                  [&](int64_t after, int64_t limit) {
                                    return context_.store.Stored(job.key, after, limit, filter);
                                  },
                                  [&](const SampleListing& listing) {
                                    return ToProtoSample(listing, names[listing.shard]);
                                  },
                                  response->mutable_samples()));
    return absl::OkStatus();
  };
  return ToGrpc(list());
}

grpc::Status JobsService::ListRejected(grpc::ServerContext*, const v1::ListSamplesRequest* request,
                                       v1::ListRejectedResponse* response) {
  const auto list = [&]() -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const JobRecord job, context_.store.GetJob(request->job()));
    STATETAP_ASSIGN_OR_RETURN(const Page page, PageOf(*request));
    STATETAP_ASSIGN_OR_RETURN(*response->mutable_next_page_token(),
                              FillPage(
                                  page,
                                  [&](int64_t after, int64_t limit) {
                                    return context_.store.Rejected(job.key, after, limit);
                                  },
                                  ToProtoRejected, response->mutable_rejected()));
    return absl::OkStatus();
  };
  return ToGrpc(list());
}

}  // namespace statetap
