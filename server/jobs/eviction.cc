#include "server/jobs/eviction.h"

#include <filesystem>
#include <system_error>

#include "extractor/base/log.h"
#include "extractor/shard/shard_reader.h"

namespace statetap {
namespace {

// Beside `path`, which keeps its number: shard-000001-tokens.h5.
std::filesystem::path TokensPath(const std::filesystem::path& path) {
  return path.parent_path() / (path.stem().string() + "-tokens.h5");
}

absl::StatusOr<ShardSummary> WriteWithoutStates(const ShardReader& shard,
                                                const std::filesystem::path& path) {
  ShardConfig config = shard.config();
  config.dtype = StatesDtype::kNone;
  ShardWriter::Options options;
  STATETAP_ASSIGN_OR_RETURN(options.kept_statistics, shard.ReadStatistics());
  STATETAP_ASSIGN_OR_RETURN(const auto writer, ShardWriter::Create(path, config, options));
  for (size_t i = 0; i < shard.samples().size(); ++i) {
    STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard.ReadRecord(static_cast<int64_t>(i)));
    STATETAP_RETURN_IF_ERROR(writer->Append(record, {}));
  }
  return writer->Commit();
}

absl::StatusOr<int64_t> EvictShard(JobStore& store, const ShardFolders& folders,
                                   const JobRecord& job, const ShardRow& shard) {
  const std::filesystem::path path = folders.FromStored(shard.path);
  STATETAP_ASSIGN_OR_RETURN(const auto reader, ShardReader::Open(path));
  const std::filesystem::path rest = TokensPath(path);
  std::error_code ignored;
  std::filesystem::remove(rest, ignored);  // of a call that failed behind the write
  STATETAP_ASSIGN_OR_RETURN(const ShardSummary summary, WriteWithoutStates(*reader, rest));
  ShardRow evicted = shard;
  evicted.path = folders.ToStored(summary.path);
  evicted.bytes = summary.bytes;
  evicted.digest = summary.digest;
  STATETAP_RETURN_IF_ERROR(store.MarkEvicted(job.key, evicted));
  std::filesystem::remove(path, ignored);  // else the next start does
  return shard.bytes - summary.bytes;
}

}  // namespace

absl::StatusOr<int64_t> EvictStates(JobStore& store, const ShardFolders& folders,
                                    const JobRecord& job, std::span<const ShardRow> shards) {
  int64_t freed = 0;
  for (const ShardRow& shard : shards) {
    if (shard.evicted) continue;
    STATETAP_ASSIGN_OR_RETURN(const int64_t bytes, EvictShard(store, folders, job, shard));
    freed += bytes;
  }
  if (freed > 0) LogInfo("{}: states evicted, {} bytes given back", job.id, freed);
  return freed;
}

}  // namespace statetap
