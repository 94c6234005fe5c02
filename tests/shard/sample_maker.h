// Samples whose every value follows from a seed.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "extractor/base/dtype.h"
#include "extractor/shard/shard_writer.h"
#include "tests/support/status_matchers.h"

namespace statetap::testing {

inline ShardConfig MakeShardConfig(int hidden, std::vector<int> boundaries, int layers = 8) {
  ShardConfig config;
  config.job = "job-1";
  config.model_name = "tiny-kimi";
  config.model_digest = "0123456789abcdef";
  config.quantization = "int4-g32";
  config.hidden = hidden;
  config.layers = layers;
  config.boundaries = std::move(boundaries);
  config.rms_norm_eps = 1e-5;
  config.inner_eps = 1e-6;
  config.rope_json = R"({"rope_theta":50000.0,"type":"yarn"})";
  config.tokenizer_digest = "feed";
  config.template_name = "kimi-k2.5";
  config.template_digest = "beef";
  config.thinking = false;
  config.first_special = 150000;
  config.think_token = 150001;
  config.think_end_token = 150002;
  config.options_json = R"({"mode":"generate"})";
  config.producer = "statetap 0.1.0";
  return config;
}

struct TestSample {
  SampleRecord record;
  std::vector<std::vector<uint16_t>> states;  // by boundary

  std::vector<std::span<const uint16_t>> spans() const { return {states.begin(), states.end()}; }
};

inline TestSample MakeSample(const ShardConfig& config, int tokens, uint32_t seed) {
  std::mt19937 random(seed);
  const auto count = static_cast<size_t>(tokens);
  TestSample sample;
  SampleRecord& record = sample.record;
  record.id = fmt::format("sample-{}", seed);
  record.source = "toolbench";
  record.meta_json = R"({"topic":"maths","level":3})";
  record.digest = fmt::format("d{}", seed);
  record.finish_reason = "stop";
  record.prompt_tokens = tokens / 2;
  record.source_index = seed;
  for (size_t i = 0; i < count; ++i) {
    record.input_ids.push_back(static_cast<int32_t>(random() % 160000));
    record.loss_mask.push_back(static_cast<int>(i) >= record.prompt_tokens);
    record.logprobs.push_back(-static_cast<float>(random() % 1000) / 64);
    record.entropies.push_back(static_cast<float>(random() % 1000) / 128);
  }
  for (size_t b = 0; b < config.boundaries.size(); ++b) {
    std::vector<uint16_t> rows(count * static_cast<size_t>(config.hidden));
    // Random mantissas and signs, exponents around 1.
    for (uint16_t& value : rows) value = static_cast<uint16_t>((random() & 0x83ff) | 0x3c00);
    sample.states.push_back(std::move(rows));
  }
  return sample;
}

inline absl::StatusOr<ShardSummary> WriteShard(const std::filesystem::path& path,
                                               const ShardConfig& config,
                                               std::span<const TestSample> samples,
                                               const ShardWriter::Options& options = {}) {
  STATETAP_ASSIGN_OR_RETURN(const auto writer, ShardWriter::Create(path, config, options));
  for (const TestSample& sample : samples)
    STATETAP_RETURN_IF_ERROR(writer->Append(sample.record, sample.spans()));
  return writer->Commit();
}

inline std::string FileBytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void SetFileBytes(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

}  // namespace statetap::testing
