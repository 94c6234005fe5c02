// stream: a job's samples over the network into shards here.
#include <chrono>
#include <random>
#include <unordered_set>

#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/job_text.h"
#include "client/cli/local_shards.h"
#include "client/lib/feature_receiver.h"
#include "client/lib/stream_config.h"
#include "extractor/base/digest.h"
#include "extractor/base/file.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;

struct StreamFlags {
  std::vector<std::string> jobs;
  std::string out, group, shard_bytes = "1GiB";
  bool no_follow = false;
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
  std::string Describe() const {
    const double seconds = std::max(
        1e-9, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count());
    return fmt::format("{} samples, {} · {} samples/s, {:.1f} MB/s", FormatCount(samples_),
                       FormatBytes(bytes_), FormatRate(static_cast<double>(samples_) / seconds),
                       static_cast<double>(bytes_) / seconds / 1e6);
  }
  int64_t samples() const { return samples_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  int64_t samples_ = 0, bytes_ = 0;
};

// Writes what the receiver gives and acknowledges what is durable here.
class LocalCopy {
 public:
  LocalCopy(FeatureReceiver& receiver, fs::path out, int next_shard, int64_t shard_bytes)
      : receiver_(receiver),
        out_(std::move(out)),
        next_shard_(next_shard),
        shard_bytes_(shard_bytes) {}

  absl::Status Write(const ReceivedSample& sample) {
    if (writer_ == nullptr) {
      STATETAP_ASSIGN_OR_RETURN(const ShardConfig config, ShardConfigOf(receiver_.header()));
      STATETAP_ASSIGN_OR_RETURN(
          writer_, ShardWriter::Create(out_ / ShardName(config.job, next_shard_++), config, {}));
    }
    const std::vector<std::span<const uint16_t>> states(sample.states.begin(), sample.states.end());
    STATETAP_RETURN_IF_ERROR(writer_->Append(sample.record, states));
    last_ = sample.sequence;
    return writer_->states_bytes() >= shard_bytes_ ? Commit() : absl::OkStatus();
  }

  absl::Status Commit() {
    if (writer_ == nullptr) return absl::OkStatus();
    STATETAP_RETURN_IF_ERROR(writer_->Commit().status());
    writer_.reset();
    ++shards_;
    receiver_.Ack(last_);
    return absl::OkStatus();
  }
  int shards() const { return shards_; }

 private:
  FeatureReceiver& receiver_;
  fs::path out_;
  int next_shard_;
  int64_t shard_bytes_;
  std::unique_ptr<ShardWriter> writer_;
  uint64_t last_ = 0;
  int shards_ = 0;
};

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
    progress.ShowCount(meter.Describe(), meter.samples(), total);
  }
}

absl::Status StreamJob(Context& context, const StreamFlags& flags, const std::string& job,
                       const v1::StreamStart& base, int64_t shard_bytes) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const v1::Job state, client->GetJob(job));
  v1::StreamStart start = base;
  start.set_job(state.id());
  std::vector<int> boundaries(start.boundaries().begin(), start.boundaries().end());
  if (boundaries.empty()) boundaries.assign(state.boundaries().begin(), state.boundaries().end());
  STATETAP_ASSIGN_OR_RETURN(const LocalPart part, ScanFolder(flags.out, state.id(), boundaries));
  const size_t had = part.ids.size();
  const auto progress = context.MakeProgress();
  // The header comes with the first stored sample.
  if (state.counts().stored() == 0 && !IsTerminal(state.state()))
    progress->ShowText("waiting for the first shard");
  STATETAP_ASSIGN_OR_RETURN(const auto receiver, FeatureReceiver::Open(*client, start, part.ids));
  LocalCopy copy(*receiver, flags.out, part.next_shard, shard_bytes);
  Meter meter;
  const absl::Status received =
      Receive(*receiver, copy, meter, *progress, receiver->header().remaining());
  progress->Clear();
  const absl::Status closed = received.ok() ? receiver->Close() : absl::OkStatus();
  if (context.json) {
    context.PrintJson({{"job", state.id()},
                       {"samples", meter.samples()},
                       {"bytes", meter.bytes()},
                       {"shards", copy.shards()},
                       {"resumed_after", had},
                       {"group", start.group()}});
  } else {
    context.out << fmt::format(
        "{}: {} into {} shard{} in {}{}\n", state.id(), meter.Describe(), copy.shards(),
        copy.shards() == 1 ? "" : "s", flags.out,
        had > 0 ? fmt::format(" ({} were there)", FormatCount(static_cast<int64_t>(had))) : "");
  }
  STATETAP_RETURN_IF_ERROR(received);
  return closed;
}

absl::StatusOr<int> Stream(Context& context, const StreamFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const uint64_t shard_bytes, ParseBytes(flags.shard_bytes));
  v1::StreamStart start;
  start.set_follow(!flags.no_follow);
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
  start.set_group(group);
  for (const std::string& job : flags.jobs)
    STATETAP_RETURN_IF_ERROR(
        StreamJob(context, flags, job, start, static_cast<int64_t>(shard_bytes)));
  return kExitDone;
}

}  // namespace

Command StreamCommand() {
  return {
      "stream", "Receives a job's samples over the network and writes shards here",
      "Waits for samples of a job that still runs. Run it again with the same folder and it goes "
      "on where it stopped.\n\n"
      "Examples:\n  statetap stream prompts.jsonl --out copy/\n"
      "  statetap stream JOB --out copy/ --no-follow --server trainer-node:7070",
      [](CLI::App& app) -> Runner {
        auto flags = std::make_shared<StreamFlags>();
        app.add_option("JOB", flags->jobs, "Jobs, one after another")->required();
        app.add_option("--out", flags->out, "Folder for the shards")->required();
        app.add_option("--group", flags->group,
                       "Acknowledgements are kept by group [one of the folder's own]");
        app.add_option("--shard-bytes", flags->shard_bytes,
                       "Size at which a shard is closed [1GiB]");
        app.add_flag("--no-follow", flags->no_follow, "End after what is stored now");
        return [=](Context& context) { return Stream(context, *flags); };
      }};
}

}  // namespace statetap
