// The server: store, runner and services behind a gRPC port, and the HTTP side. Main makes one;
// tests make them in process, on port 0.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "extractor/engine/engine.h"
#include "server/jobs/job_runner.h"

namespace statetap {

// Holds the data folder for one server: a lock that the kernel drops with the process.
class DataFolderLock {
 public:
  // Makes the folder where it is missing. FAILED_PRECONDITION names the process that holds it.
  static absl::StatusOr<DataFolderLock> Acquire(const std::filesystem::path& data);
  DataFolderLock(DataFolderLock&& other) noexcept;
  DataFolderLock& operator=(DataFolderLock&&) = delete;
  ~DataFolderLock();

 private:
  explicit DataFolderLock(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

class Server {
 public:
  struct Options {
    std::filesystem::path data;                 // locked by the caller
    std::vector<std::filesystem::path> shards;  // empty: <data>/shards
    std::string listen = "127.0.0.1:0";
    std::string http;        // empty: off
    std::string http_token;  // of the web page; empty: it only reads
    JobRunner::Options runner;
    bool verify_counts = false;  // JobStore::Options
    // How often each client is pinged, and how long it may take to answer before its calls end: one
    // whose machine vanished is noticed within a minute.
    std::chrono::milliseconds keepalive{40'000}, keepalive_timeout{20'000};
    // Once, on the engine's thread, after health says so: no sample will run here any more.
    std::function<void()> engine_failed;
  };
  // Serves when it returns. ALREADY_EXISTS where a port is taken. `engine` outlives the server.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options, ServedModel model,
                                                       Engine& engine);
  ~Server();

  const std::string& grpc_address() const;
  const std::string& http_address() const;  // empty: off
  JobRunner& runner();

  // Refuses new calls, lets running samples finish until `limit` has passed, closes shards, ends
  // streams and calls. False, as JobRunner::Drain: a step still runs, and HTTP's answers wait for
  // it; the process may end. Idempotent.
  bool Drain(std::chrono::milliseconds limit);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace statetap
