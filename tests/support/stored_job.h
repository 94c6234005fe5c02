// Stored jobs of any size, made at the speed of the disk.
#pragma once

#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "extractor/shard/shard_writer.h"
#include "server/store/job_store.h"

namespace statetap::testing {

// A job that has ended, written past engine and runner: what a server finds in its data folder.
struct JobShape {
  std::string name;
  int samples, tokens, hidden;
  std::vector<int> boundaries;  // every one with the same random states
  int shards = 1;               // divides the samples
};

// Its first shard's path.
inline absl::StatusOr<std::filesystem::path> StoreJob(const std::filesystem::path& data,
                                                      const JobShape& shape) {
  namespace fs = std::filesystem;
  STATETAP_ASSIGN_OR_RETURN(const auto store, JobStore::Open(data / "statetap.db", {}));
  STATETAP_ASSIGN_OR_RETURN(const int64_t key, store->CreateJob({.weight_digest = "stored"}));
  std::vector<SampleRow> rows(static_cast<size_t>(shape.samples));
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].index = static_cast<int64_t>(i);
    rows[i].id = fmt::format("sample-{:05}", i);
    rows[i].digest = rows[i].id;
    rows[i].ids.assign(static_cast<size_t>(shape.tokens), 7);
    rows[i].prompt_tokens = shape.tokens;
  }
  STATETAP_RETURN_IF_ERROR(store->AddSamples(key, rows).status());
  STATETAP_ASSIGN_OR_RETURN(const auto published,
                            store->PublishJob(key, shape.name, "", [](auto) { return ""; }));
  const fs::path folder = data / "shards" / published.job.id;
  fs::create_directories(folder);
  ShardConfig config;
  config.job = published.job.id;
  config.hidden = shape.hidden;
  config.layers = 61;
  config.boundaries = shape.boundaries;
  std::mt19937 random(1);
  std::vector<uint16_t> states(static_cast<size_t>(shape.tokens) *
                               static_cast<size_t>(shape.hidden));
  for (uint16_t& value : states) value = static_cast<uint16_t>((random() & 0x83ff) | 0x3c00);
  const std::vector<std::span<const uint16_t>> all(shape.boundaries.size(), states);
  const int64_t per_shard = shape.samples / shape.shards;
  for (int64_t seq = 1; seq <= shape.shards; ++seq) {
    STATETAP_ASSIGN_OR_RETURN(
        const auto writer, ShardWriter::Create(folder / fmt::format("shard-{:06}.h5", seq), config,
                                               {.statistics = ShardWriter::Statistics::kLeaveOut}));
    std::vector<StoredSample> stored;
    for (int64_t position = 0; position < per_shard; ++position) {
      const SampleRow& row = rows[static_cast<size_t>((seq - 1) * per_shard + position)];
      SampleRecord record;
      record.id = row.id;
      record.input_ids = row.ids;
      record.loss_mask.assign(row.ids.size(), 1);
      record.finish_reason = "prefill";
      record.source_index = row.index;
      STATETAP_RETURN_IF_ERROR(writer->Append(record, all));
      stored.push_back({.index = row.index,
                        .position = position,
                        .row = position * shape.tokens,
                        .rows = shape.tokens,
                        .finish = "prefill"});
    }
    STATETAP_ASSIGN_OR_RETURN(const ShardSummary summary, writer->Commit());
    STATETAP_RETURN_IF_ERROR(
        store->CommitShard(key,
                           {seq, fs::relative(summary.path, data).string(), summary.samples,
                            summary.rows, summary.bytes, summary.digest},
                           stored));
  }
  return folder / "shard-000001.h5";
}

}  // namespace statetap::testing
