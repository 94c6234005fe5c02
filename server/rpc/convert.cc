#include "server/rpc/convert.h"

#include <filesystem>

#include "extractor/base/digest.h"
#include "extractor/base/text.h"
#include "server/jobs/job_plan.h"

namespace statetap {
namespace {

// Clients refuse headers of more than 8 KiB, and a byte that is no ASCII takes three there.
constexpr size_t kMostStatusBytes = 2000;

std::string DigestOf(std::span<const ShardRow> shards) {
  if (shards.empty()) return "";
  Xxh3 digest;
  for (const ShardRow& shard : shards) digest.Update(std::as_bytes(std::span(shard.digest)));
  return HexOf(digest.Digest());
}

// What is left at the mean length of what is done, stored or in the open shard.
double EtaSeconds(const JobRecord& job, const JobRunner::Live& live) {
  const int64_t done = job.counts.stored + live.captured;
  if (done == 0 || live.tokens_per_second <= 0 || HasEnded(job.state)) return 0;
  const int64_t left = std::max<int64_t>(0, job.counts.to_do - live.captured);
  return static_cast<double>(job.tokens + live.captured_rows) / static_cast<double>(done) *
         static_cast<double>(left) / live.tokens_per_second;
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // Both number the codes as google.rpc.Code does.
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()),
                      CutMiddle(MessageOf(status), kMostStatusBytes));
}

v1::Job ToProto(const JobRecord& job, const JobRunner::Live& live, const ServedModel& model,
                const ShardFolders& folders, std::span<const ShardRow> shards) {
  v1::Job proto;
  proto.set_id(job.id);
  proto.set_name(job.name);
  proto.set_state(static_cast<v1::JobState>(job.state));
  v1::Counts& counts = *proto.mutable_counts();
  counts.set_submitted(job.counts.submitted);
  counts.set_stored(job.counts.stored);
  counts.set_rejected(job.counts.rejected);
  counts.set_cancelled(job.counts.cancelled);
  counts.set_to_do(job.counts.to_do);
  counts.set_running(std::min(live.running, job.counts.to_do));
  counts.set_captured(std::min(live.captured, job.counts.to_do));
  counts.set_excluded(job.counts.excluded);
  counts.set_evicted(job.counts.evicted);
  proto.set_message(job.message);
  v1::JobOptions& options = *proto.mutable_options();
  options.ParseFromString(job.options);
  options.set_name(job.name);
  proto.set_tokens(job.tokens);
  proto.set_generated_tokens(job.generated);
  proto.set_bytes(job.bytes);
  if (live.disk_is_full && job.message.empty()) {
    proto.set_message(
        "--max-shard-bytes is reached: nothing starts until states are acknowledged, evicted or "
        "deleted");
  }
  double rate = live.tokens_per_second;
  if (HasEnded(job.state)) {
    const int64_t ms = job.started_ms == 0 ? 0 : job.ended_ms - job.started_ms;
    rate = ms > 0 ? 1000.0 * static_cast<double>(job.tokens) / static_cast<double>(ms) : 0;
  }
  proto.set_tokens_per_second(rate);
  proto.set_eta_seconds(EtaSeconds(job, live));
  proto.set_created_unix_ms(job.created_ms);
  proto.set_started_unix_ms(job.started_ms);
  proto.set_ended_unix_ms(job.ended_ms);
  for (const std::filesystem::path& folder : folders.FoldersWith(job.id, shards))
    proto.add_shards_paths(folder.string());
  proto.set_shards_path(proto.shards_paths(0));
  for (const int boundary : BoundariesOf(options, model.config.num_layers)) {
    proto.add_boundaries(boundary);
    proto.add_layer_outputs(boundary - 1);
  }
  proto.set_digest(DigestOf(shards));
  v1::TextReport& text = *proto.mutable_text();
  text.set_thoughts(job.text.thoughts);
  text.set_dropped_earlier(job.text.dropped_earlier);
  text.set_dropped_tool_turns(job.text.dropped_tool_turns);
  text.set_dropped_last(job.text.dropped_last);
  text.set_tool_calls(job.text.tool_calls);
  text.set_odd_tool_ids(job.text.odd_tool_ids);
  text.set_spelled_specials(job.text.spelled_specials);
  return proto;
}

v1::Sample ToProtoSample(const SampleListing& listing, std::string_view shard_name) {
  const SampleRow& sample = listing.sample;
  const StoredSample& stored = listing.stored;
  v1::Sample proto;
  proto.set_id(sample.id);
  proto.set_source(sample.source);
  proto.set_source_line(sample.source_line);
  proto.set_split(sample.split);
  proto.set_prompt_tokens(sample.prompt_tokens);
  proto.set_tokens(static_cast<int32_t>(stored.rows));
  proto.set_supervised_tokens(static_cast<int32_t>(stored.supervised));
  proto.set_finish_reason(stored.finish);
  proto.set_truncated(stored.truncated);
  if (stored.mean_logprob) proto.set_mean_logprob(*stored.mean_logprob);
  proto.set_meta_json(sample.meta_json);
  proto.set_shard(std::string(shard_name));
  proto.set_row(stored.row);
  proto.set_index(sample.index);
  proto.set_excluded(listing.excluded);
  return proto;
}

v1::Rejected ToProtoRejected(const SampleListing& listing) {
  v1::Rejected proto;
  proto.set_id(listing.sample.id);
  proto.set_source_line(listing.sample.source_line);
  proto.set_source(listing.sample.source);
  if (!listing.sample.rejection) return proto;
  const Rejection& rejection = *listing.sample.rejection;
  proto.set_reason(rejection.reason);
  if (rejection.layer) proto.set_layer(static_cast<int32_t>(*rejection.layer));
  if (rejection.token) proto.set_token(static_cast<int32_t>(*rejection.token));
  proto.set_message(rejection.message);
  return proto;
}

v1::Shard ToProto(const ShardRow& shard, const ShardFolders& folders) {
  const std::filesystem::path path = folders.FromStored(shard.path);
  v1::Shard proto;
  proto.set_name(path.filename().string());
  proto.set_path(path.string());
  proto.set_samples(shard.samples);
  proto.set_rows(shard.rows);
  proto.set_bytes(shard.bytes);
  proto.set_digest(shard.digest);
  return proto;
}

}  // namespace statetap
