// statetapd's options: flags, and the same names in a file (--config).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "extractor/base/status.h"
#include "extractor/engine/engine.h"

namespace statetap {

struct ServerConfig {
  std::string model;
  std::filesystem::path data;
  std::string listen = "127.0.0.1:7070";
  std::string http = "127.0.0.1:7071";  // empty: off
  std::string http_token;               // empty: the web page only reads
  std::vector<std::filesystem::path> shards;
  EngineOptions engine;
  double host_buffer_gib = 4;
  uint64_t max_shard_bytes = 0;  // 0: no bound
  bool retain_until_acknowledged = false;
  int drain_seconds = 60;
  std::string engine_failure = "stay";  // or "exit"
};

struct ParsedArguments {
  std::optional<ServerConfig> config;  // none: print `text` and exit with `exit_code`
  int exit_code = 0;
  std::string text;
};
// Usage errors name the flag and the near one (exit 2); --help and --version exit 0.
ParsedArguments ParseArguments(int argc, const char* const* argv);

}  // namespace statetap
