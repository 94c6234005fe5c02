// The flags of benches that run a list of cases, and a folder of their own that goes with the run.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "extractor/base/status.h"

namespace statetap::bench {

struct CaseOptions {
  std::string cases;  // names with commas between
  int samples = 1, tokens = 1, rounds = 5;
  std::filesystem::path work = std::filesystem::temp_directory_path();

  // Flags that are none of these are left alone.
  void Take(std::string_view flag, const std::string& value) {
    const auto count = [&] { return std::max(1, std::atoi(value.c_str())); };
    if (flag == "--work") work = value;
    if (flag == "--cases") cases = value;
    if (flag == "--samples") samples = count();
    if (flag == "--tokens") tokens = count();
    if (flag == "--rounds") rounds = count();
  }
};

// Runs a Bench(options, folder) in a new folder below options.work.
template <typename Bench>
absl::Status RunInFolder(std::string_view name, const CaseOptions& options) {
  const std::filesystem::path folder =
      options.work / fmt::format("statetap-{}-{}", name, ::getpid());
  std::filesystem::create_directories(folder);
  const absl::Status status = Bench(options, folder).Run();
  std::filesystem::remove_all(folder);
  return status;
}

}  // namespace statetap::bench
