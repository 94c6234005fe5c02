// A rank's attention: which rows take which form, and the launches.
#include <algorithm>

#include "extractor/backend/cuda/decode.h"
#include "extractor/backend/cuda/rank.h"

namespace statetap::cuda {
void CudaBackend::PlanAttention(const StepPlan& plan, Planned& planned) const {
  std::vector<AttentionTile> large;
  planned.tiles.clear();
  planned.decode_runs.clear();
  planned.key_runs.clear();
  planned.prompt_tiles.clear();
  planned.prompt_rounds.clear();
  int absorbed_begin = plan.num_tokens(), absorbed_end = 0;
  planned.num_decode_rows = 0;
  for (int first = 0, end; first < plan.num_tokens(); first = end) {
    const auto follows = [&](int t) {
      const auto i = static_cast<size_t>(t);
      return plan.sequence[i] == plan.sequence[i - 1] &&
             plan.positions[i] == plan.positions[i - 1] + 1;
    };
    for (end = first + 1; end < plan.num_tokens() && follows(end);) ++end;
    const auto sequence = static_cast<size_t>(plan.sequence[static_cast<size_t>(first)]);
    const bool decodes = sequence < plan.decodes.size() && plan.decodes[sequence] != 0;
    if (decodes) {
      const bool in_front = planned.num_decode_rows == first;  // the scheduler puts them there
      if (in_front) planned.num_decode_rows = end;
      if (!planned.decode_runs.empty() &&
          planned.decode_runs.back().begin + planned.decode_runs.back().count == first) {
        planned.decode_runs.back().count += end - first;
      } else {
        planned.decode_runs.push_back({first, end - first});
      }
      if (in_front && absorbable_) continue;
    }
    if (!decodes && expandable_) {
      PlanPrompt(plan, first, end, planned);
      continue;
    }
    absorbed_begin = std::min(absorbed_begin, first);
    absorbed_end = end;
    if (decodes) continue;
    // Short runs go to the small form, which wastes less of a block on them.
    const bool is_large = forms_.large_tokens > 0 && end - first > forms_.small_tokens;
    const int tokens = is_large ? forms_.large_tokens : forms_.small_tokens;
    for (int t = first; t < end; t += tokens)
      (is_large ? large : planned.tiles).push_back({t, std::min(tokens, end - t)});
  }
  planned.absorbed_rows = {absorbed_begin, std::max(0, absorbed_end - absorbed_begin)};
  planned.num_small_tiles = static_cast<int>(planned.tiles.size());
  planned.tiles.insert(planned.tiles.end(), large.begin(), large.end());
  for (const PromptRound& round : planned.prompt_rounds)
    OrderPromptTiles(std::span(planned.prompt_tiles).subspan(round.first_tile, round.num_tiles),
                     expanded_.size() / static_cast<size_t>(prompt_keys_));
}

// Tokens [first, end) of the step, of one sequence: all its keys so far, and its query tiles.
void CudaBackend::PlanPrompt(const StepPlan& plan, int first, int end, Planned& planned) const {
  const int position = plan.positions[static_cast<size_t>(first)], keys = position + end - first;
  if (planned.prompt_rounds.empty() || planned.prompt_rounds.back().keys + keys > prompt_keys_)
    planned.prompt_rounds.push_back(
        {planned.key_runs.size(), 0, planned.prompt_tiles.size(), 0, 0});
  PromptRound& round = planned.prompt_rounds.back();
  for (int key = 0; key < keys; key += kKeysARun) {
    planned.key_runs.push_back({plan.sequence[static_cast<size_t>(first)], key,
                                std::min(kKeysARun, keys - key), round.keys + key});
    ++round.num_runs;
  }
  for (int t = first; t < end; t += kPromptTileTokens) {
    planned.prompt_tiles.push_back(
        {t, std::min(kPromptTileTokens, end - t), position + t - first, round.keys});
    ++round.num_tiles;
  }
  round.keys += keys;
}

void CudaBackend::Attention(const Step& step, const AttentionParams& p) {
  if (replays_) return;
  Arrive(step);
  const Planned& planned = Of(step);
  const int head_dim = p.nope_dim + p.rope_dim, latent_dim = p.kv_lora + p.rope_dim;
  const int64_t row = p.query_dim + latent_dim, heads = p.num_heads;
  const auto* latents = static_cast<const bf16*>(p.latents);
  auto* cache = cache_.as<bf16>() + int64_t{p.layer} * num_pages_ * kPageTokens * cache_width_;
  Multiply(step, latents, row, {0, step.num_tokens}, p.q_b, queries_.as<bf16>(), heads * head_dim);
  RotateAndStoreParams rotate{latents,
                              row,
                              p.query_dim,
                              queries_.as<bf16>(),
                              static_cast<const float2*>(p.rotary),
                              step.positions,
                              step.sequence,
                              step.page_table,
                              step.pages_per_seq,
                              cache,
                              absorbed_.as<bf16>(),
                              step.num_tokens,
                              p.num_heads,
                              p.nope_dim,
                              p.rope_dim,
                              p.kv_lora};
  if (absorbable_ && planned.num_decode_rows > 0) {
    rotate.num_tokens = planned.num_decode_rows;
    RotateAndAbsorb({rotate, AsMatrix(p.kv_b).data(), p.v_dim}, stream());
    const int64_t done = planned.num_decode_rows;
    rotate.latents += done * row;
    rotate.queries += done * heads * head_dim;
    rotate.absorbed += done * heads * latent_dim;
    rotate.positions += done;
    rotate.sequence += done;
    rotate.num_tokens = step.num_tokens - planned.num_decode_rows;
  }
  if (planned.absorbed_rows.count == 0) rotate.absorbed = nullptr;
  RotateAndStore(rotate, stream());
  AttendAbsorbed(step, p, cache);
  // After the absorbed rows, whose range may hold prompts too.
  if (!planned.prompt_rounds.empty()) AttendExpanded(step, p, cache);
  Multiply(step, heads_.as<bf16>(), heads * p.v_dim, {0, step.num_tokens}, p.o, p.partial,
           p.hidden);
}

void CudaBackend::AttendAbsorbed(const Step& step, const AttentionParams& p, const bf16* cache) {
  const Planned& planned = Of(step);
  const int latent_dim = p.kv_lora + p.rope_dim, head_dim = p.nope_dim + p.rope_dim;
  const int64_t heads = p.num_heads;
  const int64_t up_rows = int64_t{p.nope_dim + p.v_dim} * p.kv_lora;  // of kv_b, a head
  const bf16* kv_b = AsMatrix(p.kv_b).data();
  {
    const int64_t first = planned.absorbed_rows.begin;
    GemmParams absorb{queries_.as<bf16>() + first * heads * head_dim,
                      heads * head_dim,
                      kv_b,
                      p.kv_lora,
                      absorbed_.as<bf16>() + first * heads * latent_dim,
                      heads * latent_dim,
                      planned.absorbed_rows.count,
                      p.kv_lora,
                      p.nope_dim};
    absorb.w_by_k = true;
    absorb.batch = p.num_heads;
    absorb.x_batch = head_dim;
    absorb.w_batch = up_rows;
    absorb.y_batch = latent_dim;
    MultiplyByPhase(step, absorb, planned.absorbed_rows.begin);
  }
  for (const RowRange& run : planned.decode_runs) {
    AttendDecode(
        {absorbed_.as<bf16>() + run.begin * heads * latent_dim, cache, step.positions + run.begin,
         step.sequence + run.begin, step.page_table, step.pages_per_seq, run.count, p.num_heads,
         latent_dim, p.kv_lora, p.scale, attended_.as<bf16>() + run.begin * heads * p.kv_lora,
         split_parts_.as<float>(), split_stats_.as<float2>()},
        stream());
  }
  Attend({absorbed_.as<bf16>(), cache, step.positions, step.sequence, step.page_table,
          step.pages_per_seq, planned.device_tiles, planned.num_small_tiles,
          static_cast<int>(planned.tiles.size()) - planned.num_small_tiles, p.num_heads, latent_dim,
          p.kv_lora, p.scale, attended_.as<bf16>()},
         stream());
  // Decoding rows in front, then whatever else is absorbed.
  const auto values = [&](RowRange rows) {
    const int64_t first = rows.begin;
    GemmParams product{attended_.as<bf16>() + first * heads * p.kv_lora,
                       heads * p.kv_lora,
                       kv_b + int64_t{p.nope_dim} * p.kv_lora,
                       p.kv_lora,
                       heads_.as<bf16>() + first * heads * p.v_dim,
                       heads * p.v_dim,
                       rows.count,
                       p.v_dim,
                       p.kv_lora};
    product.batch = p.num_heads;
    product.x_batch = p.kv_lora;
    product.w_batch = up_rows;
    product.y_batch = p.v_dim;
    MultiplyByPhase(step, product, rows.begin);
  };
  if (absorbable_) values({0, planned.num_decode_rows});
  values(planned.absorbed_rows);
}

void CudaBackend::AttendExpanded(const Step& step, const AttentionParams& p, const bf16* cache) {
  const Planned& planned = Of(step);
  const int latent_dim = p.kv_lora + p.rope_dim;
  const int64_t expanded_dim = int64_t{p.num_heads} * (p.nope_dim + p.v_dim);
  for (const PromptRound& round : planned.prompt_rounds) {
    CollectKeys({cache, step.page_table, step.pages_per_seq, latent_dim, p.kv_lora,
                 planned.device_key_runs + round.first_run, static_cast<int>(round.num_runs),
                 key_latents_.as<bf16>()},
                stream());
    const DeviceMatrix& kv_b = AsMatrix(p.kv_b);
    gemm_.Run({key_latents_.as<bf16>(), latent_dim, kv_b.data(), kv_b.cols(), expanded_.as<bf16>(),
               expanded_dim, round.keys, static_cast<int>(kv_b.rows()), p.kv_lora},
              stream());
    const AttendPromptsParams prompts{queries_.as<bf16>(),
                                      expanded_.as<bf16>(),
                                      key_latents_.as<bf16>(),
                                      planned.device_prompt_tiles + round.first_tile,
                                      static_cast<int>(round.num_tiles),
                                      p.num_heads,
                                      p.nope_dim,
                                      p.rope_dim,
                                      p.v_dim,
                                      p.kv_lora,
                                      p.scale,
                                      heads_.as<bf16>(),
                                      prompts_taken_.as<int32_t>()};
    if (hopper_ && HopperPromptsTake(p.nope_dim, p.rope_dim, p.v_dim)) {
      if (!prompt_maps_) prompt_maps_ = MakePromptMaps(prompts, limits_.max_tokens, prompt_keys_);
      HopperAttendPrompts(prompts, *prompt_maps_, stream());
    } else {
      AttendPrompts(prompts, stream());
    }
  }
}

}  // namespace statetap::cuda
