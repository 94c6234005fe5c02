// MLA over the paged latent cache, absorbed. The projections around it are products of their own.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "extractor/backend/cuda/gemm.h"
#include "extractor/backend/step_plan.h"

namespace statetap::cuda {

// Writes the step's latents into the cache and rotates the queries' positional part, in place and,
// where there is one, behind the absorbed one:
//   cache[slot of t] = c[t] | rotate(k_pe[t], position)
//   queries[t][h][nope …] = absorbed[t][h][kv_lora …] = rotate(q_pe[t][h], position)
// Rotation is interleaved (pairs 2i, 2i + 1).
struct RotateAndStoreParams {
  const bf16* latents;  // [num_tokens, query_dim + kv_lora + rope], rows latent_stride apart
  int64_t latent_stride;
  int query_dim;
  bf16* queries;              // [num_tokens, num_heads, nope + rope]
  const float2* rotary;       // [positions, rope / 2]: cos, sin
  const int32_t* positions;   // [num_tokens]
  const int32_t* sequence;    // [num_tokens]
  const int32_t* page_table;  // [num_seqs, pages_per_seq]
  int pages_per_seq;
  bf16* cache;     // [pages, page, kv_lora + rope] of the layer
  bf16* absorbed;  // [num_tokens, num_heads, kv_lora + rope]; null: no row is attended absorbed
  int num_tokens, num_heads, nope, rope, kv_lora;
};
void RotateAndStore(const RotateAndStoreParams& params, cudaStream_t stream);

// Consecutive tokens of one sequence that share a thread block, and with it each cache page read.
struct AttentionTile {
  int32_t first_token, count;
};
// How many tokens of a sequence a tile may hold, by the form that attends it.
struct AttentionForms {
  int small_tokens = 1;  // of a tile of 16 rows
  int large_tokens = 0;  // of a tile of 64 rows; 0: this device has not the shared memory for it
};
AttentionForms AttentionFormsOf(int num_heads, int latent_dim);

// out[t][h] = sum over j ≤ position of softmax_j(scale · absorbed[t][h] · cache[j]) · c[j].
// A page at a time, ascending, with a running maximum; softmax in fp32, its weights rounded to bf16
// for the product. A row's arithmetic depends neither on the tile nor on the form it is in.
struct AttendParams {
  const bf16* absorbed;       // [num_tokens, num_heads, latent_dim]
  const bf16* cache;          // [pages, page, latent_dim] of the layer
  const int32_t* positions;   // [num_tokens]
  const int32_t* sequence;    // [num_tokens]
  const int32_t* page_table;  // [num_seqs, pages_per_seq]
  int pages_per_seq;
  const AttentionTile* tiles;  // [num_small, then num_large]
  int num_small, num_large;
  int num_heads, latent_dim, kv_lora;  // kv_lora ≤ 512
  float scale;
  bf16* out;  // [num_tokens, num_heads, kv_lora]
};
void Attend(const AttendParams& params, cudaStream_t stream);

}  // namespace statetap::cuda
