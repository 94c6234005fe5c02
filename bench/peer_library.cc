// libstatetap_peers.so: one layer's routed FFN and attention of prompts behind a C interface, so
// that a script can time them beside other libraries' kernels in one process. Pointers are of the
// current device; everything is enqueued on `stream` (a cudaStream_t) and may be captured in a
// graph.
#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/prefill.h"
#include "extractor/backend/cuda/rank.h"

namespace statetap::bench {
namespace {

using cuda::bf16;
using cuda::Check;

constexpr int kModelExperts = 384, kMostTokens = 32768, kTopK = 8;

class RoutedLayer {
 public:
  RoutedLayer(int experts, int hidden, int width)
      : backend_(0, 0, std::make_shared<cuda::PeerGroup>(1), {}) {
    ExpertsShape shape;
    shape.num_slots = experts;
    shape.hidden = hidden;
    shape.width = width;
    for (int e = 0; e < kModelExperts; ++e) shape.slot_of_expert.push_back(e < experts ? e : -1);
    experts_ = backend_.NewExperts(shape);
    Backend::Limits limits;
    limits.max_tokens = kMostTokens;
    limits.hidden = hidden;
    limits.max_width = width;
    limits.num_experts = kModelExperts;
    limits.top_k = kTopK;
    backend_.PlanScratch(limits);
  }
  // rows of each expert's part of `device`, row_bytes each, experts expert_bytes apart.
  void Fill(const void* device, Projection projection, bool scales, int rows, size_t row_bytes,
            size_t expert_bytes) {
    std::vector<std::byte> host(static_cast<size_t>(rows) * row_bytes);
    const int experts = cuda::AsExperts(*experts_).shape().num_slots;
    for (int e = 0; e < experts; ++e) {
      Check(
          cudaMemcpy(host.data(),
                     static_cast<const std::byte*>(device) + static_cast<size_t>(e) * expert_bytes,
                     host.size(), cudaMemcpyDeviceToHost));
      experts_->Fill(ExpertPart(e, projection, scales), 0, rows, host.data(),
                     static_cast<int64_t>(row_bytes));
    }
  }
  void FinishWeights() { backend_.FinishWeights(); }
  void Run(const void* x, const int* experts, const float* weights, int tokens, int top_k,
           void* out, cudaStream_t stream) {
    begin_.Record(stream);
    begin_.Hold(backend_.stream());
    Step step;
    step.num_tokens = tokens;
    step.own = {0, tokens};
    backend_.RoutedFfn(step, {x, experts, weights, *experts_, top_k, out});
    end_.Record(backend_.stream());
    end_.Hold(stream);
  }

 private:
  cuda::CudaBackend backend_;
  std::unique_ptr<Weight> experts_;
  cuda::Event begin_, end_;
};

}  // namespace
}  // namespace statetap::bench

extern "C" {

// w13: int32 [experts, 2 · inter, hidden / 8], gate rows, then up rows; s13: bf16 [experts, 2 ·
// inter, hidden / 32]; w2: int32 [experts, hidden, inter / 8]; s2: bf16 [experts, hidden, inter /
// 32]. Copies them.
void* statetap_ffn_create(int experts, int hidden, int inter, const void* w13, const void* s13,
                          const void* w2, const void* s2) {
  using statetap::Projection;
  auto layer = std::make_unique<statetap::bench::RoutedLayer>(experts, hidden, inter);
  const auto h = static_cast<size_t>(hidden), i = static_cast<size_t>(inter);
  const auto* words = static_cast<const std::byte*>(w13);
  const auto* scales = static_cast<const std::byte*>(s13);
  layer->Fill(words, Projection::kGate, false, inter, h / 2, i * h);
  layer->Fill(words + i * h / 2, Projection::kUp, false, inter, h / 2, i * h);
  layer->Fill(scales, Projection::kGate, true, inter, h / 16, i * h / 8);
  layer->Fill(scales + i * h / 16, Projection::kUp, true, inter, h / 16, i * h / 8);
  layer->Fill(w2, Projection::kDown, false, hidden, i / 2, h * i / 2);
  layer->Fill(s2, Projection::kDown, true, hidden, i / 16, h * i / 16);
  layer->FinishWeights();
  return layer.release();
}

// x, out: bf16 [tokens, hidden]; ids ≥ experts are other ranks'.
void statetap_ffn_run(void* ffn, const void* x, const int* ids, const float* weights, int tokens,
                      int top_k, void* out, void* stream) {
  static_cast<statetap::bench::RoutedLayer*>(ffn)->Run(x, ids, weights, tokens, top_k, out,
                                                       static_cast<cudaStream_t>(stream));
}

// Sequences of `length` tokens, packed: queries bf16 [n, heads, 192], expanded bf16 [n, heads, 256]
// (keys' first 128 columns, values), latents bf16 [n, 512 + 64] (keys' last 64 columns behind 512),
// out bf16 [n, heads, 128].
void statetap_attend_prompts(const void* queries, const void* expanded, const void* latents,
                             int num_seqs, int length, int heads, float scale, int portable,
                             void* out, void* stream) {
  using statetap::cuda::bf16;
  using Tiles = std::pair<std::unique_ptr<statetap::cuda::DeviceBuffer>, int>;
  static std::map<std::pair<int, int>, Tiles> made;
  static statetap::cuda::DeviceBuffer taken(2 * sizeof(int32_t), /*zeroed=*/true);
  Tiles& tiles = made[{num_seqs, length}];
  if (tiles.first == nullptr) {
    std::vector<statetap::cuda::PromptTile> list;
    constexpr int kTile = statetap::cuda::kPromptTileTokens;
    for (int s = 0; s < num_seqs; ++s) {
      for (int first = 0; first < length; first += kTile)
        list.push_back({s * length + first, std::min(kTile, length - first), first, s * length});
    }
    statetap::cuda::OrderPromptTiles(list, static_cast<size_t>(heads) * 256 * sizeof(bf16));
    tiles.first = std::make_unique<statetap::cuda::DeviceBuffer>(list.size() * sizeof(list[0]));
    statetap::cuda::CopyIn(tiles.first->as<void>(), list.data(), list.size() * sizeof(list[0]));
    tiles.second = static_cast<int>(list.size());
  }
  const statetap::cuda::AttendPromptsParams p{static_cast<const bf16*>(queries),
                                              static_cast<const bf16*>(expanded),
                                              static_cast<const bf16*>(latents),
                                              tiles.first->as<statetap::cuda::PromptTile>(),
                                              tiles.second,
                                              heads,
                                              128,
                                              64,
                                              128,
                                              512,
                                              scale,
                                              static_cast<bf16*>(out),
                                              taken.as<int32_t>()};
  const int64_t rows = int64_t{num_seqs} * length;
  if (portable != 0) {
    statetap::cuda::AttendPrompts(p, static_cast<cudaStream_t>(stream));
  } else {
    statetap::cuda::HopperAttendPrompts(p, statetap::cuda::MakePromptMaps(p, rows, rows),
                                        static_cast<cudaStream_t>(stream));
  }
}

}  // extern "C"
