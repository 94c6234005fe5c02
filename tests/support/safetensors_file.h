// A whole safetensors file in memory: reference data of the tests.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "extractor/base/file.h"
#include "extractor/checkpoint/safetensors.h"
#include "tests/support/status_matchers.h"

namespace statetap::testing {

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path) {
    auto bytes = ReadWholeFile(path);
    auto entries = ReadSafetensorsHeader(path);
    EXPECT_OK(bytes);
    EXPECT_OK(entries);
    if (!bytes.ok() || !entries.ok()) return;
    bytes_ = *std::move(bytes);
    for (auto& entry : *entries) entries_.emplace(entry.name, entry);
  }
  bool Has(const std::string& name) const { return entries_.contains(name); }
  const std::vector<int64_t>& Shape(const std::string& name) const {
    return entries_.at(name).shape;
  }
  template <typename T>
  std::vector<T> Get(const std::string& name) const {
    const SafetensorsEntry& entry = entries_.at(name);
    std::vector<T> values(static_cast<size_t>(entry.size_bytes) / sizeof(T));
    std::memcpy(values.data(), bytes_.data() + entry.offset, static_cast<size_t>(entry.size_bytes));
    return values;
  }

 private:
  std::string bytes_;
  std::map<std::string, SafetensorsEntry> entries_;
};

}  // namespace statetap::testing
