// Reads fields of a config.json, flat or below "text_config", and gathers the faults so that one
// message names every missing field. Not thread safe; borrows the configuration.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/json_fwd.h"
#include "extractor/base/status.h"

namespace statetap {

// At most 80 bytes of a value, for messages.
std::string ShownValue(const Json& value);

class ConfigReader {
 public:
  // INVALID_ARGUMENT where `config` or its text_config is no object.
  static absl::StatusOr<ConfigReader> Make(const Json& config);

  // Required. Missing or null: noted as missing, the result is `least`.
  int Int(std::string_view key, int64_t least, int64_t most);
  double Double(std::string_view key, double least, double most);
  bool Bool(std::string_view key);
  // Null counts as `if_null`, a missing key is a fault: these fields say something by being null.
  int NullableInt(std::string_view key, int if_null, int64_t least, int64_t most);
  // A missing key or null gives `fallback`.
  int Int(std::string_view key, int64_t least, int64_t most, int fallback);
  double Double(std::string_view key, double least, double most, double fallback);
  bool Bool(std::string_view key, bool fallback);
  std::string String(std::string_view key, std::string_view fallback);

  // As written in the text configuration, or outside where only that has it; null where neither
  // does. For fields that outer configurations carry by custom (token ids, quantisation, tied
  // embeddings).
  const Json* FindAnywhere(std::string_view key);
  // As written in the text configuration; null where it is missing or null. A value outside that
  // differs is a fault.
  const Json* Find(std::string_view key);
  // As Find, without comparing: for fields that differ between the levels by their meaning.
  const Json* FindInner(std::string_view key) const;
  // Of the outer level of a nested configuration, null where flat.
  const Json* FindOuter(std::string_view key) const;

  // "text_config.hidden_size" or "hidden_size".
  std::string Path(std::string_view key) const;
  // The first fault stays.
  void Fail(std::string message);
  absl::Status status() const;

  // Value checks of one JSON number, for objects below; a fault names `path`.
  int IntOf(const Json& value, std::string_view path, int64_t least, int64_t most);
  double DoubleOf(const Json& value, std::string_view path, double least, double most);
  bool BoolOf(const Json& value, std::string_view path);
  void Missing(std::string path) { missing_.push_back(std::move(path)); }

 private:
  ConfigReader(const Json& text, const Json* outer) : text_(&text), outer_(outer) {}
  // The key's value, null included; nullptr where the text configuration lacks the key.
  const Json* Lookup(std::string_view key, bool null_is_a_value);

  const Json* text_;
  const Json* outer_;  // null where flat
  std::vector<std::string> missing_;
  std::string fault_;
};

}  // namespace statetap
