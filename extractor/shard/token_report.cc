#include "extractor/shard/token_report.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace statetap {

double SourceReport::PolicyGap() const {
  if (scored == 0) return std::numeric_limits<double>::quiet_NaN();
  return (surprise - entropy) / static_cast<double>(scored);
}

double SourceReport::PolicyGapError() const {
  if (scored < 2) return std::numeric_limits<double>::quiet_NaN();
  const double gap = PolicyGap(), count = static_cast<double>(scored);
  return std::sqrt(std::max(0.0, squared_gap / count - gap * gap) / (count - 1));
}

bool EndsInLoop(std::span<const int32_t> ids) {
  constexpr size_t kLongest = 64, kLeastTokens = 48, kLeastTimes = 4;
  for (size_t period = 1; period <= kLongest && period < ids.size(); ++period) {
    const size_t wanted = std::max(kLeastTokens, kLeastTimes * period);
    if (wanted > ids.size()) return false;
    const auto tail = ids.last(wanted);
    if (std::equal(tail.begin() + static_cast<ptrdiff_t>(period), tail.end(), tail.begin())) {
      return true;
    }
  }
  return false;
}

namespace {

int LengthBin(int64_t tokens) {
  if (tokens < 1) return 0;
  return std::min(kLengthBins - 1,
                  static_cast<int>(std::floor(2 * std::log2(static_cast<double>(tokens)))));
}

void AddThought(const SampleRecord& sample, const ShardConfig& config, SourceReport& report) {
  if (config.think_token < 0 || config.think_end_token < 0) return;
  const auto& ids = sample.input_ids;
  const auto begin = static_cast<size_t>(sample.prompt_tokens);
  const bool opened = (begin > 0 && ids[begin - 1] == config.think_token) ||
                      (begin < ids.size() && ids[begin] == config.think_token);
  if (!opened) return;
  ++report.thinking;
  report.unclosed += std::find(ids.begin() + static_cast<ptrdiff_t>(begin), ids.end(),
                               config.think_end_token) == ids.end();
}

}  // namespace

void TokenReport::Add(const SampleRecord& sample, const ShardConfig& config) {
  SourceReport& report = sources_[sample.source];
  const auto tokens = static_cast<int64_t>(sample.input_ids.size());
  ++report.samples;
  report.tokens += tokens;
  report.prompt_tokens += sample.prompt_tokens;
  ++report.prompt_lengths[static_cast<size_t>(LengthBin(sample.prompt_tokens))];
  ++report.answer_lengths[static_cast<size_t>(LengthBin(tokens - sample.prompt_tokens))];
  report.supervised += std::ranges::count(sample.loss_mask, uint8_t{1});
  for (size_t t = 0; t < sample.logprobs.size() && t < sample.entropies.size(); ++t) {
    const double surprise = -sample.logprobs[t], entropy = sample.entropies[t];
    if (sample.loss_mask[t] != 1 || !std::isfinite(surprise) || !std::isfinite(entropy)) continue;
    ++report.scored;
    report.surprise += surprise;
    report.entropy += entropy;
    report.squared_gap += (surprise - entropy) * (surprise - entropy);
  }
  if (sample.finish_reason == "prefill") return;
  ++report.generated;
  const auto answer =
      std::span(sample.input_ids).subspan(static_cast<size_t>(sample.prompt_tokens));
  report.hit_limit += sample.finish_reason == "length";
  report.empty += answer.size() <= 1;
  AddThought(sample, config, report);
  // The stop token ends no loop.
  report.looping += EndsInLoop(
      sample.finish_reason == "stop" && !answer.empty() ? answer.first(answer.size() - 1) : answer);
}

void TokenReport::Merge(const TokenReport& other) {
  for (const auto& [source, more] : other.sources_) {
    SourceReport& to = sources_[source];
    to.samples += more.samples;
    to.tokens += more.tokens;
    to.supervised += more.supervised;
    to.generated += more.generated;
    to.scored += more.scored;
    to.surprise += more.surprise;
    to.entropy += more.entropy;
    to.squared_gap += more.squared_gap;
    to.hit_limit += more.hit_limit;
    to.empty += more.empty;
    to.looping += more.looping;
    to.thinking += more.thinking;
    to.unclosed += more.unclosed;
    to.prompt_tokens += more.prompt_tokens;
    for (size_t bin = 0; bin < kLengthBins; ++bin) {
      to.prompt_lengths[bin] += more.prompt_lengths[bin];
      to.answer_lengths[bin] += more.answer_lengths[bin];
    }
  }
}

}  // namespace statetap
