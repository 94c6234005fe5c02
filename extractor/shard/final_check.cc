#include "extractor/shard/final_check.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace statetap {
namespace {

constexpr size_t kShards = 32, kTokens = 16;
constexpr float kSure = -1e-3f;  // log p; above it fp32 has too few digits of 1 − p

struct ScoredToken {
  float logprob;
  int64_t row;  // of the state before it
  int32_t id;
};

std::vector<ScoredToken> MostSurprising(const ShardReader& shard,
                                        std::span<const SampleRecord> records) {
  std::vector<ScoredToken> tokens;
  for (size_t i = 0; i < records.size(); ++i) {
    const SampleRecord& record = records[i];
    const int64_t first_row = shard.samples()[i].first_row;
    for (size_t t = 1; t < record.logprobs.size(); ++t) {
      const float logprob = record.logprobs[t];
      if (std::isfinite(logprob) && logprob < kSure)
        tokens.push_back({logprob, first_row + static_cast<int64_t>(t) - 1, record.input_ids[t]});
    }
  }
  const size_t chosen = std::min(kTokens, tokens.size());
  std::ranges::partial_sort(tokens, tokens.begin() + static_cast<ptrdiff_t>(chosen), {},
                            &ScoredToken::logprob);
  tokens.resize(chosen);
  return tokens;
}

double LogOdds(double logprob) { return logprob - std::log(-std::expm1(logprob)); }

}  // namespace

absl::Status FinalCheck::Take(const ShardReader& shard, std::span<const SampleRecord> records) {
  const ShardConfig& config = shard.config();
  const bool has_final = config.boundaries.back() == config.layers;
  if (shards_.size() >= kShards || !has_final) return absl::OkStatus();
  Shard taken{.name = shard.path().filename(), .dtype = config.dtype};
  const auto final_index = static_cast<int>(config.boundaries.size()) - 1;
  std::vector<uint16_t> row(static_cast<size_t>(config.hidden));
  for (const ScoredToken& token : MostSurprising(shard, records)) {
    STATETAP_RETURN_IF_ERROR(shard.ReadStates(final_index, token.row, row));
    taken.states.insert(taken.states.end(), row.begin(), row.end());
    taken.tokens.push_back(token.id);
    taken.stored.push_back(token.logprob);
  }
  if (!taken.tokens.empty()) shards_.push_back(std::move(taken));
  return absl::OkStatus();
}

absl::Status FinalCheck::Score(const TokenScorer& scorer) {
  std::vector<uint16_t> states;
  std::vector<int32_t> tokens;
  for (const Shard& shard : shards_) {
    if (shard.error.has_value()) continue;
    states.insert(states.end(), shard.states.begin(), shard.states.end());
    tokens.insert(tokens.end(), shard.tokens.begin(), shard.tokens.end());
  }
  if (tokens.empty()) return absl::OkStatus();
  STATETAP_ASSIGN_OR_RETURN(const std::vector<double> scored, scorer(states, tokens));
  size_t at = 0;
  for (Shard& shard : shards_) {
    if (shard.error.has_value()) continue;
    double sum = 0;
    for (const double stored : shard.stored) {
      // A probability that rounds to 1 has no odds.
      const double logprob = std::min<double>(scored[at++], -1e-9);
      const double error = std::abs(LogOdds(stored) - LogOdds(logprob));
      // A state that is not finite is as far away as can be.
      sum += std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
    }
    shard.error = sum / static_cast<double>(shard.stored.size());
    shard.states.clear();
    shard.states.shrink_to_fit();
  }
  return absl::OkStatus();
}

}  // namespace statetap
