#include "client/cli/sample_source.h"

#include <map>
#include <utility>

#include "client/lib/feature_receiver.h"

namespace statetap {
namespace {

class JobSamples : public SampleSource {
 public:
  JobSamples(Client& client, std::string job) : client_(client), job_(std::move(job)) {}

  absl::StatusOr<std::vector<std::string>> Ids(const std::string& where) override {
    std::vector<std::string> ids;
    STATETAP_RETURN_IF_ERROR(client_.ForEachSample(job_, where, [&](const v1::Sample& sample) {
      ids.push_back(sample.id());
      return absl::OkStatus();
    }));
    return ids;
  }

  absl::StatusOr<SampleStates> Read(const std::string& id) override {
    STATETAP_ASSIGN_OR_RETURN(FetchedSample fetched, FetchSample(client_, job_, id));
    const v1::StreamHeader& header = fetched.header;
    return SampleStates{.record = std::move(fetched.sample.record),
                        .model_digest = header.model_digest(),
                        .hidden = header.hidden(),
                        .layers = header.layers(),
                        .boundaries = {header.boundaries().begin(), header.boundaries().end()},
                        .states = std::move(fetched.sample.states)};
  }

 private:
  Client& client_;
  const std::string job_;
};

class LocalSamples : public SampleSource {
 public:
  explicit LocalSamples(std::vector<std::filesystem::path> paths) : paths_(std::move(paths)) {}

  absl::Status Index() {
    return ForEachShard(paths_, [&](const ShardReader& shard) -> absl::Status {
      for (size_t i = 0; i < shard.samples().size(); ++i) {
        const auto [place, is_new] =
            places_.emplace(shard.samples()[i].id, Place{shard.path(), {}, i});
        if (!is_new) place->second.other = shard.path();
      }
      return absl::OkStatus();
    });
  }

  absl::StatusOr<std::vector<std::string>> Ids(const std::string& where) override {
    STATETAP_ASSIGN_OR_RETURN(const SampleFilter filter, SampleFilter::Parse(where));
    std::vector<std::string> ids;
    STATETAP_RETURN_IF_ERROR(ForEachShard(paths_, [&](const ShardReader& shard) -> absl::Status {
      for (size_t i = 0; i < shard.samples().size(); ++i) {
        if (!filter.holds_for_all()) {
          STATETAP_ASSIGN_OR_RETURN(const SampleRecord record,
                                    shard.ReadRecord(static_cast<int64_t>(i)));
          if (!filter.Holds(FactsOf(record))) continue;
        }
        ids.push_back(shard.samples()[i].id);
      }
      return absl::OkStatus();
    }));
    return ids;
  }

  absl::StatusOr<SampleStates> Read(const std::string& id) override {
    const auto found = places_.find(id);
    if (found == places_.end())
      return absl::NotFoundError(
          fmt::format("no sample \"{}\" there; `statetap samples` lists those that are", id));
    const Place& place = found->second;
    if (!place.other.empty())
      return absl::FailedPreconditionError(
          fmt::format("sample \"{}\" is in {} and in {}: give the shards of one job", id,
                      place.path.string(), place.other.string()));
    // Neighbours lie in one shard, as a rule.
    if (open_ == nullptr || open_->path() != place.path) {
      STATETAP_ASSIGN_OR_RETURN(open_, ShardReader::Open(place.path));
    }
    const ShardConfig& config = open_->config();
    const SampleEntry& entry = open_->samples()[place.index];
    SampleStates sample{.model_digest = config.model_digest,
                        .hidden = config.hidden,
                        .layers = config.layers,
                        .boundaries = config.boundaries};
    STATETAP_ASSIGN_OR_RETURN(sample.record, open_->ReadRecord(static_cast<int64_t>(place.index)));
    for (size_t b = 0; b < config.boundaries.size(); ++b) {
      auto& states = sample.states.emplace_back(static_cast<size_t>(entry.rows * config.hidden));
      STATETAP_RETURN_IF_ERROR(open_->ReadStates(static_cast<int>(b), entry.first_row, states));
    }
    return sample;
  }

 private:
  struct Place {
    std::filesystem::path path, other;  // other: where the same id is again
    size_t index;
  };
  const std::vector<std::filesystem::path> paths_;
  std::map<std::string, Place> places_;
  std::unique_ptr<ShardReader> open_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SampleSource>> SampleSource::Open(Context& context,
                                                                 const Source& source) {
  if (!source.job.empty()) {
    STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
    return std::make_unique<JobSamples>(*client, source.job);
  }
  auto samples = std::make_unique<LocalSamples>(source.paths);
  STATETAP_RETURN_IF_ERROR(samples->Index());
  return samples;
}

}  // namespace statetap
