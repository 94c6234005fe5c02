// MLA in the expanded form, for prompts: keys and values of each head from the latents, then plain
// attention, a third of the absorbed form's arithmetic.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <span>

#include "extractor/backend/cuda/gemm.h"

namespace statetap::cuda {

// Whether the kernel takes a model of these sizes.
bool Expandable(int nope, int rope, int v, int kv_lora);

// Cache rows of one sequence that are laid out again, one behind the other.
struct KeyRun {
  int32_t sequence, first_key, count;  // positions [first_key, first_key + count)
  int32_t row;                         // of `latents` for the first of them
};
// latents[row + i] = cache row of position first_key + i. Runs of at most kKeysARun keys.
// A key with a value that is not finite becomes zero, and NaN in its rotated part: rows that see it
// become NaN by their scores, and those in front of it, whose weight for it is 0, keep their bits
// (0 · NaN is NaN).
inline constexpr int kKeysARun = 16;
struct CollectKeysParams {
  const bf16* cache;          // [pages, page, latent_dim] of the layer
  const int32_t* page_table;  // [num_seqs, pages_per_seq]
  int pages_per_seq, latent_dim, kv_lora;
  const KeyRun* runs;
  int num_runs;
  bf16* latents;  // [rows, latent_dim]
};
void CollectKeys(const CollectKeysParams& params, cudaStream_t stream);

// Up to kPromptTileTokens consecutive tokens of one sequence.
struct PromptTile {
  int32_t first_token, count, first_position;
  int32_t key_row;  // row of position 0 in `latents` and `expanded`
};
inline constexpr int kPromptTileTokens = 128;
// The order in which tiles are begun best: those of a few neighbouring sequences together, so that
// what runs at a time finds its keys (of key_bytes in `expanded`) in the L2 cache; among these,
// those with most keys first, as they would be last to end.
void OrderPromptTiles(std::span<PromptTile> tiles, size_t key_bytes);

// out[t][h] = sum over j ≤ position of softmax_j(scale · (q_nope · k_j + q_pe · k_pe_j)) · v_j. 64
// keys at a time, ascending, with a running maximum; softmax in fp32, its weights rounded to bf16
// for the product. A row's arithmetic does not depend on the tile that it is in.
struct AttendPromptsParams {
  const bf16* queries;   // [num_tokens, num_heads, nope + rope], rotated
  const bf16* expanded;  // [rows, num_heads, nope + v]: keys' part without position, values
  const bf16* latents;   // [rows, kv_lora + rope]: the keys' rotated part behind kv_lora
  const PromptTile* tiles;
  int num_tiles, num_heads, nope, rope, v, kv_lora;
  float scale;
  bf16* out;       // [num_tokens, num_heads, v]
  int32_t* taken;  // [2], HopperAttendPrompts: zeros before and after
};
void AttendPrompts(const AttendPromptsParams& params, cudaStream_t stream);

// The same by wgmma and TMA (sm_90a), 128 keys at a time: heads of 128 + 64 and 128, as Kimi-K2 and
// DeepSeek-V3 have them. Every row of `expanded` must be finite, also where no token sees it.
bool HopperPromptsTake(int nope, int rope, int v);
struct PromptMaps {  // CUtensorMap of queries, expanded, latents
  alignas(64) unsigned char maps[3][128];
};
// For params whose pointers and sizes are these: rows of queries, of expanded and latents.
PromptMaps MakePromptMaps(const AttendPromptsParams& params, int64_t num_tokens, int64_t num_keys);
void HopperAttendPrompts(const AttendPromptsParams& params, const PromptMaps& maps,
                         cudaStream_t stream);

}  // namespace statetap::cuda
