// A statetap.v1 server in process, on a free port, without a model: jobs end at once, every sample
// is stored unless its id begins with "bad". States are small and known.
#pragma once

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "extractor/shard/shard_reader.h"
#include "statetap/v1/features.grpc.pb.h"
#include "statetap/v1/jobs.grpc.pb.h"
#include "statetap/v1/model.grpc.pb.h"

namespace statetap::testing {

struct FakeJob {
  v1::Job job;
  std::vector<v1::SampleInput> samples;
  std::vector<size_t> message_bytes;  // of each upload message
};

class FakeJobs : public v1::Jobs::Service {
 public:
  std::atomic<int> unavailable = 0;   // so many calls fail before one works
  std::atomic<int> watch_breaks = 0;  // so many watches break after their first message
  std::atomic<grpc::StatusCode> break_code = grpc::StatusCode::UNAVAILABLE;
  v1::JobState end_state = v1::JOB_STATE_SUCCEEDED;
  std::vector<int> boundaries = {2, 4, 8};  // of the jobs to come

  grpc::Status CreateJob(grpc::ServerContext*, grpc::ServerReader<v1::CreateJobRequest>* reader,
                         v1::Job* answer) override {
    FakeJob made;
    v1::CreateJobRequest request;
    while (reader->Read(&request)) {
      if (request.has_options()) *made.job.mutable_options() = request.options();
      made.message_bytes.push_back(request.ByteSizeLong());
      for (v1::SampleInput& sample : *request.mutable_samples())
        made.samples.push_back(std::move(sample));
    }
    if (made.job.options().template_() == "unknown")
      return {grpc::StatusCode::INVALID_ARGUMENT, "template: \"unknown\" is not known"};
    const std::lock_guard lock(mutex_);
    Fill(made);
    *answer = made.job;
    jobs_.push_back(std::move(made));
    return grpc::Status::OK;
  }

  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                      v1::Job* answer) override {
    if (unavailable-- > 0) return {grpc::StatusCode::UNAVAILABLE, "drains"};
    return Answer(request->job(), [&](const FakeJob& job) { *answer = job.job; });
  }

  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest*,
                        v1::ListJobsResponse* answer) override {
    const std::lock_guard lock(mutex_);
    for (auto job = jobs_.rbegin(); job != jobs_.rend(); ++job) *answer->add_jobs() = job->job;
    return grpc::Status::OK;
  }

  grpc::Status WatchJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                        grpc::ServerWriter<v1::Job>* writer) override {
    const bool breaks = watch_breaks-- > 0;
    const grpc::Status status = Answer(request->job(), [&](const FakeJob& job) {
      v1::Job running = job.job;
      running.set_state(v1::JOB_STATE_RUNNING);
      writer->Write(running);
      if (!breaks) writer->Write(job.job);
    });
    if (breaks) return {break_code, "the server restarts"};
    return status;
  }

  grpc::Status CancelJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                         v1::Job*) override {
    return {grpc::StatusCode::FAILED_PRECONDITION, "job " + request->job() + " has ended"};
  }

  // Pages of three.
  grpc::Status ListSamples(grpc::ServerContext*, const v1::ListSamplesRequest* request,
                           v1::ListSamplesResponse* answer) override {
    return Answer(request->job(), [&](const FakeJob& job) {
      const size_t begin = request->page_token().empty() ? 0 : std::stoul(request->page_token());
      size_t at = begin;
      for (; at < job.samples.size() && at < begin + 3; ++at) {
        const v1::SampleInput& input = job.samples[at];
        if (IsBad(input)) continue;
        v1::Sample& sample = *answer->add_samples();
        sample.set_id(input.id());
        sample.set_source(input.source());
        sample.set_source_line(input.source_line());
        sample.set_finish_reason("stop");
        sample.set_index(static_cast<int64_t>(at));
      }
      if (at < job.samples.size()) answer->set_next_page_token(std::to_string(at));
    });
  }

  grpc::Status ListRejected(grpc::ServerContext*, const v1::ListSamplesRequest* request,
                            v1::ListRejectedResponse* answer) override {
    return Answer(request->job(), [&](const FakeJob& job) {
      for (const v1::SampleInput& input : job.samples) {
        if (!IsBad(input)) continue;
        v1::Rejected& rejected = *answer->add_rejected();
        rejected.set_id(input.id());
        rejected.set_source_line(input.source_line());
        rejected.set_reason("non_finite");
        rejected.set_layer(3);
        rejected.set_message("row 7 is not finite");
      }
    });
  }

  std::vector<FakeJob> jobs() {
    const std::lock_guard lock(mutex_);
    return jobs_;
  }

 private:
  static bool IsBad(const v1::SampleInput& sample) { return sample.id().starts_with("bad"); }

  void Fill(FakeJob& made) {
    v1::Job& job = made.job;
    job.set_id("job-" + std::to_string(jobs_.size() + 1));
    job.set_name(job.options().name());
    v1::Counts& counts = *job.mutable_counts();
    counts.set_submitted(static_cast<int64_t>(made.samples.size()));
    for (const v1::SampleInput& sample : made.samples)
      IsBad(sample) ? counts.set_rejected(counts.rejected() + 1)
                    : counts.set_stored(counts.stored() + 1);
    job.set_state(counts.stored() == 0 ? v1::JOB_STATE_FAILED : end_state);
    if (counts.stored() == 0) job.set_message("all samples were rejected");
    for (const int boundary : boundaries) {
      job.add_boundaries(boundary);
      job.add_layer_outputs(boundary - 1);
    }
  }

  template <typename Use>
  grpc::Status Answer(const std::string& name, Use use) {
    const std::lock_guard lock(mutex_);
    for (const FakeJob& job : jobs_) {
      if (job.job.id() != name && job.job.name() != name) continue;
      use(job);
      return grpc::Status::OK;
    }
    return {grpc::StatusCode::NOT_FOUND, "no job \"" + name + "\""};
  }

  std::mutex mutex_;
  std::vector<FakeJob> jobs_;
};

// One job "job-1" of `num_samples` samples "s0", "s1", … of 3 + i tokens, hidden 16, boundaries
// 1, 2.
class FakeFeatures : public v1::Features::Service {
 public:
  static constexpr int kHidden = 16;
  std::atomic<int> num_samples = 5;
  std::atomic<int> break_after = -1;     // samples until the first stream breaks, once
  std::chrono::milliseconds silence{0};  // before that break
  std::atomic<int> break_at_once = 0;    // streams that break before their header
  std::atomic<bool> damage = false;      // flips a bit of every sample
  std::atomic<uint64_t> acked = 0;       // samples, over all streams of the group
  std::atomic<uint64_t> credit = 0;
  int rotate = 0;              // a stream that does not break sends this many samples last
  std::vector<uint64_t> acks;  // as they came; read after Close

  static SampleRecord RecordOf(int i) {
    const auto tokens = static_cast<size_t>(3 + i);
    SampleRecord record;
    record.id = "s" + std::to_string(i);
    record.source = "fake";
    record.input_ids.assign(tokens, 100 + i);
    record.loss_mask.assign(tokens, 1);
    record.loss_mask[0] = 0;
    record.logprobs.assign(tokens, -0.5f);
    record.entropies.assign(tokens, 0.25f);
    record.prompt_tokens = 1;
    record.finish_reason = "stop";
    record.source_index = i;
    return record;
  }
  static std::vector<uint16_t> StatesOf(int i, int boundary) {
    std::vector<uint16_t> states(static_cast<size_t>((3 + i) * kHidden));
    for (size_t v = 0; v < states.size(); ++v)
      states[v] = static_cast<uint16_t>(0x3f80 + (v + static_cast<size_t>(boundary)) % 64);
    return states;
  }

  grpc::Status StreamFeatures(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::StreamFeaturesResponse, v1::StreamFeaturesRequest>* stream)
      override {
    v1::StreamFeaturesRequest request;
    if (!stream->Read(&request) || !request.has_start())
      return {grpc::StatusCode::INVALID_ARGUMENT, "start must come first"};
    if (break_at_once > 0) {
      --break_at_once;
      return {grpc::StatusCode::UNAVAILABLE, "the server restarts"};
    }
    const auto first = static_cast<int>(acked.load());
    WriteHeader(num_samples - first, [&](const auto& message) { stream->Write(message); });
    const int broken = break_after.exchange(-1);
    std::vector<int> order;
    for (int i = first; i < num_samples; ++i) order.push_back(i);
    // As a server that finds out late that an older stream is gone.
    if (rotate > 0 && broken < 0) std::rotate(order.begin(), order.begin() + rotate, order.end());
    for (size_t at = 0; at < order.size(); ++at) {
      if (broken >= 0 && static_cast<int>(at) >= broken) {
        std::this_thread::sleep_for(silence);
        return {grpc::StatusCode::UNAVAILABLE, "the server restarts"};
      }
      WriteSample(order[at], at + 1, [&](const auto& message) { stream->Write(message); });
    }
    v1::StreamFeaturesResponse end;
    end.mutable_end()->set_samples(num_samples - first);
    stream->Write(end);
    while (stream->Read(&request)) {
      if (request.has_ack()) {
        acked = static_cast<uint64_t>(first) + request.ack().delivery();
        acks.push_back(request.ack().delivery());
      }
      if (request.message_case() == v1::StreamFeaturesRequest::kCreditBytes)
        credit += request.credit_bytes();
    }
    return grpc::Status::OK;
  }

  grpc::Status GetSample(grpc::ServerContext*, const v1::GetSampleRequest* request,
                         grpc::ServerWriter<v1::StreamFeaturesResponse>* writer) override {
    for (int i = 0; i < num_samples; ++i) {
      if (RecordOf(i).id != request->id()) continue;
      WriteHeader(1, [&](const auto& message) { writer->Write(message); });
      WriteSample(i, 1, [&](const auto& message) { writer->Write(message); });
      return grpc::Status::OK;
    }
    return {grpc::StatusCode::NOT_FOUND, "no sample \"" + request->id() + "\""};
  }

  grpc::Status ListShards(grpc::ServerContext*, const v1::ListShardsRequest*,
                          v1::ListShardsResponse* answer) override {
    v1::Shard& shard = *answer->add_shards();
    shard.set_name("00000.h5");
    shard.set_samples(5);
    shard.set_digest("00ff");
    return grpc::Status::OK;
  }

  grpc::Status CheckShards(grpc::ServerContext*, const v1::ListShardsRequest*,
                           v1::CheckShardsResponse* answer) override {
    v1::CheckResult& result = *answer->add_results();
    result.set_shard("00000.h5");
    result.set_ok(!damage);
    if (damage) result.add_damaged("s3");
    return grpc::Status::OK;
  }

  grpc::Status GetStatistics(grpc::ServerContext*, const v1::GetStatisticsRequest*,
                             v1::Statistics* answer) override {
    v1::BoundaryStatistics& boundary = *answer->add_boundaries();
    boundary.set_boundary(2);
    boundary.set_layer_output(1);
    boundary.set_count(10);
    boundary.set_mean(std::numeric_limits<double>::quiet_NaN());
    boundary.set_row_rms_p01(0.9);
    boundary.set_row_rms_p50(1.0);
    boundary.set_row_rms_p99(2.1);
    for (int bin = 0; bin < 256; ++bin)
      boundary.add_row_rms_bins(bin == 128 ? 9 : bin == 136 ? 1 : 0);
    v1::Alarm& alarm = *answer->add_alarms();
    alarm.set_kind("zero_boundary");
    alarm.set_message("boundary 2 is zero");
    return grpc::Status::OK;
  }

 private:
  template <typename Write>
  static void WriteHeader(int64_t remaining, Write write) {
    v1::StreamFeaturesResponse message;
    v1::StreamHeader& header = *message.mutable_header();
    header.set_job("job-1");
    header.set_hidden(kHidden);
    header.set_layers(2);
    header.add_boundaries(1);
    header.add_boundaries(2);
    header.set_rms_norm_eps(1e-5);
    header.set_model_name("fake");
    header.set_model_digest("digest");
    header.set_attributes_json(R"({"rope":"{\"theta\":10000}","template_mode":"instant"})");
    header.set_remaining(remaining);
    write(message);
  }

  template <typename Write>
  void WriteSample(int i, uint64_t delivery, Write write) {
    const SampleRecord record = RecordOf(i);
    std::vector<std::vector<uint16_t>> states = {StatesOf(i, 1), StatesOf(i, 2)};
    v1::StreamFeaturesResponse message;
    v1::SampleHeader& header = *message.mutable_sample();
    header.set_delivery(delivery);
    header.set_id(record.id);
    header.set_source(record.source);
    header.set_split(record.split);
    header.mutable_input_ids()->Assign(record.input_ids.begin(), record.input_ids.end());
    header.set_loss_mask(std::string(record.loss_mask.begin(), record.loss_mask.end()));
    header.mutable_logprobs()->Assign(record.logprobs.begin(), record.logprobs.end());
    header.mutable_entropies()->Assign(record.entropies.begin(), record.entropies.end());
    header.set_prompt_tokens(record.prompt_tokens);
    header.set_finish_reason(record.finish_reason);
    header.set_source_index(record.source_index);
    const std::vector<std::span<const uint16_t>> views(states.begin(), states.end());
    header.set_checksum(SampleChecksum(record, views));
    write(message);
    if (damage) states[1][5] ^= 1;
    for (size_t b = 0; b < states.size(); ++b) {
      // In pieces of two rows.
      for (size_t row = 0; row * kHidden < states[b].size(); row += 2) {
        const size_t values = std::min<size_t>(2 * kHidden, states[b].size() - row * kHidden);
        v1::SampleData& data = *message.mutable_data();
        data.set_delivery(delivery);
        data.set_boundary(static_cast<int>(b) + 1);
        data.set_first_row(static_cast<int64_t>(row));
        data.set_states(states[b].data() + row * kHidden, values * sizeof(uint16_t));
        write(message);
      }
    }
  }
};

// Text of an id is "<id>"; a prompt "refuse" is refused.
class FakeModel : public v1::Model::Service {
 public:
  grpc::Status DescribeModel(grpc::ServerContext*, const v1::DescribeModelRequest*,
                             v1::ModelDescription* answer) override {
    answer->set_name("fake");
    answer->set_layers(8);
    for (const int tap : {2, 4, 5}) {
      answer->add_taps(tap);
      answer->add_tap_layer_outputs(tap - 1);
    }
    return grpc::Status::OK;
  }

  grpc::Status Render(grpc::ServerContext*,
                      grpc::ServerReaderWriter<v1::Rendered, v1::RenderRequest>* stream) override {
    v1::RenderRequest request;
    while (stream->Read(&request)) {
      v1::Rendered rendered;
      rendered.set_id(request.sample().id());
      if (request.sample().prompt() == "refuse") {
        rendered.set_error("refused by the template");
      } else {
        for (const int32_t id : request.sample().tokens().ids()) {
          rendered.set_text(rendered.text() + "<" + std::to_string(id) + ">");
          rendered.add_input_ids(id);
        }
        rendered.set_loss_mask(request.sample().tokens().loss_mask());
      }
      stream->Write(rendered);
    }
    return grpc::Status::OK;
  }

  grpc::Status Generate(grpc::ServerContext*, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override {
    asked = request->sample().chat().messages_json();
    for (const char* text : {"Bel", "grade"}) {
      v1::GenerateResponse message;
      message.set_text(text);
      writer->Write(message);
    }
    v1::GenerateResponse last;
    last.set_finish_reason("stop");
    last.set_tokens(2);
    last.set_seconds(0.5);
    writer->Write(last);
    return grpc::Status::OK;
  }
  std::string asked;
};

class FakeServer {
 public:
  FakeServer() {
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(&jobs);
    builder.RegisterService(&features);
    builder.RegisterService(&model);
    server_ = builder.BuildAndStart();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  FakeJobs jobs;
  FakeFeatures features;
  FakeModel model;

 private:
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace statetap::testing
