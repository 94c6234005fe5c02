// A rank's router, experts and dense FFN.
#include <algorithm>

#include "extractor/backend/cuda/rank.h"
#include "extractor/backend/cuda/router.h"
#include "extractor/backend/cuda/rows.h"

namespace statetap::cuda {
namespace {

// Rows of an expert, expected: so few that mma.sync is faster, as wgmma loads weights from
// registers for 30 cycles whatever the width.
constexpr int kFewExpected = 6;
constexpr int64_t kNear = int64_t{1} << 30;  // values between two matrices
// Of a half's first product, by RoutedStage: beside each part as much travels as it takes time.
constexpr int kGateUpParts[] = {0, 40, 55, 100};
constexpr int kNarrowRows = 44;  // of an expert, expected: few have more than a narrow tile holds

}  // namespace

// In gate_up_: silu(gate x) · (up x) of the first `rows` rows.
StreamProductParams CudaBackend::GateAndUp(const bf16* x, int hidden, const Weight& gate,
                                           const Weight& up, int rows) const {
  StreamProductParams product{};
  product.x = x;
  product.x_stride = product.w_stride = product.k = hidden;
  product.w = AsMatrix(gate).data();
  product.w2 = AsMatrix(up).data();
  product.y = gate_up_.as<bf16>();
  product.n = static_cast<int>(AsMatrix(gate).rows());
  product.y_stride = product.n;
  product.m = rows;
  product.epilogue = Epilogue::kSwiGlu;
  return product;
}

void CudaBackend::Route(const Step& step, const RouteParams& p) {
  if (replays_) return;
  const auto* x = static_cast<const bf16*>(p.x);
  auto* logits = router_logits_.as<float>();
  RowRange rest = step.own;
  const int num_decode_rows = Of(step).num_decode_rows;
  if (!step.sharded && p.shared_gate != nullptr && num_decode_rows > 0) {
    StreamProductParams router{};
    router.x = x;
    router.x_stride = router.w_stride = router.k = p.hidden;
    router.w = AsMatrix(p.gate).data();
    router.y = logits;
    router.y_stride = router.n = p.num_experts;
    router.m = num_decode_rows;
    router.epilogue = Epilogue::kFloat;
    const StreamProductParams shared =
        GateAndUp(x, p.hidden, *p.shared_gate, *p.shared_up, num_decode_rows);
    if (Streamable(router) && Streamable(shared)) {
      StreamProductBoth(router, shared, stream_workspace_, stream());
      shared_begun_ = true;
      rest = {num_decode_rows, step.num_tokens - num_decode_rows};
    }
  }
  const int64_t done = rest.begin - step.own.begin;
  Multiply(step, x + done * p.hidden, p.hidden, rest, p.gate, logits + done * p.num_experts,
           p.num_experts, Phase::kOwnRows, /*fp32_out=*/true);
  ChooseExperts(
      {router_logits_.as<float>(), AsMatrix(p.bias).vector(), step.own.count, p.num_experts,
       p.top_k, p.num_groups, p.top_groups, p.normalise, p.scaling, p.experts, p.weights},
      stream());
}

const RowMaps& CudaBackend::MapsOf(const bf16* x, int columns) {
  for (const MapsOfRows& made : row_maps_) {
    if (made.x == x && made.columns == columns) return made.maps;
  }
  const int64_t rows = int64_t{limits_.max_tokens} * limits_.top_k;
  row_maps_.push_back({x, columns, MakeRowMaps(x, rows, columns)});
  return row_maps_.back().maps;
}

void CudaBackend::RoutedFfnStage(const Step& step, const RoutedFfnParams& p, RoutedStage stage) {
  if (replays_) return;
  Arrive(step);
  if (stage == RoutedStage::kSum) return SumExpertRows(SumOf(p, {0, step.num_tokens}), stream());
  const DeviceExperts& experts = AsExperts(p.slots);
  const ExpertBlocks& blocks = experts.blocks();
  const auto num_experts = static_cast<int>(experts.shape().slot_of_expert.size());
  const bool by_hopper = hopper_ && experts.format() == Format::kInt4;
  // About the rows that an expert gets.
  const int expected = CeilDiv(step.num_tokens * p.top_k, num_experts);
  const bool few = by_hopper && expected <= kFewExpected;
  int tile_rows = experts.format() == Format::kInt4 ? 128 : 64;
  // Hopper's tiles are as wide as they need anyway.
  if (by_hopper) tile_rows = expected <= kNarrowRows ? kHopperNarrowRows : kHopperTileRows;
  if (few) tile_rows = step.num_tokens <= 8 ? 8 : kFewRows;
  while (!by_hopper && tile_rows > 16 && tile_rows / 2 >= expected) tile_rows /= 2;
  SortRowsParams sorted{p.experts, experts.slot_of_expert(),  step.num_tokens,
                        p.top_k,   experts.shape().num_slots, tile_rows};
  sorted.counts = counts_.as<int32_t>();
  sorted.next_row = next_row_.as<int32_t>();
  sorted.token_of_row = token_of_row_.as<int32_t>();
  sorted.row_of = row_of_.as<int32_t>();
  sorted.tiles = row_tiles_.as<TokenTile>();
  sorted.num_tiles = num_row_tiles_.as<int32_t>();
  // The narrowest tile has room for every token of the step, and costs no more for it.
  static_assert(8 * kMaxTopK <= kFewPairs);
  sorted.whole_step = few && step.num_tokens <= 8 &&
                      int64_t{std::min(step.num_tokens * p.top_k, sorted.num_slots)} * tile_rows <=
                          int64_t{limits_.max_tokens} * limits_.top_k;
  const auto multiply = [&](const GroupedProductParams& product, Product which) {
    if (few) {
      FewRowsProduct(product, MapsOf(product.x, product.k), which, tile_rows, stream());
    } else if (by_hopper) {
      HopperProduct(product, MapsOf(product.x, product.k), which, tile_rows, stream());
    } else {
      GroupedProduct(product, which, experts.format(), tile_rows, stream());
    }
  };
  GroupedProductParams product{};
  product.weights = experts.gate_up();
  product.slot_bytes = experts.slot_bytes();
  product.k_blocks = blocks.gate_up_k_blocks();
  product.weight_tiles = blocks.gate_up_tiles();
  product.tiles = row_tiles_.as<TokenTile>();
  product.num_tiles = num_row_tiles_.as<int32_t>();
  // TMA takes rows that lie together; y's memory is free until the second product.
  const bool gathers = by_hopper && !sorted.whole_step;
  if (stage == RoutedStage::kGateUpFirst) {
    SortRows(sorted, stream());
    if (gathers)
      GatherTokens(static_cast<const bf16*>(p.x), sorted, blocks.hidden, y_.as<bf16>(), stream());
  }
  if (stage != RoutedStage::kDown) {
    const auto part = static_cast<size_t>(stage);
    if (step.half >= 0 && by_hopper && !few) {
      product.from_percent = kGateUpParts[part];
      product.to_percent = kGateUpParts[part + 1];
    } else if (stage != RoutedStage::kGateUpFirst) {
      return;
    }
    product.x = gathers ? y_.as<bf16>() : static_cast<const bf16*>(p.x);
    product.from_first_row = sorted.whole_step;
    product.x_stride = product.k = blocks.hidden;
    product.row_of_x = by_hopper ? nullptr : token_of_row_.as<int32_t>();
    product.out = h_.as<bf16>();
    product.out_stride = product.out_columns = blocks.h_columns();
    return multiply(product, Product::kGateUp);
  }
  product.weights = experts.down();
  product.k_blocks = blocks.down_k_blocks();
  product.weight_tiles = blocks.down_tiles();
  product.x = h_.as<bf16>();
  product.x_stride = product.k = blocks.h_columns();
  product.out = y_.as<bf16>();
  product.out_stride = product.out_columns = blocks.hidden;
  multiply(product, Product::kDown);
}

// Of these rows of the step.
SumRowsParams CudaBackend::SumOf(const RoutedFfnParams& p, RowRange rows) const {
  const int hidden = AsExperts(p.slots).blocks().hidden;
  const int64_t first = int64_t{rows.begin} * p.top_k;
  return {y_.as<bf16>(),
          row_of_.as<int32_t>() + first,
          p.experts + first,
          p.weights + first,
          rows.count,
          p.top_k,
          hidden,
          static_cast<bf16*>(p.partial) + int64_t{rows.begin} * hidden};
}

void CudaBackend::DenseFfn(const Step& step, const DenseFfnParams& p) {
  if (replays_) return;
  Arrive(step);
  const auto* x = static_cast<const bf16*>(p.x);
  const StreamProductParams few = GateAndUp(x, p.hidden, p.gate, p.up, Of(step).num_decode_rows);
  RowRange rest{0, step.num_tokens};
  if (Streamable(few)) {
    if (!shared_begun_) StreamProduct(few, stream_workspace_, stream());
    rest = {few.m, step.num_tokens - few.m};
  }
  shared_begun_ = false;
  if (rest.count > 0) {
    const bf16 *gate = AsMatrix(p.gate).data(), *up = AsMatrix(p.up).data();
    const int64_t done = int64_t{rest.begin} * p.width, half = gate_up_.size() / sizeof(bf16) / 2;
    bf16* y = gate_up_.as<bf16>() + done;
    GemmParams product{x + int64_t{rest.begin} * p.hidden,
                       p.hidden,
                       std::min(gate, up),
                       p.hidden,
                       y,
                       p.width,
                       rest.count,
                       p.width,
                       p.hidden};
    // In one launch where they lie near each other, as they do when loaded one behind the other:
    // each alone has tiles for half of the multiprocessors.
    product.w_batch = std::max(gate, up) - std::min(gate, up);
    product.y_batch = half;
    product.batch = product.w_batch < kNear ? 2 : 1;
    MultiplyByPhase(step, product, rest.begin);
    if (product.batch == 1) {
      product.w = std::max(gate, up);
      product.y = y + half;
      MultiplyByPhase(step, product, rest.begin);
    }
    SwiGlu(y + (gate < up ? 0 : half), y + (gate < up ? half : 0), y, int64_t{rest.count} * p.width,
           stream());
  }
  RowRange down{0, step.num_tokens};
  if (p.routed != nullptr) {
    const int decode = Of(step).num_decode_rows, prompts = step.num_tokens - decode;
    const bool in_one =
        hopper_ && prompts > 0 && HopperSumProductTakes(p.hidden, p.width, p.routed->top_k);
    if (in_one) {
      HopperSumProduct(
          {SumOf(*p.routed, {decode, prompts}), gate_up_.as<bf16>() + int64_t{decode} * p.width,
           AsMatrix(p.down).data(), p.width},
          stream());
      down.count = decode;
    }
    SumExpertRows(SumOf(*p.routed, down), stream());
  }
  Multiply(step, gate_up_.as<bf16>(), p.width, down, p.down, p.partial, p.hidden, Phase::kPrompt,
           /*fp32_out=*/false, /*accumulate=*/p.routed != nullptr);
}

}  // namespace statetap::cuda
