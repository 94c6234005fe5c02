// stream: a job's samples over the network into shards here.
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <unordered_set>

#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/job_text.h"
#include "client/cli/local_shards.h"
#include "client/lib/feature_receiver.h"
#include "client/lib/proto_json.h"
#include "client/lib/stream_config.h"
#include "extractor/base/digest.h"
#include "extractor/base/file.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;

struct StreamFlags {
  std::vector<std::string> jobs;
  std::string out, group, where, shard_bytes = "1GiB";
  std::vector<int> boundaries;
  std::optional<uint64_t> shuffle;
  int rank = 0, world = 0;
  bool equal_counts = false, no_follow = false;
};

// What a folder already holds of a job.
struct LocalPart {
  std::unordered_set<std::string> ids;
  int next_shard = 0;
};

std::string ShardName(const std::string& job, int number) {
  return fmt::format("{}-{:05}.h5", job, number);
}

absl::StatusOr<LocalPart> ScanFolder(const fs::path& out, const std::string& job,
                                     const std::vector<int>& boundaries) {
  LocalPart part;
  std::vector<fs::path> shards;
  for (; fs::exists(out / ShardName(job, part.next_shard)); ++part.next_shard)
    shards.push_back(out / ShardName(job, part.next_shard));
  STATETAP_RETURN_IF_ERROR(ForEachShard(shards, [&](const ShardReader& shard) -> absl::Status {
    if (shard.config().boundaries != boundaries)
      return absl::FailedPreconditionError(
          fmt::format("{} holds boundaries {}, the stream {}; stream into another folder",
                      shard.path().string(), fmt::join(shard.config().boundaries, ","),
                      fmt::join(boundaries, ",")));
    for (const SampleEntry& entry : shard.samples()) part.ids.insert(entry.id);
    return absl::OkStatus();
  }));
  return part;
}

// The group of a folder: drawn once and kept there, so that coming back resumes, and a new folder
// gets everything. INVALID_ARGUMENT where --group names another one.
absl::StatusOr<std::string> GroupOf(const fs::path& out, const std::string& given) {
  const fs::path file = out / "stream-group.txt";
  const absl::StatusOr<std::string> kept = ReadWholeFile(file, 4096);
  if (!kept.ok() && !absl::IsNotFound(kept.status())) return kept.status();
  if (kept.ok()) {
    const std::string group = kept->substr(0, kept->find('\n'));
    if (!given.empty() && given != group)
      return absl::InvalidArgumentError(fmt::format(
          "--group {}: {} was begun as group {}; use another folder", given, out.string(), group));
    return group;
  }
  std::random_device random;
  const std::string group =
      given.empty() ? fmt::format("folder-{:08x}{:08x}", random(), random()) : given;
  STATETAP_RETURN_IF_ERROR(WriteFileAtomically(file, group + "\n"));
  return group;
}

class Meter {
 public:
  void Count(const ReceivedSample& sample) {
    ++samples_;
    for (const auto& states : sample.states)
      bytes_ += static_cast<int64_t>(states.size() * sizeof(uint16_t));
  }
  // `total`: 0 where unknown.
  std::string Describe(int64_t total) const {
    const double seconds = std::max(
        1e-9, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count());
    return fmt::format("{}{} samples, {} · {} samples/s, {:.1f} MB/s", FormatCount(samples_),
                       total > 0 ? " of " + FormatCount(total) : "", FormatBytes(bytes_),
                       FormatRate(static_cast<double>(samples_) / seconds),
                       static_cast<double>(bytes_) / seconds / 1e6);
  }
  int64_t samples() const { return samples_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  int64_t samples_ = 0, bytes_ = 0;
};

// Writes what the receiver gives, a shard at a time of each job, and acknowledges what is durable
// here.
class LocalCopy {
 public:
  LocalCopy(FeatureReceiver& receiver, fs::path out, std::map<std::string, int> next_shards,
            int64_t shard_bytes)
      : receiver_(receiver),
        out_(std::move(out)),
        next_shards_(std::move(next_shards)),
        shard_bytes_(shard_bytes) {}

  absl::Status Write(const ReceivedSample& sample) {
    std::unique_ptr<ShardWriter>& writer = open_[sample.job_index];
    if (writer == nullptr) {
      STATETAP_ASSIGN_OR_RETURN(const ShardConfig config,
                                ShardConfigOf(receiver_.header_of(sample)));
      const fs::path path = out_ / ShardName(config.job, next_shards_[config.job]++);
      STATETAP_ASSIGN_OR_RETURN(writer, ShardWriter::Create(path, config, {.from_fp8 = true}));
    }
    const std::vector<std::span<const uint16_t>> states(sample.states.begin(), sample.states.end());
    STATETAP_RETURN_IF_ERROR(writer->Append(sample.record, states));
    last_ = sample.sequence;
    return writer->states_bytes() >= shard_bytes_ ? Commit() : absl::OkStatus();
  }

  // All of them: an acknowledgement covers everything before it.
  absl::Status Commit() {
    for (const auto& [job, writer] : open_) {
      STATETAP_RETURN_IF_ERROR(writer->Commit().status());
      ++shards_;
    }
    if (open_.empty()) return absl::OkStatus();
    open_.clear();
    receiver_.Ack(last_);
    return absl::OkStatus();
  }
  int shards() const { return shards_; }

 private:
  FeatureReceiver& receiver_;
  fs::path out_;
  std::map<std::string, int> next_shards_;  // by job
  int64_t shard_bytes_;
  std::map<int, std::unique_ptr<ShardWriter>> open_;  // by job index
  uint64_t last_ = 0;
  int shards_ = 0;
};

// `total`: 0 where unknown.
absl::Status Receive(FeatureReceiver& receiver, LocalCopy& copy, Meter& meter, Progress& progress,
                     int64_t total) {
  while (true) {
    absl::StatusOr<std::optional<ReceivedSample>> sample = receiver.Next();
    // What came whole is kept, whatever ended the stream.
    if (!sample.ok()) {
      STATETAP_RETURN_IF_ERROR(copy.Commit());
      return sample.status();
    }
    if (!sample->has_value()) return copy.Commit();
    STATETAP_RETURN_IF_ERROR(copy.Write(**sample));
    meter.Count(**sample);
    progress.ShowShare(meter.Describe(total), meter.samples(), total);
  }
}

// What the folder has of the jobs, and how they stand.
struct Begun {
  std::vector<std::string> jobs;  // ids
  FeatureReceiver::Known known;
  std::map<std::string, int> next_shards;
  int64_t had = 0;
  bool waits = true;                 // for a first sample
  std::vector<std::string> unended;  // "job-1 is running": they may get more
};
absl::StatusOr<Begun> LookAt(Client& client, const StreamFlags& flags) {
  Begun begun;
  for (const std::string& name : flags.jobs) {
    STATETAP_ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(name));
    std::vector<int> boundaries = flags.boundaries;
    if (boundaries.empty()) boundaries.assign(job.boundaries().begin(), job.boundaries().end());
    STATETAP_ASSIGN_OR_RETURN(LocalPart part, ScanFolder(flags.out, job.id(), boundaries));
    begun.jobs.push_back(job.id());
    begun.next_shards[job.id()] = part.next_shard;
    begun.had += static_cast<int64_t>(part.ids.size());
    begun.known[job.id()] = std::move(part.ids);
    if (!IsTerminal(job.state()))
      begun.unended.push_back(
          fmt::format("{} is {}", job.id(),
                      EnumName(*v1::JobState_descriptor()->FindValueByNumber(job.state()))));
    begun.waits = begun.waits && job.counts().stored() == 0 && !IsTerminal(job.state());
  }
  return begun;
}

void Report(Context& context, const StreamFlags& flags, const Begun& begun, const Meter& meter,
            const LocalCopy& copy, const std::string& group) {
  if (context.json) {
    context.PrintJson({{"jobs", begun.jobs},
                       {"job", begun.jobs[0]},
                       {"samples", meter.samples()},
                       {"bytes", meter.bytes()},
                       {"shards", copy.shards()},
                       {"resumed_after", begun.had},
                       {"group", group}});
    return;
  }
  context.out << fmt::format(
      "{}: {} into {} shard{} in {}{}\n", fmt::join(begun.jobs, ", "), meter.Describe(0),
      copy.shards(), copy.shards() == 1 ? "" : "s", flags.out,
      begun.had > 0 ? fmt::format(" ({} were there)", FormatCount(begun.had)) : "");
}

absl::Status StreamJobs(Context& context, const StreamFlags& flags, const v1::StreamStart& base,
                        int64_t shard_bytes) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const Begun begun, LookAt(*client, flags));
  v1::StreamStart start = base;
  if (begun.jobs.size() == 1) {
    start.set_job(begun.jobs[0]);  // as servers before several jobs have it
  } else {
    start.mutable_jobs()->Assign(begun.jobs.begin(), begun.jobs.end());
  }
  const auto progress = context.MakeProgress();
  // The header comes with the first stored sample.
  if (flags.shuffle && !begun.unended.empty() && !flags.no_follow) {
    progress->ShowText(fmt::format("a shuffled stream begins when its jobs have ended: {}",
                                   fmt::join(begun.unended, ", ")));
  } else if (begun.waits) {
    progress->ShowText("waiting for the first shard");
  }
  const auto on_lost = [&] { progress->Say(kLostServer); };
  STATETAP_ASSIGN_OR_RETURN(const auto receiver,
                            FeatureReceiver::Open(*client, start, begun.known, on_lost));
  if (const int64_t left_out = receiver->header().left_out(); left_out > 0)
    context.Say(fmt::format("{} samples are left out, so that every rank gets as many", left_out));
  LocalCopy copy(*receiver, flags.out, begun.next_shards, shard_bytes);
  Meter meter;
  // Of a job that goes on it is not known how many it will have.
  const int64_t total =
      begun.unended.empty() || flags.no_follow ? receiver->header().remaining() : 0;
  const absl::Status received = Receive(*receiver, copy, meter, *progress, total);
  progress->Clear();
  const absl::Status closed = received.ok() ? receiver->Close() : absl::OkStatus();
  Report(context, flags, begun, meter, copy, start.group());
  STATETAP_RETURN_IF_ERROR(received);
  return closed;
}

v1::StreamStart StartOf(const StreamFlags& flags, const std::string& group) {
  v1::StreamStart start;
  start.set_group(group);
  start.set_follow(!flags.no_follow);
  start.set_where(flags.where);
  start.mutable_boundaries()->Assign(flags.boundaries.begin(), flags.boundaries.end());
  if (flags.shuffle) {
    start.set_order(v1::STREAM_ORDER_SHUFFLED);
    start.set_seed(*flags.shuffle);
  }
  start.set_rank(flags.rank);
  start.set_world(flags.world);
  start.set_equal_counts(flags.equal_counts);
  return start;
}

absl::StatusOr<int> Stream(Context& context, const StreamFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const uint64_t shard_bytes, ParseBytes(flags.shard_bytes));
  if (flags.world > 1 && flags.group.empty())
    return absl::InvalidArgumentError(
        "--world: the ranks share a group; give each the same --group");
  std::error_code error;
  fs::create_directories(flags.out, error);
  if (error)
    return absl::InvalidArgumentError(
        fmt::format("--out {}: cannot make the folder: {}", flags.out, error.message()));
  // Two at once would write the same shards, each half of the samples.
  const absl::StatusOr<File> lock = LockFolder(flags.out);
  if (!lock.ok())
    return WithContext(lock.status(), "--out; one stream at a time fills a folder, give another");
  STATETAP_ASSIGN_OR_RETURN(const std::string group, GroupOf(flags.out, flags.group));
  STATETAP_RETURN_IF_ERROR(
      StreamJobs(context, flags, StartOf(flags, group), static_cast<int64_t>(shard_bytes)));
  return kExitDone;
}

}  // namespace

Command StreamCommand() {
  return {
      "stream", "Receives stored samples over the network and writes shards here",
      "Waits for samples of jobs that still run. A server that goes away, or stops answering, has "
      "two minutes to come back. Run it again with the same folder and it goes on where it "
      "stopped. "
      "Several jobs come in one stream; their boundaries are the same, or "
      "--boundaries names some that all have.\n\n"
      "Examples:\n  statetap stream prompts.jsonl --out copy/\n"
      "  statetap stream JOB --out copy/ --no-follow --server trainer-node:7070\n"
      "  statetap stream A B --out copy/ --shuffle 7 --where 'split == \"train\"'\n"
      "  statetap stream JOB --out rank3/ --group train --rank 3 --world 8",
      [](CLI::App& app) -> Runner {
        auto flags = std::make_shared<StreamFlags>();
        app.add_option("JOB", flags->jobs, "Jobs, in one stream")->required();
        app.add_option("--out", flags->out, "Folder for the shards")->required();
        app.add_option("--where", flags->where, std::string(kWhereHelp));
        app.add_option("--boundaries", flags->boundaries, "Only these, ascending, as 4,8 [all]")
            ->delimiter(',');
        app.add_option("--shuffle", flags->shuffle,
                       "In an order fixed by this seed, once the jobs have ended [stored order]");
        app.add_option("--group", flags->group,
                       "Acknowledgements are kept by group [one of the folder's own]");
        app.add_option("--rank", flags->rank, "With --world: this one's fixed part [0]");
        app.add_option("--world", flags->world,
                       "Number of ranks of the group that split the samples [no split]");
        app.add_flag("--equal-counts", flags->equal_counts,
                     "With --world: as many for each rank; the last few go to none");
        app.add_option("--shard-bytes", flags->shard_bytes,
                       "Size at which a shard is closed [1GiB]");
        app.add_flag("--no-follow", flags->no_follow, "End after what is stored now");
        return [=](Context& context) { return Stream(context, *flags); };
      }};
}

}  // namespace statetap
