#include "extractor/checkpoint/config_parts.h"

#include <optional>

#include "extractor/base/json.h"

namespace statetap {
namespace {

constexpr double kMostTheta = 1e12;

// One field of a RoPE object; null where missing.
double RopeField(ConfigReader& reader, const Json& object, const std::string& path,
                 std::string_view key, double least, double most, std::optional<double> fallback) {
  const std::string field = fmt::format("{}.{}", path, key);
  if (const Json* value = FindMember(object, key)) {
    return reader.DoubleOf(*value, field, least, most);
  }
  if (!fallback) reader.Missing(field);
  return fallback.value_or(least);
}

std::string RopeType(ConfigReader& reader, const Json& object, const std::string& path) {
  std::string found;
  for (const std::string_view key : {"rope_type", "type"}) {
    const Json* value = FindMember(object, key);
    if (value == nullptr) continue;
    if (!value->is_string()) {
      reader.Fail(fmt::format("{}.{} is {}, a string is needed", path, key, ShownValue(*value)));
    } else if (!found.empty() && found != value->get<std::string>()) {
      reader.Fail(fmt::format("{}.rope_type is {}, {}.type is {}; make the two agree", path, found,
                              path, ShownValue(*value)));
    } else {
      found = value->get<std::string>();
    }
  }
  return found;
}

void RefuseOther(ConfigReader& reader, const Json& object, const std::string& path,
                 std::string_view key, const Json& supported) {
  const Json* value = FindMember(object, key);
  if (value != nullptr && *value != supported) {
    reader.Fail(fmt::format("{}.{} is {}; only {} is supported", path, key, ShownValue(*value),
                            ShownValue(supported)));
  }
}

// `theta`: of the field beside the object, where there is one.
RopeConfig ReadRopeObject(ConfigReader& reader, std::string_view key, const Json& object,
                          std::optional<double> theta) {
  RopeConfig rope;
  const std::string path = reader.Path(key);
  if (!object.is_object()) {
    reader.Fail(fmt::format("{} is {}, an object is needed", path, ShownValue(object)));
    return rope;
  }
  rope.theta = RopeField(reader, object, path, "rope_theta", 1, kMostTheta, theta);
  RefuseOther(reader, object, path, "attention_factor", nullptr);
  RefuseOther(reader, object, path, "partial_rotary_factor", 1);
  RefuseOther(reader, object, path, "truncate", true);
  const std::string type = RopeType(reader, object, path);
  if (type == "default") return rope;
  if (type != "yarn") {
    reader.Fail(fmt::format("{}.type is \"{}\"; \"yarn\" and \"default\" are supported", path,
                            type.substr(0, 80)));
    return rope;
  }
  rope.yarn = true;
  rope.factor = RopeField(reader, object, path, "factor", 1, 1e6, std::nullopt);
  const double original =
      RopeField(reader, object, path, "original_max_position_embeddings", 1, 1 << 27, std::nullopt);
  rope.original_positions = static_cast<int>(original);
  if (rope.original_positions != original) {
    reader.Fail(fmt::format("{}.original_max_position_embeddings is {}, an integer is needed", path,
                            original));
  }
  rope.beta_fast = RopeField(reader, object, path, "beta_fast", 1e-6, 1e6, rope.beta_fast);
  rope.beta_slow = RopeField(reader, object, path, "beta_slow", 1e-6, 1e6, rope.beta_slow);
  rope.mscale = RopeField(reader, object, path, "mscale", 0, 1e6, rope.mscale);
  rope.mscale_all_dim =
      RopeField(reader, object, path, "mscale_all_dim", 0, 1e6, rope.mscale_all_dim);
  return rope;
}

constexpr std::string_view kSupported =
    "supported are checkpoints in bf16 and with compressed-tensors pack-quantized INT4 (symmetric, "
    "groups of 32)";

// What is wrong with the block, or nothing.
std::optional<std::string> QuantizationFault(const Json& block) {
  const auto differs = [](const Json& object, std::string_view key, const Json& wanted) {
    const Json* value = FindMember(object, key);
    return value == nullptr ? !wanted.is_null() : *value != wanted;
  };
  const auto fault = [](const Json& object, std::string_view key) {
    const Json* value = FindMember(object, key);
    return fmt::format("{} {}", key, value == nullptr ? "missing" : ShownValue(*value));
  };
  if (!block.is_object()) return "no object";
  if (differs(block, "quant_method", "compressed-tensors")) return fault(block, "quant_method");
  if (differs(block, "format", "pack-quantized")) return fault(block, "format");
  if (differs(block, "kv_cache_scheme", nullptr)) return fault(block, "kv_cache_scheme");
  const Json* groups = FindMember(block, "config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty()) return "config_groups missing";
  for (const auto& [name, group] : groups->items()) {
    const Json* weights = FindMember(group, "weights");
    if (weights == nullptr || !weights->is_object()) return name + ".weights missing";
    const std::pair<std::string_view, Json> wanted[] = {{"num_bits", 4},     {"type", "int"},
                                                        {"symmetric", true}, {"strategy", "group"},
                                                        {"group_size", 32},  {"actorder", nullptr}};
    for (const auto& [key, value] : wanted) {
      if (differs(*weights, key, value)) return fault(*weights, key);
    }
    for (const std::string_view key : {"input_activations", "output_activations"}) {
      if (differs(group, key, nullptr)) return fault(group, key);
    }
  }
  return std::nullopt;
}

}  // namespace

RopeConfig ReadRope(ConfigReader& reader) {
  std::optional<double> theta;
  if (const Json* value = reader.Find("rope_theta")) {
    theta = reader.DoubleOf(*value, reader.Path("rope_theta"), 1, kMostTheta);
  }
  const Json* scaling = reader.Find("rope_scaling");
  const Json* parameters = reader.Find("rope_parameters");
  for (const std::string_view key : {"rope_scaling", "rope_parameters"}) {
    const Json* outer = reader.FindOuter(key);
    if (outer == nullptr || reader.FindInner(key) != nullptr) continue;
    reader.Fail(fmt::format("{} is {} outside and not given in text_config; it belongs there", key,
                            ShownValue(*outer)));
  }
  if (parameters == nullptr) {
    if (!theta) reader.Missing(reader.Path("rope_theta"));
    if (scaling == nullptr) return {.theta = theta.value_or(1)};
    return ReadRopeObject(reader, "rope_scaling", *scaling, theta);
  }
  const RopeConfig rope = ReadRopeObject(reader, "rope_parameters", *parameters, theta);
  if (theta && rope.theta != *theta) {
    reader.Fail(fmt::format("{} is {}, {}.rope_theta is {}; make the two agree",
                            reader.Path("rope_theta"), *theta, reader.Path("rope_parameters"),
                            rope.theta));
  }
  if (scaling != nullptr &&
      !(ReadRopeObject(reader, "rope_scaling", *scaling, rope.theta) == rope)) {
    reader.Fail(fmt::format("{} and {} differ; keep one of the two", reader.Path("rope_scaling"),
                            reader.Path("rope_parameters")));
  }
  return rope;
}

void CheckQuantization(ConfigReader& reader) {
  for (const Json* block :
       {reader.FindInner("quantization_config"), reader.FindOuter("quantization_config")}) {
    if (block == nullptr) continue;
    if (const auto fault = QuantizationFault(*block)) {
      reader.Fail(fmt::format("quantization_config: {}; {}", *fault, kSupported));
    }
  }
}

}  // namespace statetap
