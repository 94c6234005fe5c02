// What the exchanges between ranks cost, by either carrier, against NCCL's own collectives in the
// same run (with the same norm behind them where there is one): reduce-scatter, all-gather,
// all-reduce, and exchange + add + norm, rows of 7168 bf16 values. Peer-to-peer copies are the
// ceiling. A rank a GPU; with fewer GPUs the ranks share them and NCCL is left out.
//
//   exchange_bench [--ranks N: the GPUs there are, at least 2] [--tokens 1,4,…] [--rounds N]
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bench/numbers.h"
#include "bench/random_fill.h"
#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/rank.h"
#ifdef STATETAP_NCCL
#include <nccl.h>
#endif

namespace statetap::bench {
namespace {

using cuda::bf16;
using cuda::Check;
constexpr int kHidden = 7168;
constexpr int kShardedFrom = 257;  // as the engine
constexpr size_t kRow = kHidden * sizeof(bf16);

struct Rank {
  Rank(int number, int on, int most)
      : rank(number),
        device((cudaSetDevice(on), on)),
        partial(static_cast<size_t>(most) * kRow),
        residual(partial.size()),
        normed(partial.size()),
        all(partial.size()),
        weight(kHidden * sizeof(float)) {
    for (cuda::DeviceBuffer* rows : {&partial, &residual})
      FillNormal(rows->as<bf16>(), int64_t{most} * kHidden, 1, static_cast<uint32_t>(rank + 1));
    FillValue(weight.as<float>(), kHidden, 1);
    Check(cudaDeviceSynchronize());
    Check(cudaEventCreate(&begin));
    Check(cudaEventCreate(&end));
  }
  int rank, device;
  cuda::Stream stream;
  cudaEvent_t begin = nullptr, end = nullptr;
  cuda::DeviceBuffer partial, residual, normed, all, weight;
#ifdef STATETAP_NCCL
  ncclComm_t comm = nullptr;
#endif
};

class Bench {
 public:
  Bench(int world, std::vector<int> tokens, int rounds)
      : world_(world), tokens_(std::move(tokens)), rounds_(rounds) {
    // NCCL's shards are equal.
    most_ = PartOf(*std::max_element(tokens_.begin(), tokens_.end())) * world_;
    for (int rank = 0; rank < world_; ++rank) {
      devices_.push_back(rank % NumGpus());
      ranks_.push_back(std::make_unique<Rank>(rank, devices_.back(), most_));
    }
    peer_ = cuda::MakeGroup(devices_, CudaOptions::Comm::kPeer);
    Join(*peer_);
#ifdef STATETAP_NCCL
    if (NumGpus() >= world_) {
      nccl_ = cuda::MakeGroup(devices_, CudaOptions::Comm::kNccl);
      Join(*nccl_);
      std::vector<ncclComm_t> comms(ranks_.size());
      if (ncclCommInitAll(comms.data(), world_, devices_.data()) != ncclSuccess) std::abort();
      for (size_t rank = 0; rank < ranks_.size(); ++rank) ranks_[rank]->comm = comms[rank];
    }
#endif
  }

  void Run() {
    Ceilings();
    std::printf("%-22s %8s %10s %10s %10s %10s %10s\n", "us, median", "tokens", "KB", "peer",
                "in a graph", "by nccl", "NCCL's");
    for (const int tokens : tokens_) {
      const bool sharded = tokens >= kShardedFrom;
      Row(
          "reduce-scatter", tokens,
          [&](cuda::DeviceGroup& g, Rank& r) { Sum(g, r, tokens, true, false); },
          [&](Rank& r) { Native(r, tokens, 's', false); });
      Row(
          "all-gather", tokens,
          [&](cuda::DeviceGroup& g, Rank& r) {
            const RowRange own = ShardOfRows(tokens, r.rank, world_);
            g.GatherRows(r.rank, r.partial.as<std::byte>() + static_cast<size_t>(own.begin) * kRow,
                         tokens, kRow, r.all.as<void>(), r.stream.get());
          },
          [&](Rank& r) { Native(r, tokens, 'g', false); });
      Row(
          "all-reduce", tokens,
          [&](cuda::DeviceGroup& g, Rank& r) { Sum(g, r, tokens, false, false); },
          [&](Rank& r) { Native(r, tokens, 'r', false); });
      Row(
          sharded ? "exchange+add+norm (own)" : "exchange+add+norm (all)", tokens,
          [&](cuda::DeviceGroup& g, Rank& r) { Sum(g, r, tokens, sharded, true); },
          [&](Rank& r) { Native(r, tokens, sharded ? 's' : 'r', true); });
    }
  }

 private:
  int PartOf(int tokens) const { return (tokens + world_ - 1) / world_; }

  void Join(cuda::DeviceGroup& group) {
    for (const auto& rank : ranks_) {
      Check(cudaSetDevice(rank->device));
      group.Join(rank->rank);
      group.Reserve(rank->rank, {nullptr, most_, kRow, /*sharded=*/false});
    }
  }

  cuda::SumAddNormParams SumOf(Rank& r, RowRange own, bool norm) const {
    cuda::SumAddNormParams p{};
    p.first_row = own.begin;
    p.num_rows = own.count;
    p.hidden = kHidden;
    p.residual = r.residual.as<bf16>();
    p.replace = !norm;
    p.weight = norm ? r.weight.as<float>() : nullptr;
    p.eps = 1e-6f;
    p.normed = r.normed.as<bf16>();
    return p;
  }

  void Sum(cuda::DeviceGroup& group, Rank& r, int tokens, bool sharded, bool norm) {
    const RowRange own = sharded ? ShardOfRows(tokens, r.rank, world_) : RowRange{0, tokens};
    group.ExchangeAddNorm(r.rank, {r.partial.as<void>(), tokens, kRow, sharded},
                          SumOf(r, own, norm), r.stream.get());
  }

  void Native([[maybe_unused]] Rank& r, [[maybe_unused]] int tokens, [[maybe_unused]] char what,
              [[maybe_unused]] bool norm) {
#ifdef STATETAP_NCCL
    const int part = PartOf(tokens);
    const auto own = static_cast<size_t>(part) * kHidden;
    const auto all = static_cast<size_t>(tokens) * kHidden;
    const cudaStream_t stream = r.stream.get();
    ncclResult_t code = ncclSuccess;
    if (what == 's') {
      code = ncclReduceScatter(r.partial.as<void>(), r.all.as<void>(), own, ncclBfloat16, ncclSum,
                               r.comm, stream);
    }
    if (what == 'g') {
      code =
          ncclAllGather(r.partial.as<void>(), r.all.as<void>(), own, ncclBfloat16, r.comm, stream);
    }
    if (what == 'r') {
      code = ncclAllReduce(r.partial.as<void>(), r.all.as<void>(), all, ncclBfloat16, ncclSum,
                           r.comm, stream);
    }
    if (code != ncclSuccess) std::abort();
    if (!norm) return;
    cuda::SumAddNormParams p = SumOf(r, {0, what == 's' ? part : tokens}, true);
    p.world = 1;
    p.partial[0] = r.all.as<bf16>();
    cuda::SumAddNorm(p, stream);
#endif
  }

  // Median over the rounds of the slowest rank's microseconds for one. Launched one by one, or all
  // of them as a graph.
  enum class Launch { kOneByOne, kGraph };
  double Time(int repeats, const std::function<void(Rank&)>& once,
              Launch launch = Launch::kOneByOne) {
    std::vector<double> rounds;
    std::vector<float> ms(ranks_.size());
    std::barrier meet(static_cast<std::ptrdiff_t>(ranks_.size()));
    std::vector<std::thread> threads;
    for (const auto& rank : ranks_) {
      threads.emplace_back([&, r = rank.get()] {
        Check(cudaSetDevice(r->device));
        const cudaStream_t stream = r->stream.get();
        cudaGraphExec_t graph = nullptr;
        if (launch == Launch::kGraph) {
          cudaGraph_t recorded;
          Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
          for (int i = 0; i < repeats; ++i) once(*r);
          Check(cudaStreamEndCapture(stream, &recorded));
          Check(cudaGraphInstantiate(&graph, recorded, 0));
          Check(cudaGraphDestroy(recorded));
        }
        for (int round = -1; round < rounds_; ++round) {
          Check(cudaStreamSynchronize(stream));
          meet.arrive_and_wait();
          Check(cudaEventRecord(r->begin, stream));
          if (graph != nullptr) {
            Check(cudaGraphLaunch(graph, stream));
          } else {
            for (int i = 0; i < repeats; ++i) once(*r);
          }
          Check(cudaEventRecord(r->end, stream));
          Check(cudaStreamSynchronize(stream));
          Check(cudaEventElapsedTime(&ms[static_cast<size_t>(r->rank)], r->begin, r->end));
          meet.arrive_and_wait();
          if (r->rank == 0 && round >= 0)
            rounds.push_back(1e3 * *std::max_element(ms.begin(), ms.end()) / repeats);
          meet.arrive_and_wait();
        }
        if (graph != nullptr) Check(cudaGraphExecDestroy(graph));
      });
    }
    for (auto& thread : threads) thread.join();
    std::sort(rounds.begin(), rounds.end());
    return rounds[rounds.size() / 2];
  }

  void Row(const char* name, int tokens, const std::function<void(cuda::DeviceGroup&, Rank&)>& ours,
           const std::function<void(Rank&)>& native) {
    const int repeats = tokens <= 256 ? 200 : tokens <= 4096 ? 40 : 10;
    const double peer = Time(repeats, [&](Rank& r) { ours(*peer_, r); });
    double graph = 0;
    // Shares of rows are read with the host's help, which no graph can hold.
    if (std::strcmp(name, "reduce-scatter") != 0 && tokens < kShardedFrom &&
        peer_->Recordable(static_cast<size_t>(tokens) * kRow, kRow))
      graph = Time(
          repeats, [&](Rank& r) { ours(*peer_, r); }, Launch::kGraph);
    double by_nccl = 0, theirs = 0;
    if (nccl_ != nullptr) {
      by_nccl = Time(repeats, [&](Rank& r) { ours(*nccl_, r); });
      theirs = Time(repeats, native);
    }
    const double kb = static_cast<double>(tokens) * kRow / 1024;
    std::printf("%-22s %8d %10.0f %10.1f %10.1f %10.1f %10.1f\n", name, tokens, kb, peer, graph,
                by_nccl, theirs);
    std::printf(
        "{\"bench\":\"exchange_bench\",\"case\":\"%s %.0f KB\",\"value\":%.2f,\"unit\":\"us\","
        "\"baseline\":\"nccl\",\"baseline_value\":%.2f,\"ratio\":",
        name, kb, peer, theirs);
    if (theirs > 0) {
      std::printf("%.3f}\n", theirs / peer);
    } else {
      std::printf("null}\n");
    }
    std::fflush(stdout);
  }

  void Ceilings() {
    const size_t bytes = ranks_[0]->partial.size();
    const auto copy = [&](bool all) {
      return Time(5, [&, all](Rank& r) {
        if (!all && r.rank > 0) return;
        const auto next = static_cast<size_t>((r.rank + 1) % world_);
        Check(cudaMemcpyAsync(r.all.as<void>(), ranks_[next]->partial.as<void>(), bytes,
                              cudaMemcpyDefault, r.stream.get()));
      });
    };
    const double one = copy(false), each = copy(true);
    std::printf(
        "%d ranks, %d GPUs; copies of %.0f MB from the next rank: %.0f GB/s into one, %.0f into "
        "each at once\n",
        world_, NumGpus(), static_cast<double>(bytes) / 1e6, static_cast<double>(bytes) / one / 1e3,
        static_cast<double>(bytes) / each / 1e3);
    if (nccl_ == nullptr)
      std::printf("NCCL is left out: %s\n",
                  HasNccl() ? "it has no two ranks on a GPU" : "this build has none");
  }

  const int world_;
  const std::vector<int> tokens_;
  const int rounds_;
  int most_ = 0;
  std::vector<int> devices_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::shared_ptr<cuda::DeviceGroup> peer_, nccl_;
};

int Main(int argc, char** argv) {
  // Multicast can put the GPUs of a shared host out of service.
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  std::vector<int> tokens = {1, 4, 16, 36, 64, 256, 2048, 8192, 32768};
  int rounds = 5, ranks = std::max(2, NumGpus());
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--ranks") ranks = std::clamp(std::atoi(argv[i + 1]), 2, cuda::kMaxRanks);
    if (name == "--rounds") rounds = std::max(1, std::atoi(argv[i + 1]));
    if (name == "--tokens") tokens = Numbers(argv[i + 1]);
  }
  if (NumGpus() == 0) {
    std::printf("exchange_bench: no GPU can be used here\n");
    return 1;
  }
  Bench(ranks, std::move(tokens), rounds).Run();
  return 0;
}

}  // namespace
}  // namespace statetap::bench

int main(int argc, char** argv) { return statetap::bench::Main(argc, argv); }
