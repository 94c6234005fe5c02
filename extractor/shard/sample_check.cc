#include "extractor/shard/sample_check.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "extractor/base/json.h"
#include "extractor/shard/format.h"
#include "extractor/shard/tables.h"

namespace statetap {
namespace {

// Length of the UTF-8 sequence at the front of `text`, 0 where there is none.
size_t Utf8Length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  const unsigned char next = byte(1);
  const bool overlong = (lead == 0xE0 && next < 0xA0) || (lead == 0xF0 && next < 0x90);
  const bool surrogate = lead == 0xED && next > 0x9F;
  const bool beyond = lead == 0xF4 && next > 0x8F;
  return overlong || surrogate || beyond ? 0 : length;
}

absl::Status CheckText(std::string_view field, std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const size_t length = text[i] == '\0' ? 0 : Utf8Length(text.substr(i));
    if (length == 0) {
      return absl::InvalidArgumentError(
          fmt::format("{}: byte {} is 0x{:02x}; shards hold UTF-8 text without NUL", field, i,
                      static_cast<unsigned char>(text[i])));
    }
    i += length;
  }
  return absl::OkStatus();
}

absl::Status CheckMeta(std::string_view meta_json) {
  if (meta_json.empty()) return absl::OkStatus();
  STATETAP_ASSIGN_OR_RETURN(const Json meta, ParseJson(meta_json));
  if (meta.is_object()) return absl::OkStatus();
  return absl::InvalidArgumentError("meta is not a JSON object");
}

}  // namespace

absl::Status CheckConfig(const ShardConfig& config) {
  const auto wrong = [](std::string_view what) {
    return absl::InvalidArgumentError(fmt::format("shard: {}", what));
  };
  if (config.hidden < 1 || config.hidden > kMaxHidden)
    return wrong(fmt::format("hidden is {}, not 1 to {}", config.hidden, kMaxHidden));
  if (config.layers < 1 || config.layers >= kMaxBoundaries)
    return wrong(fmt::format("layers is {}, not 1 to {}", config.layers, kMaxBoundaries - 1));
  if (config.boundaries.empty()) return wrong("no boundaries; name at least one");
  for (size_t i = 0; i < config.boundaries.size(); ++i) {
    const int boundary = config.boundaries[i];
    if (boundary < 0 || boundary > config.layers)
      return wrong(fmt::format("boundary {} is not in 0 to {}", boundary, config.layers));
    if (i > 0 && boundary <= config.boundaries[i - 1])
      return wrong(fmt::format("boundary {} is not above the one before; list them ascending once",
                               boundary));
  }
  for (const auto& [name, field] : kShardTexts)
    STATETAP_RETURN_IF_ERROR(CheckText(name, config.*field));
  return absl::OkStatus();
}

absl::Status CheckSample(const SampleRecord& sample, const ShardConfig& config,
                         std::span<const std::span<const uint16_t>> states) {
  const size_t tokens = sample.input_ids.size();
  if (tokens == 0) return absl::InvalidArgumentError("no tokens");
  const auto check_size = [](std::string_view name, size_t size, size_t expected) {
    if (size == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("{} has {} values where {} are expected", name, size, expected));
  };
  STATETAP_RETURN_IF_ERROR(check_size("loss_mask", sample.loss_mask.size(), tokens));
  if (!sample.logprobs.empty())
    STATETAP_RETURN_IF_ERROR(check_size("logprobs", sample.logprobs.size(), tokens));
  if (!sample.entropies.empty())
    STATETAP_RETURN_IF_ERROR(check_size("entropies", sample.entropies.size(), tokens));
  STATETAP_RETURN_IF_ERROR(check_size("states", states.size(), NumStatesDatasets(config)));
  for (size_t i = 0; i < states.size(); ++i) {
    STATETAP_RETURN_IF_ERROR(check_size(fmt::format("boundary {}", config.boundaries[i]),
                                        states[i].size(),
                                        tokens * static_cast<size_t>(config.hidden)));
  }
  if (std::ranges::any_of(sample.loss_mask, [](uint8_t mask) { return mask > 1; }))
    return absl::InvalidArgumentError("loss_mask holds values other than 0 and 1");
  if (sample.prompt_tokens < 0 || static_cast<size_t>(sample.prompt_tokens) > tokens) {
    return absl::InvalidArgumentError(
        fmt::format("prompt_tokens is {} of {} tokens", sample.prompt_tokens, tokens));
  }
  if (sample.split != "train" && sample.split != "eval") {
    return absl::InvalidArgumentError(
        fmt::format("split is \"{}\", not train or eval", sample.split));
  }
  STATETAP_RETURN_IF_ERROR(CheckText("id", sample.id));
  STATETAP_RETURN_IF_ERROR(CheckText("source", sample.source));
  STATETAP_RETURN_IF_ERROR(CheckText("meta", sample.meta_json));
  STATETAP_RETURN_IF_ERROR(CheckText("digest", sample.digest));
  STATETAP_RETURN_IF_ERROR(CheckText("finish_reason", sample.finish_reason));
  return CheckMeta(sample.meta_json);
}

}  // namespace statetap
