// What the tokens of stored samples tell by source, without their states: whether the text is what
// this model would write, and answers that went wrong. Sums that merge in any order.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "extractor/shard/shard_writer.h"

namespace statetap {

// A sample with n tokens falls into bin i when n lies in [2^(i/2), 2^((i+1)/2)); none is in bin 0
// too, and what is above in the last.
inline constexpr int kLengthBins = 44;
using LengthHistogram = std::array<int64_t, kLengthBins>;

struct SourceReport {
  int64_t samples = 0, tokens = 0, supervised = 0;
  LengthHistogram prompt_lengths{}, answer_lengths{};  // samples, by tokens of each
  int64_t prompt_tokens = 0;
  int64_t generated = 0;   // samples whose answer the model wrote
  int64_t scored = 0;      // supervised tokens with a log-probability
  double surprise = 0;     // −log p of the scored tokens, summed, nats
  double entropy = 0;      // of the distributions they were drawn from, summed, nats
  double squared_gap = 0;  // (−log p − entropy)², summed
  int64_t hit_limit = 0;   // answers that ended because they may not be longer
  int64_t empty = 0;       // answers of the stop token alone, or of nothing
  int64_t looping = 0;     // answers that end in a loop
  // Answers whose thought was opened, by the prompt's last token or by their first, where the shard
  // says which tokens do that; and of them those in which </think> does not follow.
  int64_t thinking = 0, unclosed = 0;

  // Mean −log p less mean entropy. A token drawn at temperature 1 has an expected gap of 0 whatever
  // the text is about; lower temperatures and top-p give less than 0; text that another template,
  // thinking mode, model or quantisation made gives much more. NaN where nothing is scored.
  double PolicyGap() const;
  // Its standard error, tokens taken as independent.
  double PolicyGapError() const;
};

// The last tokens are one run of at most 64 tokens again and again: at least four times and at
// least 48 tokens in all.
bool EndsInLoop(std::span<const int32_t> ids);

class TokenReport {
 public:
  void Add(const SampleRecord& sample, const ShardConfig& config);
  void Merge(const TokenReport& other);
  const std::map<std::string, SourceReport>& sources() const { return sources_; }

 private:
  std::map<std::string, SourceReport> sources_;
};

}  // namespace statetap
