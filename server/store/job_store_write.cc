// The store's transactions on published jobs.
#include "server/store/job_store.h"

namespace statetap {

absl::Status JobStore::Transact(int64_t key, const std::function<absl::Status()>& body) {
  const std::lock_guard lock(write_mutex_);
  SqlTransaction transaction(write_);
  STATETAP_RETURN_IF_ERROR(transaction.begun());
  STATETAP_RETURN_IF_ERROR(body());
  STATETAP_RETURN_IF_ERROR(Settle(key));
  if (options_.verify_counts) STATETAP_RETURN_IF_ERROR(VerifyCounts(key));
  return transaction.Commit();
}

absl::Status JobStore::VerifyCounts(int64_t key) {
  int64_t wrong = 0;
  STATETAP_RETURN_IF_ERROR(write_.Query(
      "SELECT COUNT(*) FROM jobs j WHERE key = ?1 AND (submitted <> stored + rejected + cancelled "
      "+ to_do OR submitted <> (SELECT COUNT(*) FROM samples WHERE job = ?1) "
      "OR to_do <> (SELECT COUNT(*) FROM samples WHERE job = ?1 AND state = 0) "
      "OR stored <> (SELECT COUNT(*) FROM samples WHERE job = ?1 AND state = 1) "
      "OR rejected <> (SELECT COUNT(*) FROM samples WHERE job = ?1 AND state = 2) "
      "OR excluded <> (SELECT COUNT(*) FROM samples WHERE job = ?1 AND state = 1 AND excluded = 1) "
      "OR evicted <> (SELECT COALESCE(SUM(samples), 0) FROM shards WHERE job = ?1 AND evicted = 1) "
      "OR bytes <> (SELECT COALESCE(SUM(bytes), 0) FROM shards WHERE job = ?1) "
      "OR tokens <> (SELECT COALESCE(SUM(rows), 0) FROM shards WHERE job = ?1) "
      "OR (state IN (4, 5, 6)) <> (state <> 0 AND to_do = 0 AND (gate = 0 OR stored = 0)))",
      [&](const SqlRow& row) { wrong = row.Int(0); }, key));
  if (wrong == 0) return absl::OkStatus();
  return absl::InternalError(fmt::format("job {}: the counts of its samples do not add up", key));
}

// Ends a job that has nothing to do, and no gate ahead of what it has stored.
absl::Status JobStore::Settle(int64_t key) {
  std::optional<JobCounts> counts;
  STATETAP_RETURN_IF_ERROR(write_.Query(
      "SELECT stored, rejected, cancelled FROM jobs WHERE key = ? AND to_do = 0 "
      "AND (gate = 0 OR stored = 0) AND state IN (1, 2, 3, 7)",
      [&](const SqlRow& row) {
        counts = JobCounts{.stored = row.Int(0), .rejected = row.Int(1), .cancelled = row.Int(2)};
      },
      key));
  if (!counts) return absl::OkStatus();
  JobState state = JobState::kSucceeded;
  std::string message;
  if (counts->cancelled > 0) {
    state = JobState::kCancelled;
  } else if (counts->stored == 0) {
    state = JobState::kFailed;
    STATETAP_RETURN_IF_ERROR(write_.Query(
        "SELECT reason, COUNT(*), MIN(message) FROM samples WHERE job = ? AND state = 2 "
        "GROUP BY reason ORDER BY 2 DESC",
        [&](const SqlRow& row) {
          message += fmt::format("{}{} {} ({})", message.empty() ? "no sample was stored: " : ", ",
                                 row.Int(1), row.Text(0), row.Text(2));
        },
        key));
  }
  return write_.Run("UPDATE jobs SET state = ?, message = ?, ended = ? WHERE key = ?",
                    static_cast<int>(state), message, NowUnixMs(), key);
}

absl::Status JobStore::DeleteRows(int64_t key) {
  for (const std::string_view sql :
       {"DELETE FROM samples WHERE job = ?", "DELETE FROM shards WHERE job = ?",
        "DELETE FROM acks WHERE job = ?", "DELETE FROM jobs WHERE key = ?"}) {
    STATETAP_RETURN_IF_ERROR(write_.Run(sql, key));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> JobStore::DeleteSomeSamples(int64_t key) {
  const std::lock_guard lock(write_mutex_);
  STATETAP_RETURN_IF_ERROR(write_.Run(
      "DELETE FROM samples WHERE job = ?1 AND idx IN (SELECT idx FROM samples WHERE job = ?1 "
      "ORDER BY idx LIMIT 1000)",
      key));
  return write_.changes();
}

// In small transactions, since nobody sees the job: a large one would fill the log with every page
// of an upload that was perhaps refused because the disk is full.
absl::Status JobStore::AbandonJob(int64_t key) {
  int64_t deleted = 1;
  while (deleted > 0) {
    STATETAP_ASSIGN_OR_RETURN(deleted, DeleteSomeSamples(key));
  }
  STATETAP_RETURN_IF_ERROR(Transact(key, [&] { return DeleteRows(key); }));
  const std::lock_guard lock(write_mutex_);
  write_.Execute("PRAGMA wal_checkpoint(TRUNCATE)").IgnoreError();  // the next one does
  return absl::OkStatus();
}

absl::Status JobStore::MarkRunning(int64_t key) {
  return Transact(key, [&] {
    return write_.Run(
        "UPDATE jobs SET state = 2, message = '', started = CASE started WHEN 0 THEN ? "
        "ELSE started END WHERE key = ? AND state = 1",
        NowUnixMs(), key);
  });
}

absl::Status JobStore::MarkWaiting(int64_t key, std::string_view message) {
  return Transact(key, [&] {
    return write_.Run("UPDATE jobs SET state = 3, message = ? WHERE key = ? AND state IN (1, 2, 3)",
                      message, key);
  });
}

absl::Status JobStore::MarkQueued(int64_t key) {
  return Transact(key, [&] {
    return write_.Run("UPDATE jobs SET state = 1, message = '' WHERE key = ? AND state IN (2, 3)",
                      key);
  });
}

absl::Status JobStore::Reject(int64_t key, std::span<const RejectedSample> samples) {
  return Transact(key, [&]() -> absl::Status {
    int64_t count = 0;
    for (const auto& [index, rejection] : samples) {
      STATETAP_RETURN_IF_ERROR(write_.Run(
          "UPDATE samples SET state = 2, reason = ?, layer = ?, token = ?, message = ? "
          "WHERE job = ? AND idx = ? AND state = 0",
          rejection.reason, rejection.layer, rejection.token, rejection.message, key, index));
      count += write_.changes();
    }
    return write_.Run("UPDATE jobs SET to_do = to_do - ?1, rejected = rejected + ?1 WHERE key = ?2",
                      count, key);
  });
}

absl::Status JobStore::RejectRest(int64_t key, const Rejection& rejection) {
  return Transact(key, [&]() -> absl::Status {
    STATETAP_RETURN_IF_ERROR(
        write_.Run("UPDATE samples SET state = 2, reason = ?, layer = ?, token = ?, message = ? "
                   "WHERE job = ? AND state = 0",
                   rejection.reason, rejection.layer, rejection.token, rejection.message, key));
    return write_.Run("UPDATE jobs SET rejected = rejected + to_do, to_do = 0 WHERE key = ?", key);
  });
}

absl::Status JobStore::CancelRest(int64_t key) {
  return Transact(key, [&]() -> absl::Status {
    STATETAP_RETURN_IF_ERROR(
        write_.Run("UPDATE samples SET state = 3 WHERE job = ? AND state = 0", key));
    STATETAP_RETURN_IF_ERROR(
        write_.Run("UPDATE jobs SET state = 6, message = '', ended = ? WHERE key = ? AND gate <> 0 "
                   "AND to_do = 0 AND state IN (1, 2, 3, 7)",
                   NowUnixMs(), key));
    return write_.Run(
        "UPDATE jobs SET cancelled = cancelled + to_do, to_do = 0, gate = 0 WHERE key = ?", key);
  });
}

absl::Status JobStore::MarkPaused(int64_t key, std::string_view message) {
  return Transact(key, [&] {
    return write_.Run("UPDATE jobs SET state = 7, message = ? WHERE key = ? AND state IN (1, 2, 3)",
                      message, key);
  });
}

absl::Status JobStore::PassGate(int64_t key) {
  return Transact(key, [&] { return write_.Run("UPDATE jobs SET gate = 0 WHERE key = ?", key); });
}

absl::Status JobStore::PauseAtGate(int64_t key, std::string_view message) {
  return Transact(key, [&] {
    return write_.Run(
        "UPDATE jobs SET gate = 2, state = 7, message = ? WHERE key = ? "
        "AND state IN (1, 2, 3)",
        message, key);
  });
}

absl::Status JobStore::Resume(int64_t key) {
  return Transact(key, [&]() -> absl::Status {
    STATETAP_RETURN_IF_ERROR(
        write_.Run("UPDATE jobs SET state = 1, message = '', gate = CASE gate WHEN 2 THEN 0 "
                   "ELSE gate END WHERE key = ? AND state = 7",
                   key));
    if (write_.changes() == 1) return absl::OkStatus();
    return absl::FailedPreconditionError("the job is not paused: there is nothing to resume");
  });
}

absl::StatusOr<JobStore::Retried> JobStore::Retry(int64_t key) {
  Retried result;
  const auto retry = [&]() -> absl::Status {
    STATETAP_RETURN_IF_ERROR(write_.Run(
        "UPDATE samples SET state = 0, reason = NULL, layer = NULL, token = NULL, message = NULL "
        "WHERE job = ? AND state = 2 AND ids IS NOT NULL",
        key));
    result.retried = write_.changes();
    STATETAP_RETURN_IF_ERROR(write_.Query(
        "SELECT rejected FROM jobs WHERE key = ?",
        [&](const SqlRow& row) { result.kept = row.Int(0) - result.retried; }, key));
    if (result.retried == 0) {
      return absl::FailedPreconditionError(
          result.kept == 0
              ? "the job has no rejected samples: there is nothing to try again"
              : fmt::format("all {} rejected samples were refused as they came in and nothing of "
                            "them was kept: mend them (`statetap rejected` has the reasons) and "
                            "submit them as a new job",
                            result.kept));
    }
    return write_.Run(
        "UPDATE jobs SET rejected = rejected - ?1, to_do = to_do + ?1, ended = 0, "
        "message = CASE WHEN state IN (4, 5, 6) THEN '' ELSE message END, "
        "state = CASE WHEN state IN (4, 5, 6) THEN 1 ELSE state END WHERE key = ?2",
        result.retried, key);
  };
  STATETAP_RETURN_IF_ERROR(Transact(key, retry));
  return result;
}

absl::Status JobStore::DeleteJob(int64_t key) {
  return Transact(key, [&]() -> absl::Status {
    STATETAP_RETURN_IF_ERROR(
        write_.Run("INSERT OR IGNORE INTO doomed (id) SELECT id FROM jobs WHERE key = ?", key));
    return DeleteRows(key);
  });
}

absl::Status JobStore::Forget(std::string_view id) {
  const std::lock_guard lock(write_mutex_);
  return write_.Run("DELETE FROM doomed WHERE id = ?", id);
}

absl::StatusOr<int64_t> JobStore::MarkExcluded(int64_t key, std::span<const int64_t> indices,
                                               Exclusion exclusion) {
  const int mark = exclusion == Exclusion::kExclude ? 1 : 0;
  int64_t changed = 0;
  const auto change = [&]() -> absl::Status {
    for (const int64_t index : indices) {
      STATETAP_RETURN_IF_ERROR(
          write_.Run("UPDATE samples SET excluded = ?1 WHERE job = ?2 AND idx = ?3 AND state = 1 "
                     "AND excluded <> ?1",
                     mark, key, index));
      changed += write_.changes();
    }
    return write_.Run("UPDATE jobs SET excluded = excluded + ? WHERE key = ?",
                      mark == 1 ? changed : -changed, key);
  };
  STATETAP_RETURN_IF_ERROR(Transact(key, change));
  return changed;
}

absl::StatusOr<int64_t> JobStore::NextShard(int64_t key) {
  int64_t next = 1;
  const std::lock_guard lock(write_mutex_);
  STATETAP_RETURN_IF_ERROR(write_.Query(
      "SELECT COALESCE(MAX(seq), 0) + 1 FROM shards WHERE job = ?",
      [&](const SqlRow& row) { next = row.Int(0); }, key));
  return next;
}

absl::Status JobStore::CommitShard(int64_t key, const ShardRow& shard,
                                   std::span<const StoredSample> samples) {
  return Transact(key, [&]() -> absl::Status {
    STATETAP_RETURN_IF_ERROR(write_.Run(
        "INSERT INTO shards (job, seq, path, samples, rows, bytes, digest) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        key, shard.seq, shard.path, shard.samples, shard.rows, shard.bytes, shard.digest));
    int64_t generated = 0;
    for (const StoredSample& sample : samples) {
      STATETAP_RETURN_IF_ERROR(write_.Run(
          "UPDATE samples SET state = 1, shard = ?, position = ?, row = ?, rows = ?, finish = ?, "
          "truncated = ?, mean_logprob = ?, supervised = ?, generated = ? "
          "WHERE job = ? AND idx = ? AND state = 0",
          shard.seq, sample.position, sample.row, sample.rows, sample.finish,
          sample.truncated ? 1 : 0, sample.mean_logprob, sample.supervised, sample.generated, key,
          sample.index));
      if (write_.changes() != 1) {
        return absl::FailedPreconditionError(fmt::format(
            "{}: sample {} of the job is not to do any more", shard.path, sample.index));
      }
      generated += sample.generated;
    }
    const auto count = static_cast<int64_t>(samples.size());
    return write_.Run(
        "UPDATE jobs SET stored = stored + ?1, to_do = to_do - ?1, tokens = tokens + ?2, "
        "generated = generated + ?3, bytes = bytes + ?4 WHERE key = ?5",
        count, shard.rows, generated, shard.bytes, key);
  });
}

absl::Status JobStore::MarkEvicted(int64_t key, const ShardRow& shard) {
  return Transact(key, [&]() -> absl::Status {
    STATETAP_RETURN_IF_ERROR(
        write_.Run("UPDATE jobs SET evicted = evicted + ?1, bytes = bytes + ?2 - "
                   "(SELECT bytes FROM shards WHERE job = ?3 AND seq = ?4) WHERE key = ?3",
                   shard.samples, shard.bytes, key, shard.seq));
    STATETAP_RETURN_IF_ERROR(
        write_.Run("UPDATE shards SET path = ?, bytes = ?, digest = ?, evicted = 1 "
                   "WHERE job = ? AND seq = ? AND evicted = 0",
                   shard.path, shard.bytes, shard.digest, key, shard.seq));
    if (write_.changes() == 1) return absl::OkStatus();
    return absl::FailedPreconditionError(
        fmt::format("shard {} is evicted already, or gone", shard.seq));
  });
}

absl::Status JobStore::Acknowledge(int64_t key, std::string_view group,
                                   std::span<const int64_t> indices) {
  return Transact(key, [&]() -> absl::Status {
    for (const int64_t index : indices) {
      STATETAP_RETURN_IF_ERROR(write_.Run(
          "INSERT OR IGNORE INTO acks (job, consumer, idx) VALUES (?, ?, ?)", key, group, index));
    }
    return absl::OkStatus();
  });
}

}  // namespace statetap
