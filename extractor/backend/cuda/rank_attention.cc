// A rank's attention: which rows take which form, and the launches.
#include <algorithm>

#include "extractor/backend/cuda/decode.h"
#include "extractor/backend/cuda/rank.h"

namespace statetap::cuda {
void CudaBackend::PlanAttention(const StepPlan& plan) {
  std::vector<AttentionTile> large;
  tiles_.clear();
  decode_runs_.clear();
  key_runs_.clear();
  prompt_tiles_.clear();
  prompt_rounds_.clear();
  int absorbed_begin = plan.num_tokens(), absorbed_end = 0;
  num_decode_rows_ = 0;
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
      const bool in_front = num_decode_rows_ == first;  // the scheduler puts them there
      if (in_front) num_decode_rows_ = end;
      if (!decode_runs_.empty() && decode_runs_.back().begin + decode_runs_.back().count == first) {
        decode_runs_.back().count += end - first;
      } else {
        decode_runs_.push_back({first, end - first});
      }
      if (in_front && absorbable_) continue;
    }
    if (!decodes && expandable_) {
      PlanPrompt(plan, first, end);
      continue;
    }
    absorbed_begin = std::min(absorbed_begin, first);
    absorbed_end = end;
    if (decodes) continue;
    // Short runs go to the small form, which wastes less of a block on them.
    const bool is_large = forms_.large_tokens > 0 && end - first > forms_.small_tokens;
    const int tokens = is_large ? forms_.large_tokens : forms_.small_tokens;
    for (int t = first; t < end; t += tokens)
      (is_large ? large : tiles_).push_back({t, std::min(tokens, end - t)});
  }
  absorbed_rows_ = {absorbed_begin, std::max(0, absorbed_end - absorbed_begin)};
  num_small_tiles_ = static_cast<int>(tiles_.size());
  tiles_.insert(tiles_.end(), large.begin(), large.end());
  for (const PromptRound& round : prompt_rounds_)
    OrderPromptTiles(std::span(prompt_tiles_).subspan(round.first_tile, round.num_tiles),
                     expanded_.size() / static_cast<size_t>(prompt_keys_));
}

// Tokens [first, end) of the step, of one sequence: all its keys so far, and its query tiles.
void CudaBackend::PlanPrompt(const StepPlan& plan, int first, int end) {
  const int position = plan.positions[static_cast<size_t>(first)], keys = position + end - first;
  if (prompt_rounds_.empty() || prompt_rounds_.back().keys + keys > prompt_keys_)
    prompt_rounds_.push_back({key_runs_.size(), 0, prompt_tiles_.size(), 0, 0});
  PromptRound& round = prompt_rounds_.back();
  for (int key = 0; key < keys; key += kKeysARun) {
    key_runs_.push_back({plan.sequence[static_cast<size_t>(first)], key,
                         std::min(kKeysARun, keys - key), round.keys + key});
    ++round.num_runs;
  }
  for (int t = first; t < end; t += kPromptTileTokens) {
    prompt_tiles_.push_back(
        {t, std::min(kPromptTileTokens, end - t), position + t - first, round.keys});
    ++round.num_tiles;
  }
  round.keys += keys;
}

void CudaBackend::Attention(const Step& step, const AttentionParams& p) {
  if (replays_) return;
  const int head_dim = p.nope_dim + p.rope_dim, latent_dim = p.kv_lora + p.rope_dim;
  const int64_t row = p.query_dim + latent_dim, heads = p.num_heads;
  const auto* latents = static_cast<const bf16*>(p.latents);
  auto* cache = cache_.as<bf16>() + int64_t{p.layer} * num_pages_ * kPageTokens * cache_width_;
  Multiply(latents, row, {0, step.num_tokens}, p.q_b, queries_.as<bf16>(), heads * head_dim);
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
  if (absorbable_ && num_decode_rows_ > 0) {
    rotate.num_tokens = num_decode_rows_;
    RotateAndAbsorb({rotate, AsMatrix(p.kv_b).data(), p.v_dim}, stream());
    const int64_t done = num_decode_rows_;
    rotate.latents += done * row;
    rotate.queries += done * heads * head_dim;
    rotate.absorbed += done * heads * latent_dim;
    rotate.positions += done;
    rotate.sequence += done;
    rotate.num_tokens = step.num_tokens - num_decode_rows_;
  }
  RotateAndStore(rotate, stream());
  AttendAbsorbed(step, p, cache);
  // After the absorbed rows, whose range may hold prompts too.
  if (!prompt_rounds_.empty()) AttendExpanded(step, p, cache);
  MakePartial(step, [&](RowRange rows) {
    const int64_t width = heads * p.v_dim;
    Multiply(heads_.as<bf16>() + rows.begin * width, width, rows, p.o,
             static_cast<bf16*>(p.partial) + int64_t{rows.begin} * p.hidden, p.hidden);
  });
}

void CudaBackend::AttendAbsorbed(const Step& step, const AttentionParams& p, const bf16* cache) {
  const int latent_dim = p.kv_lora + p.rope_dim, head_dim = p.nope_dim + p.rope_dim;
  const int64_t heads = p.num_heads;
  const int64_t up_rows = int64_t{p.nope_dim + p.v_dim} * p.kv_lora;  // of kv_b, a head
  const bf16* kv_b = AsMatrix(p.kv_b).data();
  {
    const int64_t first = absorbed_rows_.begin;
    GemmParams absorb{queries_.as<bf16>() + first * heads * head_dim,
                      heads * head_dim,
                      kv_b,
                      p.kv_lora,
                      absorbed_.as<bf16>() + first * heads * latent_dim,
                      heads * latent_dim,
                      absorbed_rows_.count,
                      p.kv_lora,
                      p.nope_dim};
    absorb.w_by_k = true;
    absorb.batch = p.num_heads;
    absorb.x_batch = head_dim;
    absorb.w_batch = up_rows;
    absorb.y_batch = latent_dim;
    MultiplyByPhase(absorb, absorbed_rows_.begin);
  }
  for (const RowRange& run : decode_runs_) {
    AttendDecode(
        {absorbed_.as<bf16>() + run.begin * heads * latent_dim, cache, step.positions + run.begin,
         step.sequence + run.begin, step.page_table, step.pages_per_seq, run.count, p.num_heads,
         latent_dim, p.kv_lora, p.scale, attended_.as<bf16>() + run.begin * heads * p.kv_lora,
         split_parts_.as<float>(), split_stats_.as<float2>()},
        stream());
  }
  Attend({absorbed_.as<bf16>(), cache, step.positions, step.sequence, step.page_table,
          step.pages_per_seq, device_tiles_, num_small_tiles_,
          static_cast<int>(tiles_.size()) - num_small_tiles_, p.num_heads, latent_dim, p.kv_lora,
          p.scale, attended_.as<bf16>()},
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
    MultiplyByPhase(product, rows.begin);
  };
  if (absorbable_) values({0, num_decode_rows_});
  values(absorbed_rows_);
}

void CudaBackend::AttendExpanded(const Step& step, const AttentionParams& p, const bf16* cache) {
  const int latent_dim = p.kv_lora + p.rope_dim;
  const int64_t expanded_dim = int64_t{p.num_heads} * (p.nope_dim + p.v_dim);
  for (const PromptRound& round : prompt_rounds_) {
    CollectKeys({cache, step.page_table, step.pages_per_seq, latent_dim, p.kv_lora,
                 device_key_runs_ + round.first_run, static_cast<int>(round.num_runs),
                 key_latents_.as<bf16>()},
                stream());
    const DeviceMatrix& kv_b = AsMatrix(p.kv_b);
    gemm_.Run({key_latents_.as<bf16>(), latent_dim, kv_b.data(), kv_b.cols(), expanded_.as<bf16>(),
               expanded_dim, round.keys, static_cast<int>(kv_b.rows()), p.kv_lora},
              stream());
    const AttendPromptsParams prompts{queries_.as<bf16>(),
                                      expanded_.as<bf16>(),
                                      key_latents_.as<bf16>(),
                                      device_prompt_tiles_ + round.first_tile,
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
