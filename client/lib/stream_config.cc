#include "client/lib/stream_config.h"

#include <array>
#include <utility>

#include "extractor/base/json.h"

namespace statetap {
namespace {

// Names in the header's attributes.
constexpr std::array<std::pair<const char*, std::string ShardConfig::*>, 10> kTexts = {{
    {"job", &ShardConfig::job},
    {"options", &ShardConfig::options_json},
    {"producer", &ShardConfig::producer},
    {"model_name", &ShardConfig::model_name},
    {"model_digest", &ShardConfig::model_digest},
    {"quantization", &ShardConfig::quantization},
    {"rope", &ShardConfig::rope_json},
    {"tokenizer_digest", &ShardConfig::tokenizer_digest},
    {"template_name", &ShardConfig::template_name},
    {"template_digest", &ShardConfig::template_digest},
}};

constexpr std::array<std::pair<const char*, int ShardConfig::*>, 3> kTokens = {{
    {"first_special_token", &ShardConfig::first_special},
    {"think_token", &ShardConfig::think_token},
    {"think_end_token", &ShardConfig::think_end_token},
}};

}  // namespace

absl::StatusOr<ShardConfig> ShardConfigOf(const v1::StreamHeader& header) {
  if (header.hidden() < 1 || header.layers() < 1 || header.boundaries().empty())
    return absl::DataLossError(
        fmt::format("the stream's header names {} boundaries of {} values, {} layers",
                    header.boundaries_size(), header.hidden(), header.layers()));
  ShardConfig config;
  if (!header.attributes_json().empty()) {
    const absl::StatusOr<Json> attributes = ParseJson(header.attributes_json());
    if (!attributes.ok() || !attributes->is_object())
      return absl::DataLossError("the stream's header has attributes that are no JSON object");
    for (const auto& [name, field] : kTexts) {
      const Json* value = FindMember(*attributes, name);
      if (value == nullptr) continue;
      config.*field = value->is_string() ? value->get<std::string>() : DumpJson(*value);
    }
    for (const auto& [name, field] : kTokens) {
      const Json* value = FindMember(*attributes, name);
      if (value != nullptr && value->is_number_integer()) config.*field = value->get<int>();
    }
    if (const Json* dtype = FindMember(*attributes, "dtype"))
      if (*dtype == NameOf(StatesDtype::kFp8)) config.dtype = StatesDtype::kFp8;
    if (const Json* mode = FindMember(*attributes, "template_mode"))
      config.thinking = *mode != "instant";
    if (const Json* eps = FindMember(*attributes, "inner_eps"); eps != nullptr && eps->is_number())
      config.inner_eps = eps->get<double>();
  }
  config.job = header.job();
  config.model_name = header.model_name();
  config.model_digest = header.model_digest();
  config.hidden = header.hidden();
  config.layers = header.layers();
  config.boundaries.assign(header.boundaries().begin(), header.boundaries().end());
  config.rms_norm_eps = header.rms_norm_eps();
  return config;
}

}  // namespace statetap
