// How fast weights come from the disk, against a raw read of the same files (O_DIRECT where the
// file system allows, large reads, as many threads), alternating, the median of five:
//   read   the loader alone: every byte of the layer delivered, nothing done with it
//   cpu    the loader into the weights of the CPU backend
//   cuda   the loader into a GPU: staged, copied, packed into the kernels' blocks
// The files are one full-width MoE layer of Kimi-K2.5 and its embedding, as `statetap
// make-checkpoint` writes them (12 GB); made in a temporary folder unless one is given.
//
//   load_bench [--dir FOLDER] [--work FOLDER] [--preset kimi-k2.5|mid|tiny] [--rounds N]
//              [--cases read,cpu,cuda]
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bench/compare.h"
#include "extractor/backend/backend.h"
#include "extractor/base/file.h"
#include "extractor/checkpoint/checkpoint_index.h"
#include "extractor/checkpoint/loader.h"
#include "extractor/checkpoint/maker.h"
#include "extractor/model/layout.h"
#include "extractor/model/weights.h"
#ifdef STATETAP_CUDA
#include "extractor/backend/cuda/cuda_backend.h"
#endif

namespace statetap::bench {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
constexpr int64_t kBlock = int64_t{16} << 20;

struct Options {
  fs::path dir, work = fs::temp_directory_path();
  std::string preset = "kimi-k2.5", cases = "read,cpu,cuda";
  int rounds = 5;
};

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

int NumThreads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 4, 32);
}

// The pages of the files leave the cache, so that each read is one of the disk.
absl::Status DropCache(const CheckpointIndex& index) {
  for (const fs::path& path : index.files()) {
    STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForWrite(path));
    STATETAP_RETURN_IF_ERROR(file.Sync());
    (void)posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
  }
  return absl::OkStatus();
}

// GB/s of reading every byte of the files by large reads, and no more.
absl::StatusOr<double> RawRead(const CheckpointIndex& index) {
  struct Block {
    size_t file;
    int64_t begin, end;
  };
  std::vector<File> files;
  std::vector<Block> blocks;
  int64_t total = 0;
  for (size_t i = 0; i < index.files().size(); ++i) {
    STATETAP_ASSIGN_OR_RETURN(File file, File::OpenForPages(index.files()[i]));
    STATETAP_ASSIGN_OR_RETURN(const int64_t size, file.Size());
    for (int64_t at = 0; at < size; at += kBlock)
      blocks.push_back({i, at, std::min(size, at + kBlock)});
    files.push_back(std::move(file));
    total += size;
  }
  std::atomic<size_t> next = 0;
  std::atomic<bool> failed = false;
  const auto begin = Clock::now();
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < NumThreads(); ++i) {
      threads.emplace_back([&] {
        auto* memory = static_cast<std::byte*>(std::aligned_alloc(File::kPage, kBlock));
        for (size_t b = next++; b < blocks.size(); b = next++) {
          if (!files[blocks[b].file].ReadPages(blocks[b].begin, blocks[b].end, memory).ok())
            failed = true;
        }
        std::free(memory);
      });
    }
  }
  const double seconds = Seconds(begin);
  if (failed) return absl::InternalError("the raw read failed");
  return static_cast<double>(total) / seconds / 1e9;
}

class NullSink final : public SliceSink {
 public:
  void Deliver(size_t, int64_t, int64_t, const std::byte*, int64_t) override {}
};

LoadOptions Loading() {
  LoadOptions options;
  options.num_threads = NumThreads();
  options.block_bytes = kBlock;
  return options;
}

int64_t BytesOf(const CheckpointIndex& index) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : index.tensors()) bytes += tensor.size_bytes;
  return bytes;
}

absl::StatusOr<double> Read(const CheckpointIndex& index) {
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : index.tensors()) slices.push_back(WholeOf(tensor));
  NullSink sink;
  const auto begin = Clock::now();
  STATETAP_RETURN_IF_ERROR(LoadSlices(index, slices, sink, Loading()));
  return static_cast<double>(BytesOf(index)) / Seconds(begin) / 1e9;
}

// From the first byte to ready weights; memory is there before.
absl::StatusOr<double> Prepare(const CheckpointIndex& index,
                               const std::vector<std::unique_ptr<Backend>>& backends) {
  STATETAP_ASSIGN_OR_RETURN(const ParallelLayout layout,
                            ParallelLayout::Make(index.config(), static_cast<int>(backends.size()),
                                                 ExpertLayout::kExpert, index.quantized()));
  auto begin = Clock::now();
  const auto made = begin;
  LoadOptions options = Loading();
  options.progress = [&](const LoadProgress& progress) {
    begin = Clock::now() - std::chrono::nanoseconds(static_cast<int64_t>(progress.seconds * 1e9));
  };
  STATETAP_ASSIGN_OR_RETURN(const auto weights, LoadWeights(index, layout, backends, options));
  const double seconds = Seconds(begin);
  std::printf("  %.2f s with memory made, %.2f s of it reading and preparing\n", Seconds(made),
              seconds);
  return static_cast<double>(BytesOf(index)) / seconds / 1e9;
}

absl::Status Case(const Options& options, const CheckpointIndex& index, const std::string& name,
                  const Measure& measure) {
  const auto cold = [&](const Measure& rate) -> Measure {
    return [&index, rate]() -> absl::StatusOr<double> {
      STATETAP_RETURN_IF_ERROR(DropCache(index));
      return rate();
    };
  };
  return Compare(
      {.bench = "load_bench", .name = name, .baseline = "raw-read", .rounds = options.rounds},
      cold(measure), cold([&] { return RawRead(index); }));
}

int64_t AvailableBytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:")) return std::stoll(line.substr(13)) * 1024;
  }
  return 0;
}

absl::Status Run(const Options& options, const fs::path& folder) {
  STATETAP_ASSIGN_OR_RETURN(const CheckpointIndex index, CheckpointIndex::Open(folder));
  std::printf("%zu files, %.2f GB of tensors, %d threads, reads of %lld MiB\n",
              index.files().size(), static_cast<double>(BytesOf(index)) / 1e9, NumThreads(),
              static_cast<long long>(kBlock >> 20));
  if (HasCase(options.cases, "read"))
    STATETAP_RETURN_IF_ERROR(Case(options, index, "read", [&] { return Read(index); }));
  if (HasCase(options.cases, "cpu")) {
    if (AvailableBytes() < BytesOf(index) * 5 / 4) {
      std::printf("cpu: left out, the weights do not fit the memory that is free\n");
    } else {
      STATETAP_RETURN_IF_ERROR(
          Case(options, index, "cpu", [&] { return Prepare(index, MakeCpuBackends(1, 1)); }));
    }
  }
  if (!HasCase(options.cases, "cuda")) return absl::OkStatus();
#ifdef STATETAP_CUDA
  if (NumGpus() > 0) {
    return Case(options, index, "cuda",
                [&] { return Prepare(index, MakeCudaBackends(NumGpus(), CudaOptions{})); });
  }
#endif
  std::printf("cuda: left out, no GPU can be used here\n");
  return absl::OkStatus();
}

absl::Status Main(const Options& options) {
  if (!options.dir.empty()) return Run(options, options.dir);
  const fs::path folder = options.work / fmt::format("statetap-load-bench-{}", ::getpid());
  MakeOptions make;
  make.preset = options.preset;
  make.layers = 1;
  make.dense_layers = 0;
  make.tied_embeddings = true;
  const auto begin = Clock::now();
  const absl::StatusOr<MakeResult> made = MakeCheckpoint(folder, make);
  absl::Status status = made.status();
  if (status.ok()) {
    std::printf("%s: made in %.0f s\n", folder.c_str(), Seconds(begin));
    status = Run(options, folder);
  }
  fs::remove_all(folder);
  return status;
}

}  // namespace
}  // namespace statetap::bench

int main(int argc, char** argv) {
  statetap::bench::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--dir") options.dir = value;
    if (name == "--work") options.work = value;
    if (name == "--preset") options.preset = value;
    if (name == "--cases") options.cases = value;
    if (name == "--rounds") options.rounds = std::max(1, std::atoi(argv[i + 1]));
  }
  const absl::Status status = statetap::bench::Main(options);
  if (status.ok()) return 0;
  fmt::print(stderr, "load_bench: {}\n", statetap::MessageOf(status));
  return 1;
}
