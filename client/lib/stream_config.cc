#include "client/lib/stream_config.h"

#include "extractor/base/json.h"

namespace statetap {

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
    for (const auto& [name, field] : kShardTexts) {
      const Json* value = FindMember(*attributes, name);
      if (value == nullptr) continue;
      config.*field = value->is_string() ? value->get<std::string>() : DumpJson(*value);
    }
    for (const auto& [name, field] : kShardTokens) {
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
