-- The store's tables, version 6 (PRAGMA user_version; job_store.cc brings older files up to it). Times are Unix milliseconds.

CREATE TABLE jobs (
  key INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  name TEXT UNIQUE,                 -- NULL while it is being created
  state INTEGER NOT NULL,           -- JobState of job_store.h; 0: being created, visible to nobody
  message TEXT NOT NULL DEFAULT '',
  options BLOB NOT NULL,            -- statetap.v1.JobOptions with every default filled in
  digest TEXT NOT NULL DEFAULT '',  -- of options and samples as submitted
  created INTEGER NOT NULL,
  started INTEGER NOT NULL DEFAULT 0,
  ended INTEGER NOT NULL DEFAULT 0,
  -- What the content depends on besides the options.
  weight_digest TEXT NOT NULL,
  tokenizer_digest TEXT NOT NULL,
  template_digest TEXT NOT NULL,
  dtype TEXT NOT NULL,
  inner_eps REAL NOT NULL,
  stop_ids TEXT NOT NULL DEFAULT '',  -- [2049,2050]; empty: nothing is sampled, or an older job
  -- submitted = stored + rejected + cancelled + to_do; kept in the transaction that changes samples.
  submitted INTEGER NOT NULL DEFAULT 0,
  stored INTEGER NOT NULL DEFAULT 0,
  rejected INTEGER NOT NULL DEFAULT 0,
  cancelled INTEGER NOT NULL DEFAULT 0,
  to_do INTEGER NOT NULL DEFAULT 0,
  excluded INTEGER NOT NULL DEFAULT 0,
  evicted INTEGER NOT NULL DEFAULT 0,
  tokens INTEGER NOT NULL DEFAULT 0,     -- rows stored
  generated INTEGER NOT NULL DEFAULT 0,  -- of them sampled
  bytes INTEGER NOT NULL DEFAULT 0,      -- of committed shard files
  -- TextCounts of the samples that were not rejected as they came in.
  thoughts INTEGER NOT NULL DEFAULT 0,
  dropped_earlier INTEGER NOT NULL DEFAULT 0,
  dropped_tool_turns INTEGER NOT NULL DEFAULT 0,
  dropped_last INTEGER NOT NULL DEFAULT 0,
  tool_calls INTEGER NOT NULL DEFAULT 0,
  odd_tool_ids INTEGER NOT NULL DEFAULT 0,
  spelled_specials INTEGER NOT NULL DEFAULT 0,
  gate INTEGER NOT NULL DEFAULT 0  -- Gate of job_store.h
);

CREATE TABLE samples (
  job INTEGER NOT NULL,
  idx INTEGER NOT NULL,             -- place among the job's submitted samples, from 0
  id TEXT NOT NULL,
  digest TEXT NOT NULL,             -- of its content
  source TEXT NOT NULL,
  meta TEXT NOT NULL,               -- a JSON object, or empty
  split TEXT NOT NULL,
  source_line INTEGER NOT NULL,
  state INTEGER NOT NULL,           -- SampleState of job_store.h
  ids BLOB,                         -- int32, little endian: the prompt, or the whole text; NULL where rejected
  mask BLOB,                        -- prefill: one byte a token
  prompt_tokens INTEGER NOT NULL,
  truncated INTEGER NOT NULL,
  max_new INTEGER NOT NULL,         -- 0: the job's
  temperature REAL,                 -- NULL: the job's
  top_p REAL,                       -- NULL: the job's
  -- stored
  shard INTEGER,                    -- shards.seq
  position INTEGER,                 -- among the shard's samples
  row INTEGER,                      -- its first in the shard
  rows INTEGER,
  finish TEXT,
  mean_logprob REAL,
  supervised INTEGER,
  generated INTEGER,
  excluded INTEGER NOT NULL DEFAULT 0,  -- left out of streams and exports
  -- rejected
  reason TEXT,
  layer INTEGER,
  token INTEGER,
  message TEXT
);
CREATE UNIQUE INDEX samples_by_index ON samples (job, idx);
CREATE UNIQUE INDEX samples_by_id ON samples (job, id);
CREATE INDEX samples_to_do ON samples (job, idx) WHERE state = 0;
CREATE INDEX samples_stored ON samples (job, shard, row) WHERE state = 1;
CREATE INDEX samples_rejected ON samples (job, idx) WHERE state = 2;

CREATE TABLE shards (
  job INTEGER NOT NULL,
  seq INTEGER NOT NULL,             -- in the order they were committed, from 1, with gaps
  path TEXT NOT NULL,               -- relative to the data folder, or absolute
  samples INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  bytes INTEGER NOT NULL,
  digest TEXT NOT NULL,
  evicted INTEGER NOT NULL DEFAULT 0,  -- its file has no states any more
  PRIMARY KEY (job, seq)
) WITHOUT ROWID;

-- Samples that a consumer group is done with.
CREATE TABLE acks (
  job INTEGER NOT NULL,
  consumer TEXT NOT NULL,
  idx INTEGER NOT NULL,
  PRIMARY KEY (job, consumer, idx)
) WITHOUT ROWID;

-- Deleted jobs whose files are still to be removed.
CREATE TABLE doomed (id TEXT PRIMARY KEY) WITHOUT ROWID;

PRAGMA user_version = 6;
