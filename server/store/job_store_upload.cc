// The store's transactions of an upload: a job that is being created, its samples, its publication.
#include <random>

#include "extractor/base/digest.h"
#include "server/store/job_store.h"

namespace statetap {
namespace {

template <typename T>
std::span<const std::byte> BytesOf(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

std::string RandomId() {
  std::random_device device;
  return fmt::format("job-{:08x}", static_cast<uint32_t>(device()));
}

// Samples of one state by (idx, id, digest), from both jobs at once, in order.
constexpr std::string_view kDifferingSample =
    "SELECT a.idx, a.id, b.id FROM samples a LEFT JOIN samples b ON b.job = ?2 AND b.idx = a.idx "
    "WHERE a.job = ?1 AND (b.id IS NULL OR b.id <> a.id OR b.digest <> a.digest) "
    "ORDER BY a.idx LIMIT 1";

}  // namespace

absl::Status DifferentContent(std::string_view id, int64_t first_line, int64_t line) {
  return absl::InvalidArgumentError(fmt::format(
      "samples.id: lines {} and {} both have the id \"{}\" but different content; give each sample "
      "its own id, or leave ids out",
      first_line, line, id));
}

absl::StatusOr<int64_t> JobStore::CreateJob(const ContentConfig& content, Gate gate) {
  const std::lock_guard lock(write_mutex_);
  STATETAP_RETURN_IF_ERROR(
      write_.Run("INSERT INTO jobs (id, state, options, created, weight_digest, tokenizer_digest, "
                 "template_digest, dtype, inner_eps, stop_ids, gate) VALUES (?, 0, '', ?, ?, ?, ?, "
                 "?, ?, ?, ?)",
                 RandomId(), NowUnixMs(), content.weight_digest, content.tokenizer_digest,
                 content.template_digest, content.dtype, content.inner_eps, content.stop_ids,
                 static_cast<int>(gate)));
  return write_.last_row();
}

absl::StatusOr<JobStore::Added> JobStore::AddSamples(int64_t key,
                                                     std::span<const SampleRow> samples) {
  Added added;
  TextCounts text;
  const auto add = [&]() -> absl::Status {
    int64_t index = 0;
    STATETAP_RETURN_IF_ERROR(write_.Query(
        "SELECT submitted FROM jobs WHERE key = ?", [&](const SqlRow& row) { index = row.Int(0); },
        key));
    for (const SampleRow& sample : samples) {
      const Rejection none, *bad = sample.rejection ? &*sample.rejection : &none;
      const auto text_if_bad = [&](const std::string& text) {
        return sample.rejection ? std::optional(text) : std::nullopt;
      };
      STATETAP_RETURN_IF_ERROR(write_.Run(
          "INSERT INTO samples (job, idx, id, digest, source, meta, split, source_line, state, "
          "ids, "
          "mask, prompt_tokens, truncated, max_new, temperature, top_p, reason, layer, token, "
          "message) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
          "ON CONFLICT (job, id) DO NOTHING",
          key, index, sample.id, sample.digest, sample.source, sample.meta_json, sample.split,
          sample.source_line, sample.rejection ? 2 : 0,
          sample.rejection ? std::nullopt : std::optional(BytesOf(sample.ids)),
          sample.mask.empty() ? std::nullopt : std::optional(BytesOf(sample.mask)),
          sample.prompt_tokens, sample.truncated ? 1 : 0, sample.max_new_tokens, sample.temperature,
          sample.top_p, text_if_bad(bad->reason), bad->layer, bad->token,
          text_if_bad(bad->message)));
      if (write_.changes() == 1) {
        ++index;
        ++added.added;
        if (sample.rejection) continue;
        ++added.to_do;
        added.tokens += static_cast<int64_t>(sample.ids.size());
        text += sample.text;
        continue;
      }
      std::string digest;
      int64_t line = 0;
      STATETAP_RETURN_IF_ERROR(write_.Query(
          "SELECT digest, source_line FROM samples WHERE job = ? AND id = ?",
          [&](const SqlRow& row) {
            digest = row.Text(0);
            line = row.Int(1);
          },
          key, sample.id));
      if (digest != sample.digest) {
        return DifferentContent(sample.id, line, sample.source_line);
      }
      ++added.duplicates;
    }
    return write_.Run(
        "UPDATE jobs SET submitted = submitted + ?1, rejected = rejected + ?1 - ?2, "
        "to_do = to_do + ?2, thoughts = thoughts + ?4, "
        "dropped_earlier = dropped_earlier + ?5, dropped_tool_turns = dropped_tool_turns + ?6, "
        "dropped_last = dropped_last + ?7, tool_calls = tool_calls + ?8, "
        "odd_tool_ids = odd_tool_ids + ?9, spelled_specials = spelled_specials + ?10 "
        "WHERE key = ?3",
        added.added, added.to_do, key, text.thoughts, text.dropped_earlier, text.dropped_tool_turns,
        text.dropped_last, text.tool_calls, text.odd_tool_ids, text.spelled_specials);
  };
  STATETAP_RETURN_IF_ERROR(Transact(key, add));
  return added;
}

absl::StatusOr<std::string> JobStore::ContentDigest(int64_t key, std::string_view options) {
  Xxh3 digest;
  digest.Update(std::as_bytes(std::span(options)));
  STATETAP_RETURN_IF_ERROR(write_.Query(
      "SELECT id, digest FROM samples WHERE job = ? ORDER BY idx",
      [&](const SqlRow& row) {
        digest.Update(row.Blob(0));
        digest.Update(row.Blob(1));
      },
      key));
  return HexOf(digest.Digest());
}

absl::StatusOr<std::string> JobStore::FirstDifference(int64_t key, int64_t other) {
  std::string difference;
  int64_t mine = 0, theirs = 0;
  const auto describe = [&](const SqlRow& row) {
    difference =
        fmt::format("sample {} (\"{}\") is not what that job has there", row.Int(0), row.Text(1));
  };
  STATETAP_RETURN_IF_ERROR(write_.Query(kDifferingSample, describe, key, other));
  STATETAP_RETURN_IF_ERROR(write_.Query(
      "SELECT (SELECT submitted FROM jobs WHERE key = ?1), "
      "(SELECT submitted FROM jobs WHERE key = ?2)",
      [&](const SqlRow& row) {
        mine = row.Int(0);
        theirs = row.Int(1);
      },
      key, other));
  if (mine != theirs) {
    difference = fmt::format("{} samples here, {} there{}{}", mine, theirs,
                             difference.empty() ? "" : "; ", difference);
  }
  return difference;
}

absl::StatusOr<JobStore::Published> JobStore::PublishJob(
    int64_t key, std::string_view name, std::string_view options,
    const std::function<std::string(std::string_view)>& difference) {
  std::optional<int64_t> existing;
  std::string existing_id, existing_digest, existing_options;
  const auto publish = [&]() -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const std::string digest, ContentDigest(key, options));
    const std::string full_name = name.empty() ? digest : std::string(name);
    STATETAP_RETURN_IF_ERROR(write_.Query(
        "SELECT key, id, digest, options FROM jobs WHERE name = ?",
        [&](const SqlRow& row) {
          existing = row.Int(0);
          existing_id = row.Text(1);
          existing_digest = row.Text(2);
          existing_options = row.Text(3);
        },
        full_name));
    if (!existing) {
      return write_.Run(
          "UPDATE jobs SET name = ?, options = ?, digest = ?, state = 1, created = ? WHERE key = ?",
          full_name, std::as_bytes(std::span(options)), digest, NowUnixMs(), key);
    }
    if (existing_digest == digest) return absl::OkStatus();
    std::string what = difference(existing_options);
    STATETAP_ASSIGN_OR_RETURN(const std::string samples, FirstDifference(key, *existing));
    if (!samples.empty()) what += (what.empty() ? "" : "; ") + samples;
    return absl::AlreadyExistsError(fmt::format(
        "name: job {} is already called \"{}\" and differs: {}; choose another name, or submit the "
        "same content and options to get that job",
        existing_id, full_name, what));
  };
  const absl::Status status = Transact(key, publish);
  if (!status.ok() || existing) AbandonJob(key).IgnoreError();  // else the next start does
  STATETAP_RETURN_IF_ERROR(status);
  STATETAP_ASSIGN_OR_RETURN(JobRecord job, GetJob(existing.value_or(key)));
  return Published{std::move(job), existing.has_value()};
}

}  // namespace statetap
