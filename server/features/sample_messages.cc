#include "server/features/sample_messages.h"

#include <algorithm>

#include "extractor/base/json.h"

namespace statetap {
namespace {

constexpr int kNoBoundary = -1;
constexpr int64_t kPieceBytes = int64_t{2} << 20;

absl::Status Gone() { return absl::CancelledError("the client has gone"); }

}  // namespace

absl::Status CheckBoundaries(std::span<const int> wanted) {
  if (wanted.size() == 1 && wanted[0] == kNoBoundary) return absl::OkStatus();
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] < 0 || (i > 0 && wanted[i] <= wanted[i - 1])) {
      return absl::InvalidArgumentError(
          fmt::format("boundaries: {} is not possible; give them ascending, each once, from 0, "
                      "none for all, or -1 alone for no states",
                      fmt::join(wanted, ", ")));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int>> SelectBoundaries(std::span<const int> wanted,
                                                  std::span<const int> stored) {
  STATETAP_RETURN_IF_ERROR(CheckBoundaries(wanted));
  if (wanted.empty()) return std::vector<int>(stored.begin(), stored.end());
  if (wanted[0] == kNoBoundary) return std::vector<int>();
  for (const int boundary : wanted) {
    if (std::find(stored.begin(), stored.end(), boundary) != stored.end()) continue;
    return absl::InvalidArgumentError(fmt::format("boundaries: {} is not stored; the job has {}",
                                                  boundary, fmt::join(stored, ", ")));
  }
  return std::vector<int>(wanted.begin(), wanted.end());
}

v1::StreamHeader HeaderOf(const JobRecord& job, const ShardConfig& config,
                          std::span<const int> boundaries) {
  v1::StreamHeader header;
  header.set_job(job.id);
  header.set_hidden(config.hidden);
  header.set_layers(config.layers);
  header.mutable_boundaries()->Assign(boundaries.begin(), boundaries.end());
  header.set_dtype("bf16");
  header.set_rms_norm_eps(config.rms_norm_eps);
  header.set_model_digest(config.model_digest);
  header.set_model_name(config.model_name);
  Json attributes = {{"hidden", config.hidden},
                     {"layers", config.layers},
                     {"boundaries", config.boundaries},
                     {"rms_norm_eps", config.rms_norm_eps},
                     {"inner_eps", config.inner_eps},
                     {"template_mode", config.thinking ? "thinking" : "instant"},
                     {"dtype", NameOf(config.dtype)}};
  for (const auto& [name, field] : kShardTexts) attributes[std::string(name)] = config.*field;
  for (const auto& [name, field] : kShardTokens) attributes[std::string(name)] = config.*field;
  header.set_attributes_json(DumpJson(attributes));
  return header;
}

absl::Status SendSample(const ShardReader& shard, const Delivery& delivery,
                        std::span<const int> boundaries, const FeatureOutlet& outlet) {
  if (delivery.position >= static_cast<int64_t>(shard.samples().size()))
    return absl::DataLossError(
        fmt::format("{} has no sample {}", shard.path().string(), delivery.position));
  const SampleEntry& entry = shard.samples()[static_cast<size_t>(delivery.position)];
  STATETAP_ASSIGN_OR_RETURN(const SampleRecord record, shard.ReadRecord(delivery.position));
  v1::StreamFeaturesResponse message;
  v1::SampleHeader& header = *message.mutable_sample();
  header.set_delivery(delivery.delivery);
  header.set_job_index(static_cast<int32_t>(delivery.job_index));
  header.set_id(record.id);
  header.set_source(record.source);
  header.set_meta_json(record.meta_json);
  header.set_split(record.split);
  header.mutable_input_ids()->Assign(record.input_ids.begin(), record.input_ids.end());
  header.set_loss_mask(record.loss_mask.data(), record.loss_mask.size());
  header.mutable_logprobs()->Assign(record.logprobs.begin(), record.logprobs.end());
  header.mutable_entropies()->Assign(record.entropies.begin(), record.entropies.end());
  header.set_prompt_tokens(record.prompt_tokens);
  header.set_finish_reason(record.finish_reason);
  header.set_truncated(record.truncated);
  header.set_source_index(record.source_index);
  header.set_checksum(entry.checksum);
  if (!outlet(message, {})) return Gone();

  const ShardConfig& config = shard.config();
  const int64_t piece_rows = std::max<int64_t>(1, kPieceBytes / (2 * int64_t{config.hidden}));
  for (const int boundary : boundaries) {
    const auto place = std::find(config.boundaries.begin(), config.boundaries.end(), boundary);
    if (place == config.boundaries.end())
      return absl::DataLossError(
          fmt::format("{} has no boundary {}", shard.path().string(), boundary));
    const int index = static_cast<int>(place - config.boundaries.begin());
    for (int64_t first = 0; first < entry.rows; first += piece_rows) {
      const int64_t count = std::min(piece_rows, entry.rows - first);
      STATETAP_ASSIGN_OR_RETURN(const StatesView states,
                                shard.ViewStates(index, entry.first_row + first, count));
      v1::StreamFeaturesResponse piece;
      v1::SampleData& data = *piece.mutable_data();
      data.set_delivery(delivery.delivery);
      data.set_boundary(boundary);
      data.set_first_row(first);
      if (!outlet(piece, states)) return Gone();
    }
  }
  return shard.CheckViews();
}

}  // namespace statetap
