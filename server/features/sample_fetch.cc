#include "server/features/sample_fetch.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "server/features/sample_order.h"
#include "server/features/unread_shards.h"

namespace statetap {
namespace {

constexpr int kMostSamples = 10'000;

struct Place {
  const ShardRow* shard;
  int64_t position;
};

absl::Status CheckCount(std::string_view field, int count) {
  if (count >= 1 && count <= kMostSamples) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{}: {} were given; name 1 to {} samples a call", field, count, kMostSamples));
}

absl::Status CheckRequest(const v1::GetSamplesRequest& request) {
  const int rows = request.rows_size(), ids = request.ids_size();
  if (rows > 0 && ids > 0)
    return absl::InvalidArgumentError("rows: give either rows or ids, not both");
  return CheckCount(ids > 0 ? "ids" : "rows", rows + ids);
}

absl::StatusOr<std::vector<Place>> ByRow(std::span<const ShardRow> shards,
                                         const google::protobuf::RepeatedField<int64_t>& rows) {
  std::vector<int64_t> ends;  // of the shards: samples up to there
  for (const ShardRow& shard : shards)
    ends.push_back((ends.empty() ? 0 : ends.back()) + shard.samples);
  const int64_t stored = ends.empty() ? 0 : ends.back();
  std::vector<Place> places;
  for (const int64_t row : rows) {
    if (row < 0 || row >= stored) {
      return absl::OutOfRangeError(fmt::format(
          "rows: {} is not there; the job has {} stored samples, counted from 0", row, stored));
    }
    const auto shard = static_cast<size_t>(std::ranges::upper_bound(ends, row) - ends.begin());
    places.push_back({&shards[shard], row - (ends[shard] - shards[shard].samples)});
  }
  return places;
}

absl::StatusOr<std::vector<Place>> ById(
    const JobStore& store, int64_t job, std::span<const ShardRow> shards,
    const google::protobuf::RepeatedPtrField<std::string>& ids) {
  std::map<int64_t, const ShardRow*> by_seq;
  for (const ShardRow& shard : shards) by_seq[shard.seq] = &shard;
  std::vector<Place> places;
  for (const std::string& id : ids) {
    STATETAP_ASSIGN_OR_RETURN(const IndexedSample sample, store.FindStored(job, id));
    const auto shard = by_seq.find(sample.shard);
    if (shard == by_seq.end())  // written since the shards were listed
      return absl::AbortedError(fmt::format("ids: sample \"{}\" was just stored; ask again", id));
    places.push_back({shard->second, sample.position});
  }
  return places;
}

}  // namespace

absl::Status SendSamples(const JobStore& store, ShardCache& shards,
                         const v1::GetSamplesRequest& request, const FeatureOutlet& outlet) {
  STATETAP_RETURN_IF_ERROR(CheckRequest(request));
  const std::vector<int> wanted(request.boundaries().begin(), request.boundaries().end());
  STATETAP_RETURN_IF_ERROR(CheckBoundaries(wanted));
  STATETAP_ASSIGN_OR_RETURN(const JobRecord job, store.GetJob(request.job()));
  STATETAP_ASSIGN_OR_RETURN(const std::vector<ShardRow> rows, store.Shards(job.key));
  STATETAP_ASSIGN_OR_RETURN(const std::vector<Place> places,
                            request.ids().empty() ? ByRow(rows, request.rows())
                                                  : ById(store, job.key, rows, request.ids()));
  UnreadShards unread;
  std::vector<int> boundaries;
  int64_t sent = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& [shard, position] = places[i];
    const auto reader = shards.OpenVerified(*shard, position);
    if (!reader.ok()) {
      unread.Note(job, *shard, position, reader.status());
      continue;
    }
    if (sent++ == 0) {
      STATETAP_ASSIGN_OR_RETURN(boundaries,
                                SelectBoundaries(wanted, (*reader)->config().boundaries));
      v1::StreamFeaturesResponse header;
      *header.mutable_header() = HeaderOf(job, (*reader)->config(), boundaries);
      header.mutable_header()->set_remaining(static_cast<int64_t>(places.size()));
      header.mutable_header()->set_samples(static_cast<int64_t>(places.size()));
      if (!outlet(header, {})) return absl::CancelledError("the client has gone");
    }
    STATETAP_RETURN_IF_ERROR(
        SendSample(**reader, {.position = position, .delivery = i + 1}, boundaries, outlet));
  }
  v1::StreamFeaturesResponse end;
  end.mutable_end()->set_samples(sent);
  unread.AddTo(*end.mutable_end());
  if (!outlet(end, {})) return absl::CancelledError("the client has gone");
  return unread.AsStatus();
}

absl::StatusOr<int64_t> AcknowledgeSamples(JobStore& store, const v1::AcknowledgeRequest& request) {
  STATETAP_RETURN_IF_ERROR(CheckCount("ids", request.ids_size()));
  STATETAP_ASSIGN_OR_RETURN(const JobRecord job, store.GetJob(request.job()));
  std::vector<int64_t> indices;
  for (const std::string& id : request.ids()) {
    STATETAP_ASSIGN_OR_RETURN(const IndexedSample sample, store.FindStored(job.key, id));
    indices.push_back(sample.index);
  }
  STATETAP_RETURN_IF_ERROR(store.Acknowledge(job.key, GroupOf(request.group()), indices));
  return job.key;
}

}  // namespace statetap
