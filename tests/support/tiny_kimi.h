// tiny-kimi behind an engine, and the greedy answers that transformers gives for its prompts.
#pragma once

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "extractor/base/json.h"
#include "tests/support/engine_harness.h"

namespace statetap::testing {

inline constexpr int kHidden = 128, kLayers = 8, kImEnd = 2050;

// Where the tests were built, or where STATETAP_SOURCE_DIR says, for binaries carried elsewhere.
inline std::filesystem::path Root() {
  const char* elsewhere = std::getenv("STATETAP_SOURCE_DIR");
  return elsewhere != nullptr ? elsewhere : STATETAP_SOURCE_DIR;
}

inline const CheckpointIndex& Tiny() {
  static const auto index = CheckpointIndex::Open(Root() / "models/tiny-kimi");
  return *index;
}

inline std::unique_ptr<Engine> OpenTiny(EngineOptions options = {}) {
  auto engine = Engine::Open(Tiny(), options);
  EXPECT_OK(engine);
  return *std::move(engine);
}

inline std::vector<Json> GreedyLines() {
  std::vector<Json> lines;
  std::ifstream file(Root() / "tests/data/tiny-kimi/greedy.jsonl");
  for (std::string line; std::getline(file, line);) lines.push_back(*ParseJson(line));
  return lines;
}

inline SampleTask GenerateTask(std::vector<int32_t> prompt, double temperature, uint64_t key) {
  SampleTask task;
  task.input_ids = std::move(prompt);
  task.generate = true;
  task.max_new_tokens = 128;
  task.max_length = 4096;
  task.stop_ids = {kImEnd};
  task.sampling = {temperature, 0.95, 11, key};
  task.token_scores = true;
  task.boundaries = {2, 4, 5, kLayers};
  return task;
}

inline std::vector<SampleTask> SomeTasks(size_t count, double temperature) {
  std::vector<SampleTask> tasks;
  for (const Json& line : GreedyLines()) {
    if (tasks.size() == count) break;
    tasks.push_back(
        GenerateTask(line["prompt_ids"].get<std::vector<int32_t>>(), temperature, tasks.size()));
  }
  return tasks;
}

}  // namespace statetap::testing
