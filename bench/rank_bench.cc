// Kimi-K2.5 at full size with random INT4 experts and bf16 weights made on the device, real
// routing, the real layer loop, each rank on its thread as in the engine.
//
// By default one rank of eight on one GPU. Communication is left out: the rank norms its own rows,
// the rows of the others stay as they are, and their choice of experts is its own, repeated; tokens
// are drawn from the whole vocabulary, seven eighths of whose logits are random. Rates are node
// equivalents: the tokens of a step over the rank's time for it.
//
// --ranks N: all N ranks, one a GPU, with the product's own exchanges by `peer` and `nccl`, beside
// the same steps without (`none`): the difference is what exchanges expose. Every carrier has to
// give the same tokens and states, bit for bit. With fewer GPUs the ranks share them, which is for
// trying things out: times mean nothing then, and NCCL is left out.
//
// --exchange: what prompts cost with exchanges beside the same without. Of one rank, `serial` and
// `halves`: two ranks on two GPUs play the others of eight to each other (stand_in_group.h); on one
// GPU the rank copies its own rows. `turns`: the halves of a step in turns without exchanges; it
// comes before `halves`.
//
// Routing: `uniform`; `zipf`, expert i of the order of popularity chosen 1/i as often as the first;
// `hot`, one expert of a rank chosen four times as often as the others. Skew is made by the
// router's bias, so that the router does its real work.
//
//   rank_bench [--ranks N] [--layers N] [--experts expert|tensor] [--kernels auto|portable|hopper]
//              [--routing uniform,zipf,hot] [--prefill 8192,…] [--sample 2048] [--decode 1,16,…]
//              [--context 2048,…] [--cache 262144] [--repeats N] [--graphs on|off]
//              [--halved-from N] [--exchange none,serial,turns,halves | none,peer,nccl]
//
// `ncu --profile-from-start off` sees the steps that are timed, without those that choose
// algorithms before them.
#include <cuda_profiler_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>

#include "bench/numbers.h"
#include "bench/random_fill.h"
#include "bench/random_model.h"
#include "bench/stand_in_group.h"
#include "bench/switched_group.h"
#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/rank.h"
#include "extractor/base/digest.h"
#include "extractor/engine/rank_group.h"
#include "extractor/model/transformer.h"

namespace statetap::bench {
namespace {

// One rank alone has the experts of rank kRank of kWorld.
constexpr int kWorld = 8, kRank = 3;
constexpr int kShardedFrom = 257;  // as the engine
constexpr auto kPatience = std::chrono::seconds(60);

// How rows go between the ranks of a run: played, or by a carrier.
struct Way {
  const char* name;
  Exchange played = Exchange::kNone;
  std::optional<CudaOptions::Comm> comm = {};
};
constexpr Way kWays[] = {{"none"},
                         {"serial", Exchange::kSerial},
                         {"turns", Exchange::kTurns},
                         {"halves", Exchange::kHalves},
                         {"peer", Exchange::kNone, CudaOptions::Comm::kPeer},
                         {"nccl", Exchange::kNone, CudaOptions::Comm::kNccl}};

// Times each op by events if asked. Where the other ranks are played, so are their logits.
class TimedRank final : public cuda::CudaBackend {
 public:
  using CudaBackend::CudaBackend;

  // Nobody times zeros.
  void FillCache() {
    FillNormal(cache().as<cuda::bf16>(), static_cast<int64_t>(cache().size() / sizeof(cuda::bf16)),
               1, 77);
    cuda::Check(cudaDeviceSynchronize());
  }
  // As many logits as all ranks have, random ones for now.
  void MakeLogits(int max_rows, int vocab_per_rank) {
    const int64_t count = int64_t{communicator().world()} * max_rows * vocab_per_rank;
    std::vector<float> values(static_cast<size_t>(vocab_per_rank));
    std::mt19937 engine(5);
    std::normal_distribution<float> normal;
    logits_ = cuda::DeviceBuffer(static_cast<size_t>(count) * sizeof(float));
    for (int64_t row = 0; row < count / vocab_per_rank; ++row) {
      for (float& value : values) value = normal(engine);
      cuda::CopyIn(logits_.as<float>() + row * vocab_per_rank, values.data(),
                   values.size() * sizeof(float));
    }
  }

  bool alone = true;  // the others are played
  bool timed = false;
  std::map<std::string, double> milliseconds;  // by op, of all timed steps

  std::vector<Step> BeginSteps(std::span<const StepPlan> plans, bool sharded) override {
    sharded_ = sharded;
    return CudaBackend::BeginSteps(plans, sharded);
  }
  void Embed(const Step& s, const EmbedParams& p) override {
    Timed("embed", [&] { CudaBackend::Embed(s, p); });
  }
  void ExchangeAddNorm(const Step& s, const ExchangeAddNormParams& p) override {
    Timed("add + norm", [&] { CudaBackend::ExchangeAddNorm(s, p); });
  }
  void LatentProject(const Step& s, const LatentProjectParams& p) override {
    Timed("latent project", [&] { CudaBackend::LatentProject(s, p); });
  }
  void Gather(const Step& s, std::initializer_list<GatherParams> arrays) override {
    Timed("gather", [&] { CudaBackend::Gather(s, arrays); });
  }
  void Attention(const Step& s, const AttentionParams& p) override {
    Timed("attention", [&] { CudaBackend::Attention(s, p); });
  }
  void Route(const Step& s, const RouteParams& p) override {
    Timed("router", [&] { CudaBackend::Route(s, p); });
  }
  void RoutedFfnStage(const Step& s, const RoutedFfnParams& p, RoutedStage stage) override {
    Timed("routed experts", [&] { CudaBackend::RoutedFfnStage(s, p, stage); });
  }
  void DenseFfn(const Step& s, const DenseFfnParams& p) override {
    Timed("shared and dense FFN", [&] { CudaBackend::DenseFfn(s, p); });
  }
  void Capture(const Step& s, const CaptureParams& p) override {
    Timed("capture", [&] { CudaBackend::Capture(s, p); });
  }
  void Sample(const Step& s, const SampleParams& p) override {
    Timed("head and draw", [&] { CudaBackend::Sample(s, p); });
  }
  const float* AllLogits(const float* own, int count, int vocab_per_rank) override {
    if (!alone) return CudaBackend::AllLogits(own, count, vocab_per_rank);
    const auto block = static_cast<size_t>(count) * static_cast<size_t>(vocab_per_rank);
    // Of a sharded step most rows are other ranks', and zero here.
    if (!sharded_) {
      cuda::Check(cudaMemcpyAsync(logits_.as<float>() + communicator().rank() * block, own,
                                  block * sizeof(float), cudaMemcpyDeviceToDevice, stream()));
    }
    return logits_.as<float>();
  }
  void Finish() override {
    CudaBackend::Finish();
    for (const auto& [name, first, last] : spans_) {
      float ms;
      cuda::Check(cudaEventElapsedTime(&ms, first, last));
      milliseconds[name] += ms;
      free_.insert(free_.end(), {first, last});
    }
    spans_.clear();
  }

 private:
  struct Span {
    const char* name;
    cudaEvent_t first, last;
  };
  cudaEvent_t Mark() {
    cudaEvent_t event;
    if (free_.empty()) {
      cuda::Check(cudaEventCreate(&event));
    } else {
      event = free_.back();
      free_.pop_back();
    }
    // In a graph, a node of its own.
    cuda::Check(cudaEventRecordWithFlags(
        event, stream(), records() ? cudaEventRecordExternal : cudaEventRecordDefault));
    return event;
  }
  template <typename Op>
  void Timed(const char* name, const Op& op) {
    if (!timed || replays()) return op();
    const cudaEvent_t first = Mark();
    op();
    spans_.push_back({name, first, Mark()});
  }
  std::vector<Span> spans_;
  std::vector<cudaEvent_t> free_;
  cuda::DeviceBuffer logits_;
  bool sharded_ = false;
};

enum class Routing { kUniform, kZipf, kHot };
constexpr const char* kRoutingNames[] = {"uniform", "zipf", "hot"};

// How often each expert is to be chosen, of a token's top_k.
std::vector<double> Popularity(const ModelConfig& c, Routing routing) {
  std::vector<double> chosen(static_cast<size_t>(c.num_experts), 1.0);
  if (routing == Routing::kHot) chosen[static_cast<size_t>(c.num_experts / kWorld * kRank)] = 4;
  if (routing == Routing::kZipf) {
    // Popular ones spread over the ranks.
    for (int e = 0; e < c.num_experts; ++e)
      chosen[static_cast<size_t>(e * 49 % c.num_experts)] = 1.0 / (e + 1);
  }
  double sum = 0;
  for (const double weight : chosen) sum += weight;
  for (double& weight : chosen) weight = std::min(0.9, weight * c.top_k / sum);
  return chosen;
}

// Logits are normal, so an expert's score passes the threshold of `chosen` on average with this.
std::vector<float> BiasFor(const std::vector<double>& chosen, int top_k) {
  const auto quantile = [](double p) {  // of the normal distribution, from above
    double low = -9, high = 9;
    for (int i = 0; i < 60; ++i) {
      const double middle = (low + high) / 2;
      (std::erfc(middle / std::sqrt(2.0)) / 2 > p ? low : high) = middle;
    }
    return low;
  };
  const auto score = [](double logit) { return 1 / (1 + std::exp(-logit)); };
  const double threshold = score(quantile(static_cast<double>(top_k) / chosen.size()));
  std::vector<float> bias;
  for (const double p : chosen) bias.push_back(static_cast<float>(threshold - score(quantile(p))));
  return bias;
}

struct Options {
  int ranks = 0;  // 0: one of kWorld, the others played
  int layers = 61;
  ExpertLayout experts = ExpertLayout::kExpert;
  CudaOptions cuda;
  std::vector<int> prefill = {8192, 16384}, decode = {1, 16, 64, 256}, context = {2048};
  int sample = 2048;       // tokens, of prefill
  int cache = 256 * 1024;  // tokens
  std::vector<Routing> routing = {Routing::kUniform};
  std::vector<Way> ways = {kWays[0]};
  bool graphs = true;
  int repeats = 5;
  int halved_from = ModelLimits().halved_from;

  bool all() const { return ranks > 0; }
  int world() const { return all() ? ranks : kWorld; }
};

int Largest(const std::vector<int>& numbers) {
  return numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end());
}

// No step comes after a fault; devices may still be at work for it.
void OrEnd(const absl::Status& status) {
  if (status.ok()) return;
  std::printf("rank_bench: %s\n", std::string(MessageOf(status)).c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

class Bench {
 public:
  // A rank a device.
  Bench(const Options& options, const std::vector<int>& devices, const ParallelLayout& layout)
      : options_(options),
        config_(KimiK25(options.layers)),
        layout_(layout),
        played_(std::make_shared<StandInGroup>(options.world(), devices)),
        num_pages_(options.cache / kPageTokens) {
    SwitchedGroup::Groups groups = {played_};
    for (const Way& way : options.ways) {
      if (way.comm) groups.push_back(cuda::MakeGroup(devices, *way.comm));
    }
    group_ = std::make_shared<SwitchedGroup>(std::move(groups));
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      cuda::Check(cudaSetDevice(devices[rank]));
      auto backend =
          std::make_unique<TimedRank>(static_cast<int>(rank), devices[rank], group_, options.cuda);
      ranks_.push_back({backend.get(), devices[rank], nullptr, {}});
      backends_.push_back(std::move(backend));
    }
    threads_ = std::make_unique<RankGroup>(backends_, kPatience);
    limits_.max_tokens = std::max({512, Largest(options.prefill), Largest(options.decode)});
    limits_.max_context = std::max(65536, Largest(options.context));
    limits_.max_logit_rows = 64;
    limits_.inner_eps = 1e-6;
    limits_.halved_from = options.halved_from;
    OnRanks([this](Rank& rank, int number) { Make(rank, number); });
    output_.chosen.resize(static_cast<size_t>(limits_.max_tokens));
    PrintMemory(devices);
  }

  // Every routing, exchange, size. False: carriers gave different bits.
  bool Measure() {
    for (const Routing routing : options_.routing) {
      Route(routing);
      without_.clear();
      results_.clear();
      for (const Way& way : options_.ways) {
        Use(way);
        const bool played = way_.played != Exchange::kNone;
        for (const bool capture : {false, true}) {
          if (capture && played) continue;
          for (const int tokens : options_.prefill) Prefill(tokens, capture);
          for (const int context : options_.context) {
            for (const int batch : options_.decode) {
              if (!played) Decode(batch, context, capture);
            }
          }
        }
      }
    }
    return same_;
  }

 private:
  struct Rank {
    TimedRank* backend;
    int device;
    std::unique_ptr<Transformer> model;
    std::vector<float*> biases;  // of the routers
  };
  // A step as every rank has it: the ids of one whose others are played are its own.
  using Plans = std::vector<StepPlan>;

  // Each rank on its own thread, its device current.
  void OnRanks(const std::function<void(Rank& rank, int number)>& work) {
    OrEnd(threads_->RunAll([&](int number) {
      Rank& rank = ranks_[static_cast<size_t>(number)];
      cuda::Check(cudaSetDevice(rank.device));
      work(rank, number);
    }));
  }

  void Make(Rank& rank, int number) {
    const int experts = options_.all() ? number : kRank;
    ModelWeights weights = RandomWeights(*rank.backend, config_, layout_, experts);
    for (const LayerWeights& layer : weights.layers) {
      if (layer.router_bias != nullptr)
        rank.biases.push_back(const_cast<float*>(cuda::AsMatrix(*layer.router_bias).vector()));
    }
    rank.backend->UseGraphs(options_.graphs);
    rank.model =
        std::make_unique<Transformer>(config_, layout_, *rank.backend, std::move(weights), limits_);
    rank.model->NewKvCache(num_pages_);
    rank.backend->MakeLogits(limits_.max_logit_rows, layout_.vocab_per_rank());
  }

  void PrintMemory(const std::vector<int>& devices) const {
    const auto gb = [](int64_t bytes) { return static_cast<double>(bytes) / 1e9; };
    if (options_.all()) {
      const size_t gpus = std::set<int>(devices.begin(), devices.end()).size();
      std::printf("%d ranks on %zu GPUs%s", options_.ranks, gpus,
                  gpus < devices.size() ? ", which they share: times mean nothing" : "");
    } else {
      std::printf("one rank of %d, communication excluded", kWorld);
    }
    const Backend::Memory memory = ranks_[0].backend->memory();
    std::printf(
        ": %d layers, %s layout, %s kernels, graphs %s\n"
        "memory of a rank, GB: weights %.1f, cache %.1f (%d tokens), scratch for %d tokens %.1f\n",
        config_.num_layers, options_.experts == ExpertLayout::kExpert ? "expert" : "tensor",
        options_.cuda.kernels == CudaOptions::Kernels::kPortable ? "portable" : "hopper",
        options_.graphs ? "on" : "off", gb(memory.weights), gb(memory.kv_cache),
        num_pages_ * kPageTokens, limits_.max_tokens, gb(memory.workspace + memory.capture));
    std::fflush(stdout);
  }

  // What one way has left behind is not the next one's to start from.
  void Use(const Way& way) {
    way_ = way;
    played_->exchange = way.played;
    size_t group = 0;
    for (const Way& other : options_.ways) {
      if (!way.comm) break;
      group += other.comm.has_value();
      if (other.comm == way.comm) break;
    }
    group_->Use(group);
    OnRanks([this](Rank& rank, int) {
      rank.backend->alone = !way_.comm;
      rank.backend->ForgetGraphs();
      rank.backend->FillCache();
    });
  }

  void Route(Routing routing) {
    const std::vector<double> chosen = Popularity(config_, routing);
    const std::vector<float> bias = BiasFor(chosen, config_.top_k);
    OnRanks([&bias](Rank& rank, int) {
      for (float* layer : rank.biases)
        cuda::CopyIn(layer, bias.data(), bias.size() * sizeof(float));
    });
    std::printf("\n%s routing", kRoutingNames[static_cast<int>(routing)]);
    if (!options_.all()) {
      double here = 0;
      const std::vector<int32_t> slots = layout_.SlotsOf(1, kRank);
      for (size_t e = 0; e < chosen.size(); ++e) here += slots[e] >= 0 ? chosen[e] : 0;
      std::printf(": %.2f of a token's %d experts here on average", here, config_.top_k);
    }
    std::printf("\n");
  }

  // Samples, packed.
  void Prefill(int tokens, bool capture) {
    StepPlan plan;
    plan.num_seqs = (tokens + options_.sample - 1) / options_.sample;
    plan.pages_per_seq = (options_.sample + kPageTokens - 1) / kPageTokens;
    for (int t = 0; t < tokens; ++t) {
      const int position = t % options_.sample;
      plan.positions.push_back(position);
      plan.sequence.push_back(t / options_.sample);
      if (position == options_.sample - 1) AddLogit(plan, t);
    }
    Run(fmt::format("prefill {:6} tokens", tokens), std::move(plan), capture,
        options_.all() ? "tok/s" : "tok/s node equivalent");
  }

  void Decode(int batch, int context, bool capture) {
    StepPlan plan;
    plan.num_seqs = batch;
    plan.pages_per_seq = (context + kPageTokens - 1) / kPageTokens;
    for (int t = 0; t < batch; ++t) {
      plan.positions.push_back(context - 1);
      plan.sequence.push_back(t);
      plan.decodes.push_back(1);
      AddLogit(plan, t);
    }
    Run(fmt::format("decode batch {:4} context {:6}", batch, context), std::move(plan), capture,
        "tok/s");
  }

  static void AddLogit(StepPlan& plan, int row) {
    plan.logit_rows.push_back(row);
    plan.draws.push_back({1.0, 0.95, 1, static_cast<uint64_t>(row), 1, -1});
  }

  // Its own copy for every rank. A rank whose others are played embeds tokens of its own part of
  // the vocabulary: the others' rows would be zeros.
  Plans ForEach(StepPlan plan) const {
    for (int page = 0; page < plan.num_seqs * plan.pages_per_seq; ++page)
      plan.page_table.push_back(page % num_pages_);
    Plans plans;
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      const int part = layout_.vocab_per_rank(), first = way_.comm ? 0 : part * rank,
                ids = way_.comm ? config_.vocab : part;
      plan.ids.clear();
      for (size_t t = 0; t < plan.positions.size(); ++t)
        plan.ids.push_back(first + static_cast<int>(t * 7919 % static_cast<size_t>(ids)));
      plans.push_back(plan);
    }
    return plans;
  }

  void Step(const Plans& plans) {
    const bool sharded = plans[0].num_tokens() >= kShardedFrom;
    OnRanks([&](Rank& rank, int number) {
      rank.model->Forward(plans[static_cast<size_t>(number)], sharded, output_);
    });
  }

  // Milliseconds of a step, median; then a table of rank 0's ops from timed steps.
  void Run(std::string name, StepPlan plan, bool capture, const char* unit) {
    if (capture) {
      plan.boundaries = CapturedBoundaries();
      name += " with capture";
    }
    while (output_.states.size() < plan.boundaries.size()) {
      const size_t count =
          static_cast<size_t>(limits_.max_tokens) * static_cast<size_t>(config_.hidden);
      output_.states.emplace_back(
          static_cast<uint16_t*>(backends_[0]->AllocateHost(count * sizeof(uint16_t))), count);
    }
    const Plans plans = ForEach(std::move(plan));
    std::vector<double> times;
    for (int i = 0; i < options_.repeats + 2; ++i) {
      if (i == 2) cuda::Check(cudaProfilerStart());
      const auto start = std::chrono::steady_clock::now();
      Step(plans);
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      if (i >= 2) times.push_back(took.count());
    }
    cuda::Check(cudaProfilerStop());
    std::sort(times.begin(), times.end());
    const double ms = times[times.size() / 2];
    const int tokens = plans[0].num_tokens();
    std::printf("%-42s %-10s: %8.2f ms, %7.0f %s", name.c_str(), way_.name, ms, tokens / ms * 1e3,
                unit);
    const bool without = !way_.comm && way_.played == Exchange::kNone;
    if (without) without_[name] = ms;
    if (!without) PrintExposed(name, ms);
    if (way_.comm) Compare(name, plans[0]);
    std::printf("\n");
    TimeOps(plans);
  }

  void PrintExposed(const std::string& name, double ms) const {
    const auto without = without_.find(name);
    if (without == without_.end()) return;
    const double exposed = ms - without->second;
    std::printf("; %.2f ms more than without exchanges, %.0f %%", exposed, 100 * exposed / ms);
  }

  // What a step gives does not depend on the carrier. Sequences that share pages of the cache write
  // over each other, nothing can be said of them.
  void Compare(const std::string& name, const StepPlan& plan) {
    if (plan.num_seqs * plan.pages_per_seq > num_pages_) return;
    Xxh3 digest;
    for (size_t i = 0; i < plan.logit_rows.size(); ++i) {
      const ChosenToken& token = output_.chosen[i];
      if (!std::isfinite(token.logprob)) {
        std::printf("; NOT FINITE");
        same_ = false;
      }
      digest.Update(std::as_bytes(std::span(&token.id, 1)));
      digest.Update(std::as_bytes(std::span(&token.logprob, 1)));
    }
    const auto rows = static_cast<size_t>(plan.num_tokens());
    for (size_t i = 0; i < plan.boundaries.size(); ++i)
      digest.Update(
          std::as_bytes(output_.states[i].first(rows * static_cast<size_t>(config_.hidden))));
    const auto [first, is_new] = results_.emplace(name, digest.Digest());
    if (is_new) return;
    const bool equal = first->second == digest.Digest();
    std::printf("; %s", equal ? "the same bits" : "OTHER BITS than by the first carrier");
    same_ = same_ && equal;
  }

  void TimeOps(const Plans& plans) {
    const auto set = [this](bool timed) {
      OnRanks([timed](Rank& rank, int) {
        rank.backend->ForgetGraphs();
        rank.backend->timed = timed;
      });
    };
    set(true);
    // The second time may be as a graph; its events are nodes of it.
    for (int i = 0; i < 2; ++i) {
      for (const Rank& rank : ranks_) rank.backend->milliseconds.clear();
      Step(plans);
    }
    set(false);
    double sum = 0;
    std::printf("    ");
    for (const auto& [op, ms] : ranks_[0].backend->milliseconds) {
      std::printf("%s %.2f  ", op.c_str(), ms);
      sum += ms;
    }
    std::printf("(timed op by op: %.2f)\n", sum);
    std::fflush(stdout);
  }
  std::vector<int> CapturedBoundaries() const {
    const std::set<int> boundaries = {std::min(2, config_.num_layers), config_.num_layers / 2,
                                      std::max(0, config_.num_layers - 3), config_.num_layers};
    return {boundaries.begin(), boundaries.end()};
  }

  const Options options_;
  const ModelConfig config_;
  const ParallelLayout layout_;
  const std::shared_ptr<StandInGroup> played_;
  const int num_pages_;
  ModelLimits limits_;
  std::shared_ptr<SwitchedGroup> group_;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<Rank> ranks_;
  std::unique_ptr<RankGroup> threads_;
  StepOutput output_;
  Way way_ = kWays[0];
  std::map<std::string, double> without_;    // ms by step
  std::map<std::string, uint64_t> results_;  // digests by step, of the first carrier
  bool same_ = true;
};

// What this very machine gives in this run: cuBLASLt at 8192³ in bursts, and a device copy.
void Ceilings() {
  cuda::Gemm gemm;
  cuda::Stream stream;
  constexpr int kN = 8192;
  const auto make = [](size_t count, uint32_t seed) {
    cuda::DeviceBuffer buffer(count * sizeof(cuda::bf16));
    FillNormal(buffer.as<cuda::bf16>(), static_cast<int64_t>(count), 1, seed);
    return buffer;
  };
  const size_t size = size_t{kN} * kN;
  const auto a = make(size, 1), b = make(size, 2), c = make(size, 3);
  const auto from = make(size_t{1} << 31, 4), to = make(size_t{1} << 31, 5);
  cuda::Check(cudaDeviceSynchronize());
  const auto time = [&](int repeats, const auto& launch) {
    launch();
    cuda::Check(cudaStreamSynchronize(stream.get()));
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) launch();
    cuda::Check(cudaStreamSynchronize(stream.get()));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
           repeats;
  };
  const cuda::GemmParams product{
      a.as<cuda::bf16>(), kN, b.as<cuda::bf16>(), kN, c.as<cuda::bf16>(), kN, kN, kN, kN};
  const auto multiply = [&] { gemm.Run(product, stream.get()); };
  const double burst = time(10, multiply), sustained = time(1000, multiply);
  const double copy = time(10, [&] {
    cuda::Check(cudaMemcpyAsync(to.as<void>(), from.as<void>(), from.size(),
                                cudaMemcpyDeviceToDevice, stream.get()));
  });
  const double flop = 2.0 * kN * kN * kN;
  std::printf("ceilings: 8192^3 bf16 %.0f TF in a burst, %.0f sustained; device copy %.2f TB/s\n",
              flop / burst / 1e12, flop / sustained / 1e12,
              2 * static_cast<double>(from.size()) / copy / 1e12);
}

// Those that the text names.
template <typename T, size_t kCount>
std::vector<T> Named(const std::string& text, const char* const (&names)[kCount]) {
  std::vector<T> values;
  for (size_t i = 0; i < kCount; ++i) {
    if (text.find(names[i]) != std::string::npos) values.push_back(static_cast<T>(i));
  }
  return values;
}

// The ways to go for these ranks: a carrier needs all of them, a played one a lone rank.
std::vector<Way> WaysOf(const std::string& text, const Options& options) {
  std::vector<Way> ways;
  for (const Way& way : kWays) {
    if (text.find(way.name) == std::string::npos) continue;
    const bool fits = way.comm ? options.all() : !options.all() || way.played == Exchange::kNone;
    const char* missing = nullptr;
    if (!fits) missing = way.comm ? "needs --ranks" : "is of one rank, without --ranks";
    if (fits && way.comm == CudaOptions::Comm::kNccl) {
      if (!HasNccl()) missing = "this build has no NCCL";
      if (options.ranks > NumGpus()) missing = "NCCL has no two ranks on a GPU";
    }
    if (missing == nullptr) {
      ways.push_back(way);
    } else {
      std::printf("--exchange %s left out: %s\n", way.name, missing);
    }
  }
  return ways;
}

int Main(int argc, char** argv) {
  // Multicast can put the GPUs of a shared host out of service.
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  Options options;
  std::string exchange = kWays[0].name;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--ranks") options.ranks = std::atoi(argv[i + 1]);
    if (name == "--layers") options.layers = std::atoi(argv[i + 1]);
    if (name == "--repeats") options.repeats = std::atoi(argv[i + 1]);
    if (name == "--halved-from") options.halved_from = std::atoi(argv[i + 1]);
    if (name == "--experts" && value == "tensor") options.experts = ExpertLayout::kTensor;
    if (name == "--kernels" && value == "portable")
      options.cuda.kernels = CudaOptions::Kernels::kPortable;
    if (name == "--kernels" && value == "hopper")
      options.cuda.kernels = CudaOptions::Kernels::kHopper;
    if (name == "--prefill") options.prefill = Numbers(argv[i + 1]);
    if (name == "--sample") options.sample = std::max(1, std::atoi(argv[i + 1]));
    if (name == "--decode") options.decode = Numbers(argv[i + 1]);
    if (name == "--context") options.context = Numbers(argv[i + 1]);
    if (name == "--cache") options.cache = std::max(kPageTokens, std::atoi(argv[i + 1]));
    if (name == "--graphs") options.graphs = value == "on";
    if (name == "--exchange") exchange = value;
    if (name == "--routing") options.routing = Named<Routing>(value, kRoutingNames);
  }
  options.ways = WaysOf(exchange, options);
  const auto layout =
      ParallelLayout::Make(KimiK25(options.layers), options.world(), options.experts, true);
  OrEnd(layout.status());
  const int gpus = NumGpus();
  if (gpus == 0) OrEnd(absl::FailedPreconditionError("no GPU can be used here"));
  cuda::Check(cudaSetDevice(0));
  Ceilings();
  const bool played = std::any_of(options.ways.begin(), options.ways.end(),
                                  [](const Way& way) { return way.played != Exchange::kNone; });
  // Two ranks play the others to each other.
  const int ranks = options.all() ? options.ranks : played ? std::min(gpus, 2) : 1;
  std::vector<int> devices;
  for (int rank = 0; rank < ranks; ++rank) devices.push_back(rank % gpus);
  return Bench(options, devices, *layout).Measure() ? 0 : 1;
}

}  // namespace
}  // namespace statetap::bench

int main(int argc, char** argv) { return statetap::bench::Main(argc, argv); }
