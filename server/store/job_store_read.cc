// The store's queries. They run on a connection of their own: a commit in progress delays none.
#include <algorithm>
#include <cstring>

#include "extractor/base/digest.h"
#include "server/store/job_store.h"

namespace statetap {
namespace {

constexpr std::string_view kJobColumns =
    "key, id, COALESCE(name, ''), message, state, options, digest, created, started, ended, "
    "weight_digest, tokenizer_digest, template_digest, dtype, inner_eps, submitted, stored, "
    "rejected, cancelled, to_do, excluded, evicted, tokens, generated, bytes, stop_ids, thoughts, "
    "dropped_earlier, dropped_tool_turns, dropped_last, tool_calls, odd_tool_ids, "
    "spelled_specials, "
    "gate";

JobRecord ReadJob(const SqlRow& row) {
  JobRecord job;
  job.key = row.Int(0);
  job.id = row.Text(1);
  job.name = row.Text(2);
  job.message = row.Text(3);
  job.state = static_cast<JobState>(row.Int(4));
  job.options = row.Text(5);
  job.digest = row.Text(6);
  job.created_ms = row.Int(7);
  job.started_ms = row.Int(8);
  job.ended_ms = row.Int(9);
  job.content = {row.Text(10), row.Text(11), row.Text(12),
                 row.Text(13), row.Real(14), row.Text(25)};
  job.counts = {row.Int(15), row.Int(16), row.Int(17), row.Int(18),
                row.Int(19), row.Int(20), row.Int(21)};
  job.tokens = row.Int(22);
  job.generated = row.Int(23);
  job.bytes = row.Int(24);
  job.text = {row.Int(26), row.Int(27), row.Int(28), row.Int(29),
              row.Int(30), row.Int(31), row.Int(32)};
  job.gate = static_cast<Gate>(row.Int(33));
  return job;
}

constexpr std::string_view kSampleColumns =
    "idx, id, digest, source, meta, split, source_line, prompt_tokens, truncated, max_new, "
    "temperature, top_p";
constexpr int kNumSampleColumns = 12;

SampleRow ReadSample(const SqlRow& row, int first = 0) {
  SampleRow sample;
  sample.index = row.Int(first);
  sample.id = row.Text(first + 1);
  sample.digest = row.Text(first + 2);
  sample.source = row.Text(first + 3);
  sample.meta_json = row.Text(first + 4);
  sample.split = row.Text(first + 5);
  sample.source_line = row.Int(first + 6);
  sample.prompt_tokens = static_cast<int32_t>(row.Int(first + 7));
  sample.truncated = row.Int(first + 8) != 0;
  sample.max_new_tokens = static_cast<int32_t>(row.Int(first + 9));
  sample.temperature = row.OptionalReal(first + 10);
  sample.top_p = row.OptionalReal(first + 11);
  return sample;
}

// Behind kSampleColumns, of stored samples.
constexpr std::string_view kStoredColumns =
    "shard, position, row, rows, finish, mean_logprob, supervised, generated, excluded";

SampleListing ReadListing(const SqlRow& row, int first = 0) {
  SampleListing listing;
  listing.sample = ReadSample(row, first);
  const int k = first + kNumSampleColumns;
  listing.shard = row.Int(k);
  StoredSample& stored = listing.stored;
  stored.index = listing.sample.index;
  stored.position = row.Int(k + 1);
  stored.row = row.Int(k + 2);
  stored.rows = row.Int(k + 3);
  stored.finish = row.Text(k + 4);
  stored.truncated = listing.sample.truncated;
  stored.mean_logprob = row.OptionalReal(k + 5);
  stored.supervised = row.Int(k + 6);
  stored.generated = row.Int(k + 7);
  listing.excluded = row.Int(k + 8) != 0;
  return listing;
}

template <typename T>
std::vector<T> VectorOf(std::span<const std::byte> blob) {
  std::vector<T> values(blob.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), blob.data(), values.size() * sizeof(T));
  return values;
}

constexpr std::string_view kShardColumns = "seq, path, samples, rows, bytes, digest, evicted";

ShardRow ReadShard(const SqlRow& row) {
  return {row.Int(0), row.Text(1), row.Int(2),     row.Int(3),
          row.Int(4), row.Text(5), row.Int(6) != 0};
}

IndexedSample ReadIndexed(const SqlRow& row) {
  return {row.Int(0), row.Int(1), row.Int(2), row.Int(3), row.Int(4)};
}

SampleFacts FactsOf(const SampleListing& listing) {
  const SampleRow& sample = listing.sample;
  const StoredSample& stored = listing.stored;
  return {sample.id,         sample.source,    sample.split,         stored.finish,
          sample.meta_json,  sample.index,     sample.prompt_tokens, stored.rows,
          stored.supervised, stored.generated, stored.mean_logprob,  stored.truncated};
}

}  // namespace

absl::StatusOr<JobRecord> JobStore::GetJob(std::string_view id_or_name) const {
  std::optional<JobRecord> found;
  const std::lock_guard lock(read_mutex_);
  // An id wins over a name.
  static const std::string sql = fmt::format(
      "SELECT {} FROM jobs WHERE state <> 0 AND (id = ?1 OR name = ?1) "
      "ORDER BY id = ?1 DESC LIMIT 1",
      kJobColumns);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      sql, [&](const SqlRow& row) { found = ReadJob(row); }, id_or_name));
  if (found) return *std::move(found);
  return absl::NotFoundError(
      fmt::format("job: no job has the id or name \"{}\"; `statetap list` shows all", id_or_name));
}

absl::StatusOr<JobRecord> JobStore::GetJob(int64_t key) const {
  std::optional<JobRecord> found;
  const std::lock_guard lock(read_mutex_);
  static const std::string sql = fmt::format("SELECT {} FROM jobs WHERE key = ?", kJobColumns);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      sql, [&](const SqlRow& row) { found = ReadJob(row); }, key));
  if (found) return *std::move(found);
  return absl::NotFoundError("the job was deleted");
}

absl::StatusOr<std::vector<JobRecord>> JobStore::ListJobs() const {
  std::vector<JobRecord> jobs;
  const std::lock_guard lock(read_mutex_);
  static const std::string sql =
      fmt::format("SELECT {} FROM jobs WHERE state <> 0 ORDER BY key DESC", kJobColumns);
  STATETAP_RETURN_IF_ERROR(
      read_.Query(sql, [&](const SqlRow& row) { jobs.push_back(ReadJob(row)); }));
  return jobs;
}

absl::StatusOr<std::vector<SampleRow>> JobStore::ToDo(int64_t key, int64_t after,
                                                      int64_t limit) const {
  std::vector<SampleRow> samples;
  const std::lock_guard lock(read_mutex_);
  static const std::string sql = fmt::format(
      "SELECT {}, ids, mask FROM samples WHERE job = ? AND state = 0 AND idx > ? "
      "ORDER BY idx LIMIT ?",
      kSampleColumns);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      sql,
      [&](const SqlRow& row) {
        samples.push_back(ReadSample(row));
        samples.back().ids = VectorOf<int32_t>(row.Blob(kNumSampleColumns));
        samples.back().mask = VectorOf<uint8_t>(row.Blob(kNumSampleColumns + 1));
      },
      key, after, limit));
  return samples;
}

absl::StatusOr<std::vector<SampleListing>> JobStore::Stored(int64_t key, int64_t after,
                                                            int64_t limit,
                                                            const SampleFilter& filter) const {
  std::vector<SampleListing> samples;
  static const std::string sql = fmt::format(
      "SELECT {}, {} FROM samples WHERE job = ? AND state = 1 AND idx > ? ORDER BY idx LIMIT ?",
      kSampleColumns, kStoredColumns);
  // A page of the table at a time, until enough of them pass.
  for (int64_t seen = limit; seen == limit && static_cast<int64_t>(samples.size()) < limit;) {
    seen = 0;
    const std::lock_guard lock(read_mutex_);
    STATETAP_RETURN_IF_ERROR(read_.Query(
        sql,
        [&](const SqlRow& row) {
          ++seen;
          after = row.Int(0);
          if (static_cast<int64_t>(samples.size()) == limit) return;
          SampleListing listing = ReadListing(row);
          if (filter.Holds(FactsOf(listing))) samples.push_back(std::move(listing));
        },
        key, after, limit));
  }
  return samples;
}

absl::StatusOr<std::vector<SampleListing>> JobStore::Rejected(int64_t key, int64_t after,
                                                              int64_t limit) const {
  std::vector<SampleListing> samples;
  const std::lock_guard lock(read_mutex_);
  static const std::string sql = fmt::format(
      "SELECT {}, reason, layer, token, message FROM samples "
      "WHERE job = ? AND state = 2 AND idx > ? ORDER BY idx LIMIT ?",
      kSampleColumns);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      sql,
      [&](const SqlRow& row) {
        constexpr int k = kNumSampleColumns;
        SampleListing listing;
        listing.sample = ReadSample(row);
        listing.sample.rejection =
            Rejection{row.Text(k), row.OptionalInt(k + 1), row.OptionalInt(k + 2), row.Text(k + 3)};
        samples.push_back(std::move(listing));
      },
      key, after, limit));
  return samples;
}

absl::StatusOr<std::vector<ShardRow>> JobStore::Shards(int64_t key) const {
  std::vector<ShardRow> shards;
  const std::lock_guard lock(read_mutex_);
  static const std::string sql =
      fmt::format("SELECT {} FROM shards WHERE job = ? ORDER BY seq", kShardColumns);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      sql, [&](const SqlRow& row) { shards.push_back(ReadShard(row)); }, key));
  return shards;
}

absl::StatusOr<ShardRow> JobStore::GetShard(int64_t key, int64_t seq) const {
  std::optional<ShardRow> shard;
  const std::lock_guard lock(read_mutex_);
  static const std::string sql =
      fmt::format("SELECT {} FROM shards WHERE job = ? AND seq = ?", kShardColumns);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      sql, [&](const SqlRow& row) { shard = ReadShard(row); }, key, seq));
  if (shard) return *std::move(shard);
  return absl::NotFoundError(fmt::format("the job has no shard {}", seq));
}

absl::StatusOr<std::vector<ShardRow>> JobStore::FullyAcknowledged(int64_t key) const {
  std::vector<ShardRow> shards;
  const std::lock_guard lock(read_mutex_);
  static const std::string sql = fmt::format(
      "SELECT {} FROM shards WHERE job = ?1 AND evicted = 0 "
      "AND EXISTS (SELECT 1 FROM acks WHERE acks.job = ?1) "
      "AND NOT EXISTS (SELECT 1 FROM samples s, "
      "(SELECT DISTINCT consumer FROM acks WHERE acks.job = ?1) g "
      "WHERE s.job = ?1 AND s.state = 1 AND s.excluded = 0 AND s.shard = shards.seq "
      "AND NOT EXISTS (SELECT 1 FROM acks WHERE acks.job = ?1 AND acks.consumer = g.consumer "
      "AND acks.idx = s.idx)) ORDER BY seq",
      kShardColumns);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      sql, [&](const SqlRow& row) { shards.push_back(ReadShard(row)); }, key));
  return shards;
}

absl::StatusOr<std::vector<JobStore::ReaderLag>> JobStore::ReaderLags(int64_t key) const {
  std::vector<ReaderLag> lags;
  const std::lock_guard lock(read_mutex_);
  static const std::string sql = [] {
    const std::string sums = "COUNT(*) AS samples, COALESCE(SUM(s.rows), 0) AS rows",
                      shards =
                          "shards ON shards.job = s.job AND shards.seq = s.shard "
                          "AND shards.evicted = 0",
                      there = "s.job = ?1 AND s.state = 1 AND s.excluded = 0";
    return fmt::format(
        "SELECT done.consumer, stored.samples - done.samples, stored.rows - done.rows FROM "
        "(SELECT {0} FROM samples s JOIN {1} WHERE {2}) stored, "
        "(SELECT a.consumer, {0} FROM acks a JOIN samples s ON s.job = a.job AND s.idx = a.idx "
        "JOIN {1} WHERE a.job = ?1 AND {2} GROUP BY a.consumer) done",
        sums, shards, there);
  }();
  STATETAP_RETURN_IF_ERROR(read_.Query(
      sql,
      [&](const SqlRow& row) {
        lags.push_back({row.Text(0), row.Int(1), row.Int(2)});
      },
      key));
  return lags;
}

absl::StatusOr<int64_t> JobStore::Acknowledgements(int64_t key) const {
  int64_t count = 0;
  const std::lock_guard lock(read_mutex_);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      "SELECT COUNT(*) FROM acks WHERE job = ?", [&](const SqlRow& row) { count = row.Int(0); },
      key));
  return count;
}

absl::StatusOr<std::map<std::string, int64_t>> JobStore::RejectedByReason() const {
  std::map<std::string, int64_t> counts;
  const std::lock_guard lock(read_mutex_);
  STATETAP_RETURN_IF_ERROR(
      read_.Query("SELECT reason, COUNT(*) FROM samples WHERE state = 2 "
                  "AND job IN (SELECT key FROM jobs WHERE state != 0) GROUP BY reason",
                  [&](const SqlRow& row) { counts[row.Text(0)] = row.Int(1); }));
  return counts;
}

absl::StatusOr<int64_t> JobStore::ShardBytes() const {
  int64_t bytes = 0;
  const std::lock_guard lock(read_mutex_);
  STATETAP_RETURN_IF_ERROR(
      read_.Query("SELECT COALESCE(SUM(bytes), 0) FROM shards WHERE evicted = 0",
                  [&](const SqlRow& row) { bytes = row.Int(0); }));
  return bytes;
}

absl::StatusOr<std::vector<std::string>> JobStore::Doomed() const {
  std::vector<std::string> ids;
  const std::lock_guard lock(read_mutex_);
  STATETAP_RETURN_IF_ERROR(
      read_.Query("SELECT id FROM doomed", [&](const SqlRow& row) { ids.push_back(row.Text(0)); }));
  return ids;
}

absl::StatusOr<std::vector<IndexedSample>> JobStore::InStoredOrder(
    int64_t key, std::string_view group, int64_t shard, int64_t row, int64_t limit,
    const SampleFilter& filter) const {
  std::vector<IndexedSample> samples;
  constexpr int kNumIndexedColumns = 6;
  // The texts are read only where an expression asks for them.
  const auto sql_with = [](std::string_view columns) {
    return fmt::format(
        "SELECT idx, shard, position, row, rows, EXISTS (SELECT 1 FROM acks WHERE acks.job = ?1 "
        "AND consumer = ?4 AND acks.idx = s.idx){} FROM samples s WHERE job = ?1 AND state = 1 "
        "AND excluded = 0 AND (shard, row) > (?2, ?3) ORDER BY shard, row LIMIT ?5",
        columns);
  };
  static const std::string all = sql_with("");
  static const std::string with_facts =
      sql_with(fmt::format(", {}, {}", kSampleColumns, kStoredColumns));
  for (int64_t seen = limit; seen == limit && static_cast<int64_t>(samples.size()) < limit;) {
    seen = 0;
    const std::lock_guard lock(read_mutex_);
    STATETAP_RETURN_IF_ERROR(read_.Query(
        filter.holds_for_all() ? all : with_facts,
        [&](const SqlRow& found) {
          ++seen;
          if (static_cast<int64_t>(samples.size()) == limit) return;
          const IndexedSample sample = ReadIndexed(found);
          shard = sample.shard;
          row = sample.row;
          const bool holds = filter.holds_for_all() ||
                             filter.Holds(FactsOf(ReadListing(found, kNumIndexedColumns)));
          if (holds) {
            samples.push_back(sample);
            samples.back().acknowledged = found.Int(kNumIndexedColumns - 1) != 0;
          }
        },
        key, shard, row, group, limit));
  }
  return samples;
}

absl::StatusOr<bool> JobStore::IsAcknowledged(int64_t key, std::string_view group,
                                              int64_t index) const {
  bool acknowledged = false;
  const std::lock_guard lock(read_mutex_);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      "SELECT 1 FROM acks WHERE job = ? AND consumer = ? AND idx = ?",
      [&](const SqlRow&) { acknowledged = true; }, key, group, index));
  return acknowledged;
}

absl::StatusOr<IndexedSample> JobStore::FindStored(int64_t key, std::string_view id) const {
  std::optional<IndexedSample> found;
  int64_t state = -1;
  const std::lock_guard lock(read_mutex_);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      "SELECT idx, shard, position, row, rows, state FROM samples WHERE job = ? AND id = ?",
      [&](const SqlRow& row) {
        found = ReadIndexed(row);
        state = row.Int(5);
      },
      key, id));
  if (!found) return absl::NotFoundError(fmt::format("id: the job has no sample \"{}\"", id));
  if (state != 1) {
    constexpr std::string_view kNames[] = {"still to do", "stored", "rejected", "cancelled"};
    return absl::FailedPreconditionError(
        fmt::format("id: sample \"{}\" is {}, only a stored one has states", id, kNames[state]));
  }
  return *found;
}

absl::StatusOr<int64_t> JobStore::MostTokens(
    int64_t key, const std::function<int64_t(int64_t)>& new_tokens) const {
  int64_t most = 0;
  const std::lock_guard lock(read_mutex_);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      "SELECT max_new, MAX(LENGTH(ids)) / 4 FROM samples WHERE job = ? AND state = 0 "
      "GROUP BY max_new",
      [&](const SqlRow& row) { most = std::max(most, row.Int(1) + new_tokens(row.Int(0))); }, key));
  return most;
}

absl::StatusOr<std::optional<std::string>> JobStore::ToDoDigest(int64_t key, int64_t index) const {
  std::optional<std::string> digest;
  const std::lock_guard lock(read_mutex_);
  STATETAP_RETURN_IF_ERROR(read_.Query(
      "SELECT digest FROM samples WHERE job = ? AND idx = ? AND state = 0",
      [&](const SqlRow& row) { digest = row.Text(0); }, key, index));
  return digest;
}

}  // namespace statetap
