// statetap.v1.Jobs: decode, call, encode.
#pragma once

#include "server/rpc/service_context.h"
#include "statetap/v1/jobs.grpc.pb.h"

namespace statetap {

class JobsService final : public v1::Jobs::Service {
 public:
  explicit JobsService(const ServiceContext& context) : context_(context) {}

  grpc::Status CreateJob(grpc::ServerContext* call,
                         grpc::ServerReader<v1::CreateJobRequest>* reader,
                         v1::Job* response) override;
  grpc::Status GetJob(grpc::ServerContext* call, const v1::GetJobRequest* request,
                      v1::Job* response) override;
  grpc::Status ListJobs(grpc::ServerContext* call, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override;
  grpc::Status WatchJob(grpc::ServerContext* call, const v1::GetJobRequest* request,
                        grpc::ServerWriter<v1::Job>* writer) override;
  grpc::Status CancelJob(grpc::ServerContext* call, const v1::GetJobRequest* request,
                         v1::Job* response) override;
  grpc::Status PauseJob(grpc::ServerContext* call, const v1::GetJobRequest* request,
                        v1::Job* response) override;
  grpc::Status ResumeJob(grpc::ServerContext* call, const v1::GetJobRequest* request,
                         v1::Job* response) override;
  grpc::Status RetryJob(grpc::ServerContext* call, const v1::GetJobRequest* request,
                        v1::RetryJobResponse* response) override;
  grpc::Status DeleteJob(grpc::ServerContext* call, const v1::GetJobRequest* request,
                         v1::DeleteJobResponse* response) override;
  grpc::Status EvictJob(grpc::ServerContext* call, const v1::GetJobRequest* request,
                        v1::EvictJobResponse* response) override;
  grpc::Status ExcludeSamples(grpc::ServerContext* call, const v1::ExcludeSamplesRequest* request,
                              v1::ExcludeSamplesResponse* response) override;
  grpc::Status ListSamples(grpc::ServerContext* call, const v1::ListSamplesRequest* request,
                           v1::ListSamplesResponse* response) override;
  grpc::Status ListRejected(grpc::ServerContext* call, const v1::ListSamplesRequest* request,
                            v1::ListRejectedResponse* response) override;

 private:
  absl::StatusOr<v1::Job> Upload(grpc::ServerContext& call,
                                 grpc::ServerReader<v1::CreateJobRequest>& reader);
  absl::StatusOr<v1::Job> Describe(const JobRecord& job) const;
  absl::StatusOr<v1::Job> DescribeNow(const JobRecord& job) const;  // read again
  // Finds the job, acts on it and describes it as it is then.
  grpc::Status Control(const v1::GetJobRequest& request, v1::Job* response,
                       absl::Status (JobRunner::*act)(const JobRecord&));
  // Finds the job and answers with what `act` makes of it.
  template <typename Response>
  grpc::Status ReplyOn(const v1::GetJobRequest& request,
                       absl::StatusOr<Response> (JobsService::*act)(const JobRecord&) const,
                       Response* response) const;
  absl::StatusOr<v1::RetryJobResponse> Retry(const JobRecord& job) const;
  absl::StatusOr<v1::DeleteJobResponse> Delete(const JobRecord& job) const;
  absl::StatusOr<v1::EvictJobResponse> Evict(const JobRecord& job) const;
  absl::StatusOr<v1::ExcludeSamplesResponse> Exclude(const v1::ExcludeSamplesRequest& request);
  const ServiceContext context_;
};

}  // namespace statetap
