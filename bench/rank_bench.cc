// One rank of eight of Kimi-K2.5 at full size on one GPU: all 61 layers, random INT4 experts and
// bf16 weights made on the device, real routing, the real layer loop. Communication is left out:
// the rank norms its own rows, the rows of the others stay as they are, and their choice of experts
// is its own, repeated; tokens are drawn from the whole vocabulary, seven eighths of whose logits
// are random. Rates are node equivalents: the tokens of a step over the rank's time for it.
//
// --exchange: what prompts cost with the exchanges of eight ranks beside the same without, two
// ranks on two GPUs that play the others to each other (stand_in_group.h); on one GPU the rank
// copies its own rows.
//
// Routing: `uniform`; `zipf`, expert i of the order of popularity chosen 1/i as often as the first;
// `hot`, one expert of this rank chosen four times as often as the others. Skew is made by the
// router's bias, so that the router does its real work.
//
//   rank_bench [--layers N] [--experts expert|tensor] [--kernels auto|portable|hopper]
//              [--routing uniform,zipf,hot] [--prefill 8192,…] [--decode 1,16,…]
//              [--context 2048,…] [--repeats N] [--graphs on|off] [--exchange
//              none,serial,pieces,overlapped]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "bench/numbers.h"
#include "bench/random_fill.h"
#include "bench/stand_in_group.h"
#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/rank.h"
#include "extractor/model/transformer.h"

namespace statetap::bench {
namespace {

constexpr int kWorld = 8, kRank = 3;
constexpr int kShardedFrom = 257;  // as the engine
constexpr int kSampleTokens = 2048;

ModelConfig KimiK25(int layers) {
  ModelConfig c;
  c.hidden = 7168;
  c.num_layers = layers;
  c.num_heads = 64;
  c.q_lora_rank = 1536;
  c.kv_lora_rank = 512;
  c.nope_dim = 128;
  c.rope_dim = 64;
  c.v_dim = 128;
  c.dense_width = 18432;
  c.expert_width = 2048;
  c.num_experts = 384;
  c.top_k = 8;
  c.num_shared_experts = 1;
  c.num_dense_layers = 1;
  c.routed_scaling = 2.827;
  c.rms_norm_eps = 1e-5;
  c.rope = {50000, true, 64, 4096, 32, 1, 1, 1};
  c.max_positions = 262144;
  c.vocab = 163840;
  return c;
}

// A rank with the experts of rank kRank, without the others. Times each op by events if asked.
class LoneRank final : public cuda::CudaBackend {
 public:
  using CudaBackend::CudaBackend;

  // Nobody times zeros.
  void FillCache() {
    FillNormal(cache().as<cuda::bf16>(), static_cast<int64_t>(cache().size() / sizeof(cuda::bf16)),
               1, 77);
  }
  // As many logits as all ranks have, random ones for now.
  void MakeLogits(int max_rows, int vocab_per_rank) {
    const int64_t count = int64_t{kWorld} * max_rows * vocab_per_rank;
    std::vector<float> values(static_cast<size_t>(vocab_per_rank));
    std::mt19937 engine(5);
    std::normal_distribution<float> normal;
    logits_ = cuda::DeviceBuffer(static_cast<size_t>(count) * sizeof(float));
    for (int row = 0; row < kWorld * max_rows; ++row) {
      for (float& value : values) value = normal(engine);
      cuda::CopyIn(logits_.as<float>() + int64_t{row} * vocab_per_rank, values.data(),
                   values.size() * sizeof(float));
    }
  }

  bool timed = false;
  std::map<std::string, double> milliseconds;  // by op, of all timed steps

  Step Begin(const StepPlan& plan, bool sharded) override {
    sharded_ = sharded;
    return CudaBackend::Begin(plan, sharded);
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
  void Gather(const Step& s, const GatherParams& p) override {
    Timed("gather", [&] { CudaBackend::Gather(s, p); });
  }
  void Attention(const Step& s, const AttentionParams& p) override {
    Timed("attention", [&] { CudaBackend::Attention(s, p); });
  }
  void Route(const Step& s, const RouteParams& p) override {
    Timed("router", [&] { CudaBackend::Route(s, p); });
  }
  void RoutedFfn(const Step& s, const RoutedFfnParams& p) override {
    Timed("routed experts", [&] { CudaBackend::RoutedFfn(s, p); });
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

WeightPtr RandomMatrix(Backend& backend, int64_t rows, int64_t cols, float scale = 1) {
  static uint32_t seed = 1;  // ranks are made one after the other
  auto weight = backend.NewMatrix(rows, cols, DType::kBf16);
  const auto& matrix = cuda::AsMatrix(*weight);
  FillNormal(const_cast<cuda::bf16*>(matrix.data()), rows * cols,
             scale / std::sqrt(static_cast<float>(cols)), ++seed);
  return weight;
}

WeightPtr Vector(Backend& backend, int64_t cols, float value) {
  auto weight = backend.NewMatrix(1, cols, DType::kBf16);
  FillValue(const_cast<float*>(cuda::AsMatrix(*weight).vector()), cols, value);
  return weight;
}

ModelWeights RandomWeights(Backend& backend, const ModelConfig& c, const ParallelLayout& layout) {
  ModelWeights w;
  w.embed = RandomMatrix(backend, layout.vocab_per_rank(), c.hidden, 80);
  w.lm_head = RandomMatrix(backend, layout.vocab_per_rank(), c.hidden);
  w.norm = Vector(backend, c.hidden, 1);
  const int heads = layout.heads();
  for (int layer = 0; layer < c.num_layers; ++layer) {
    LayerWeights l;
    l.input_norm = Vector(backend, c.hidden, 1);
    l.post_attention_norm = Vector(backend, c.hidden, 1);
    l.q_a = RandomMatrix(backend, c.q_lora_rank, c.hidden);
    l.q_a_norm = Vector(backend, c.q_lora_rank, 1);
    l.q_b = RandomMatrix(backend, heads * c.qk_dim(), c.q_lora_rank);
    l.kv_a = RandomMatrix(backend, c.latent_dim(), c.hidden);
    l.kv_a_norm = Vector(backend, c.kv_lora_rank, 1);
    l.kv_b = RandomMatrix(backend, heads * (c.nope_dim + c.v_dim), c.kv_lora_rank);
    l.o = RandomMatrix(backend, c.hidden, heads * c.v_dim);
    const int width = c.IsMoe(layer) ? layout.shared_width() : layout.dense_width();
    l.dense = {RandomMatrix(backend, width, c.hidden), RandomMatrix(backend, width, c.hidden),
               RandomMatrix(backend, c.hidden, width)};
    if (c.IsMoe(layer)) {
      l.router = RandomMatrix(backend, c.num_experts, c.hidden);
      l.router_bias = Vector(backend, c.num_experts, 0);
      ExpertsShape shape;
      shape.num_slots = layout.num_slots();
      shape.hidden = c.hidden;
      shape.width = layout.expert_width();
      shape.slot_of_expert = layout.SlotsOf(layer, kRank);
      l.experts = backend.NewExperts(shape);
      const auto& experts = cuda::AsExperts(*l.experts);
      FillBlocks(experts.memory(), shape.num_slots * experts.slot_bytes() / cuda::kInt4BlockBytes,
                 1 / (4.61f * 84), static_cast<uint32_t>(layer));
    }
    w.layers.push_back(std::move(l));
  }
  cuda::Check(cudaDeviceSynchronize());
  return w;
}

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
  int layers = 61;
  ExpertLayout experts = ExpertLayout::kExpert;
  CudaOptions cuda;
  std::vector<int> prefill = {8192, 16384}, decode = {1, 16, 64, 256}, context = {2048};
  std::vector<Routing> routing = {Routing::kUniform};
  std::vector<Exchange> exchange = {Exchange::kNone};
  bool graphs = true;
  int repeats = 5;
};

int Largest(const std::vector<int>& numbers) {
  return numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end());
}

class Bench {
 public:
  Bench(const Options& options, int rank, int device, std::shared_ptr<StandInGroup> group)
      : options_(options),
        rank_(rank),
        config_(KimiK25(options.layers)),
        layout_(*ParallelLayout::Make(config_, kWorld, options.experts, true)),
        group_(std::move(group)),
        backend_(rank, device, group_, options.cuda) {
    const double before = Used();
    ModelWeights weights = RandomWeights(backend_, config_, layout_);
    const double weights_bytes = Used() - before;
    for (const LayerWeights& layer : weights.layers) {
      if (layer.router_bias != nullptr)
        biases_.push_back(const_cast<float*>(cuda::AsMatrix(*layer.router_bias).vector()));
    }
    backend_.UseGraphs(options.graphs);
    ModelLimits limits;
    limits.max_tokens = std::max({512, Largest(options.prefill), Largest(options.decode)});
    limits.max_context = 65536;
    limits.max_logit_rows = 64;
    limits.num_pages = kPages;
    limits.inner_eps = 1e-6;
    model_ = std::make_unique<Transformer>(config_, layout_, backend_, std::move(weights), limits);
    output_.chosen.resize(static_cast<size_t>(limits.max_tokens));
    max_tokens_ = limits.max_tokens;
    backend_.FillCache();
    backend_.MakeLogits(limits.max_logit_rows, layout_.vocab_per_rank());
    const auto cache =
        static_cast<double>(Transformer::PageBytes(config_, backend_.activation_bytes()) * kPages);
    if (rank_ != 0) return;
    std::printf(
        "one rank of %d, communication excluded: %d layers, %s layout, %s kernels, graphs %s\n"
        "memory, GB: weights %.1f, cache %.1f (%d tokens), scratch for %d tokens and the rest "
        "%.1f\n",
        kWorld, config_.num_layers, options.experts == ExpertLayout::kExpert ? "expert" : "tensor",
        options.cuda.kernels == CudaOptions::Kernels::kPortable ? "portable" : "hopper",
        options.graphs ? "on" : "off", weights_bytes / 1e9, cache / 1e9, kPages * kPageTokens,
        max_tokens_, (Used() - before - weights_bytes - cache) / 1e9);
  }

  // Every routing, exchange, size; beside the other ranks' threads.
  void Measure() {
    for (const Routing routing : options_.routing) {
      Route(routing);
      for (const Exchange exchange : options_.exchange) {
        Use(exchange);
        const bool alone = exchange == Exchange::kNone;
        for (const bool capture : {false, true}) {
          if (capture && !alone) continue;
          for (const int tokens : options_.prefill) Prefill(tokens, capture);
          for (const int context : options_.context) {
            for (const int batch : options_.decode) {
              if (alone) Decode(batch, context, capture);
            }
          }
        }
      }
    }
  }

 private:
  static constexpr int kPages = 4096;

  void Use(Exchange exchange) {
    group_->Slowest(rank_, 0);
    if (rank_ == 0) group_->exchange = exchange;
    group_->Slowest(rank_, 0);
  }

  void Route(Routing routing) {
    const std::vector<double> chosen = Popularity(config_, routing);
    const std::vector<float> bias = BiasFor(chosen, config_.top_k);
    for (float* layer : biases_) cuda::CopyIn(layer, bias.data(), bias.size() * sizeof(float));
    double here = 0;
    const std::vector<int32_t> slots = layout_.SlotsOf(1, kRank);
    for (size_t e = 0; e < chosen.size(); ++e) here += slots[e] >= 0 ? chosen[e] : 0;
    if (rank_ == 0) {
      std::printf("\n%s routing: %.2f of a token's %d experts here on average\n",
                  kRoutingNames[static_cast<int>(routing)], here, config_.top_k);
    }
  }

  // Samples of kSampleTokens, packed.
  void Prefill(int tokens, bool capture) {
    StepPlan plan;
    plan.num_seqs = (tokens + kSampleTokens - 1) / kSampleTokens;
    plan.pages_per_seq = kSampleTokens / kPageTokens;
    for (int page = 0; page < plan.num_seqs * plan.pages_per_seq; ++page)
      plan.page_table.push_back(page % kPages);
    for (int t = 0; t < tokens; ++t) {
      AddToken(plan, t % kSampleTokens, t / kSampleTokens);
      if (t % kSampleTokens == kSampleTokens - 1) AddLogit(plan, t);
    }
    if (capture) plan.boundaries = CapturedBoundaries();
    const double ms = Run(plan);
    if (rank_ != 0) return;
    std::printf("prefill %6d tokens%s", tokens, capture ? " with capture" : "             ");
    if (group_->exchange != Exchange::kNone)
      std::printf(", exchange %s", kExchangeNames[static_cast<int>(group_->exchange)]);
    std::printf(": %8.2f ms, %7.0f tok/s node equivalent\n", ms, tokens / ms * 1e3);
    PrintOps();
  }

  void Decode(int batch, int context, bool capture) {
    StepPlan plan;
    if (capture) plan.boundaries = CapturedBoundaries();
    plan.num_seqs = batch;
    plan.pages_per_seq = (context + kPageTokens - 1) / kPageTokens;
    for (int page = 0; page < plan.num_seqs * plan.pages_per_seq; ++page)
      plan.page_table.push_back(page % kPages);
    for (int t = 0; t < batch; ++t) {
      AddToken(plan, context - 1, t);
      plan.decodes.push_back(1);
      AddLogit(plan, t);
    }
    const double ms = Run(plan);
    if (rank_ != 0) return;
    std::printf("decode batch %4d context %6d%s: %7.2f ms a step, %7.0f tok/s\n", batch, context,
                capture ? " with capture" : "             ", ms, batch / ms * 1e3);
    PrintOps();
  }

  void AddToken(StepPlan& plan, int position, int sequence) {
    const int first = layout_.vocab_per_rank() * 0;  // rank 0 of the lone group holds these ids
    plan.ids.push_back(first + static_cast<int>(plan.ids.size() * 7919 % 20480));
    plan.positions.push_back(position);
    plan.sequence.push_back(sequence);
  }
  static void AddLogit(StepPlan& plan, int row) {
    plan.logit_rows.push_back(row);
    plan.draws.push_back({1.0, 0.95, 1, static_cast<uint64_t>(row), 1, -1});
  }

  // Milliseconds of a step, median, of the slower rank; then a table of ops from timed steps.
  double Run(const StepPlan& plan) {
    const bool sharded = plan.num_tokens() >= kShardedFrom;
    while (output_.states.size() < plan.boundaries.size()) {
      const size_t count = static_cast<size_t>(max_tokens_) * static_cast<size_t>(config_.hidden);
      output_.states.emplace_back(
          static_cast<uint16_t*>(backend_.AllocateHost(count * sizeof(uint16_t))), count);
    }
    std::vector<double> times;
    for (int i = 0; i < options_.repeats + 2; ++i) {
      group_->Slowest(rank_, 0);
      const auto start = std::chrono::steady_clock::now();
      model_->Forward(plan, sharded, output_);
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      const double slowest = group_->Slowest(rank_, took.count());
      if (i >= 2) times.push_back(slowest);
    }
    std::sort(times.begin(), times.end());
    // The second time may be as a graph; its events are nodes of it.
    backend_.ForgetGraphs();
    backend_.timed = true;
    for (int i = 0; i < 2; ++i) {
      backend_.milliseconds.clear();
      model_->Forward(plan, sharded, output_);
    }
    backend_.timed = false;
    backend_.ForgetGraphs();
    return times[times.size() / 2];
  }
  void PrintOps() const {
    double sum = 0;
    std::printf("    ");
    for (const auto& [name, ms] : backend_.milliseconds) {
      std::printf("%s %.2f  ", name.c_str(), ms);
      sum += ms;
    }
    std::printf("(timed op by op: %.2f)\n", sum);
    std::fflush(stdout);
  }
  std::vector<int> CapturedBoundaries() const {
    return {2, config_.num_layers / 2, config_.num_layers - 3, config_.num_layers};
  }
  static double Used() {
    size_t free, total;
    cuda::Check(cudaMemGetInfo(&free, &total));
    return static_cast<double>(total - free);
  }

  const Options options_;
  const int rank_;
  const ModelConfig config_;
  const ParallelLayout layout_;
  const std::shared_ptr<StandInGroup> group_;
  LoneRank backend_;
  std::unique_ptr<Transformer> model_;
  StepOutput output_;
  int max_tokens_ = 0;
  std::vector<float*> biases_;  // of the routers
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

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--layers") options.layers = std::atoi(argv[i + 1]);
    if (name == "--repeats") options.repeats = std::atoi(argv[i + 1]);
    if (name == "--experts" && value == "tensor") options.experts = ExpertLayout::kTensor;
    if (name == "--kernels" && value == "portable")
      options.cuda.kernels = CudaOptions::Kernels::kPortable;
    if (name == "--kernels" && value == "hopper")
      options.cuda.kernels = CudaOptions::Kernels::kHopper;
    if (name == "--prefill") options.prefill = Numbers(argv[i + 1]);
    if (name == "--decode") options.decode = Numbers(argv[i + 1]);
    if (name == "--context") options.context = Numbers(argv[i + 1]);
    if (name == "--graphs") options.graphs = value == "on";
    if (name == "--exchange") options.exchange = Named<Exchange>(value, kExchangeNames);
    if (name == "--routing") options.routing = Named<Routing>(value, kRoutingNames);
  }
  cuda::Check(cudaSetDevice(0));
  Ceilings();
  const bool exchanges = options.exchange != std::vector{Exchange::kNone};
  const std::vector<int> devices =
      exchanges && NumGpus() > 1 ? std::vector<int>{0, 1} : std::vector<int>{0};
  const auto group = std::make_shared<StandInGroup>(kWorld, devices);
  std::vector<std::unique_ptr<Bench>> ranks;
  for (const int device : devices) {
    cuda::Check(cudaSetDevice(device));
    ranks.push_back(std::make_unique<Bench>(options, device, device, group));
  }
  std::vector<std::thread> threads;
  for (const int device : devices) {
    threads.emplace_back([&, device] {
      cuda::Check(cudaSetDevice(device));
      ranks[static_cast<size_t>(device)]->Measure();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace
}  // namespace statetap::bench

int main(int argc, char** argv) { return statetap::bench::Main(argc, argv); }
