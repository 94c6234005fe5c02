#include "server/store/job_store.h"

#include <chrono>
#include <utility>

#include "extractor/base/log.h"
#include "server/store/schema.h"

namespace statetap {
namespace {

constexpr int kSchemaVersion = 6;

// From version i + 1 to i + 2.
constexpr std::string_view kMigrations[] = {
    "ALTER TABLE samples ADD COLUMN excluded INTEGER NOT NULL DEFAULT 0;"
    "CREATE TABLE doomed (id TEXT PRIMARY KEY) WITHOUT ROWID;",
    "ALTER TABLE jobs ADD COLUMN stop_ids TEXT NOT NULL DEFAULT '';",
    "ALTER TABLE shards ADD COLUMN evicted INTEGER NOT NULL DEFAULT 0;",
    "ALTER TABLE jobs ADD COLUMN thoughts INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE jobs ADD COLUMN dropped_earlier INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE jobs ADD COLUMN dropped_tool_turns INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE jobs ADD COLUMN dropped_last INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE jobs ADD COLUMN tool_calls INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE jobs ADD COLUMN odd_tool_ids INTEGER NOT NULL DEFAULT 0;"
    "ALTER TABLE jobs ADD COLUMN spelled_specials INTEGER NOT NULL DEFAULT 0;",
    // Whether a job under way has a gate, and was looked at, cannot be seen here: it is once more
    // (JobRunner passes those without one).
    "ALTER TABLE jobs ADD COLUMN gate INTEGER NOT NULL DEFAULT 0;"
    "UPDATE jobs SET gate = CASE WHEN message LIKE 'paused at its gate:%' THEN 2 ELSE 1 END "
    "WHERE state IN (1, 2, 3, 7);",
};
static_assert(std::size(kMigrations) == kSchemaVersion - 1);

absl::Status PrepareSchema(SqlConnection& connection, const std::filesystem::path& file) {
  // WAL: readers go on beside the writer. FULL: a transaction that returned survives a power cut.
  // The log is cut back to 16 MiB when it begins anew: one large transaction must not take the
  // space for good.
  STATETAP_RETURN_IF_ERROR(
      connection.Execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;"
                         "PRAGMA journal_size_limit = 16777216;"));
  int64_t version = 0;
  STATETAP_RETURN_IF_ERROR(
      connection.Query("PRAGMA user_version", [&](const SqlRow& row) { version = row.Int(0); }));
  if (version > kSchemaVersion) {
    return absl::FailedPreconditionError(fmt::format(
        "{} has schema version {}, this server knows {}: start the newer server that wrote it",
        file.string(), version, kSchemaVersion));
  }
  if (version == kSchemaVersion) return absl::OkStatus();
  if (version > 0) {
    for (; version < kSchemaVersion; ++version) {
      STATETAP_RETURN_IF_ERROR(connection.Execute(fmt::format(
          "BEGIN; {} PRAGMA user_version = {}; COMMIT;", kMigrations[version - 1], version + 1)));
    }
    return absl::OkStatus();
  }
  return connection.Execute(fmt::format("BEGIN; {} COMMIT;", kSchemaSql));
}

}  // namespace

int64_t NowUnixMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string_view NameOf(JobState state) {
  switch (state) {
    case JobState::kCreating: return "creating";
    case JobState::kQueued: return "queued";
    case JobState::kRunning: return "running";
    case JobState::kWaiting: return "waiting";
    case JobState::kSucceeded: return "succeeded";
    case JobState::kFailed: return "failed";
    case JobState::kCancelled: return "cancelled";
    case JobState::kPaused: return "paused";
  }
  return "?";
}

absl::StatusOr<std::unique_ptr<JobStore>> JobStore::Open(const std::filesystem::path& file,
                                                         const Options& options) {
  STATETAP_ASSIGN_OR_RETURN(SqlConnection write,
                            SqlConnection::Open(file, SqlConnection::Access::kReadWrite));
  STATETAP_RETURN_IF_ERROR(PrepareSchema(write, file));
  STATETAP_ASSIGN_OR_RETURN(SqlConnection read,
                            SqlConnection::Open(file, SqlConnection::Access::kReadOnly));
  std::unique_ptr<JobStore> store(new JobStore(std::move(write), std::move(read), options));
  std::vector<int64_t> unfinished;
  STATETAP_RETURN_IF_ERROR(
      store->write_.Query("SELECT key FROM jobs WHERE state = 0",
                          [&](const SqlRow& row) { unfinished.push_back(row.Int(0)); }));
  for (const int64_t key : unfinished) STATETAP_RETURN_IF_ERROR(store->AbandonJob(key));
  return store;
}

JobStore::JobStore(SqlConnection write, SqlConnection read, const Options& options)
    : options_(options), write_(std::move(write)), read_(std::move(read)) {}

}  // namespace statetap
