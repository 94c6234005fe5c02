// Attention of rows that decode: a token of a sequence each, absorbed, over the paged latent cache.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "extractor/backend/cuda/attention.h"

namespace statetap::cuda {

// RotateAndStore for rows that decode, and the absorbed queries with it:
//   cache[slot of t] = c[t] | rotate(k_pe[t], position)
//   absorbed[t][h] = U_hᵀ q_nope[t][h] | rotate(q_pe[t][h], position)
// U_h: the first `nope` rows of head h's nope + v rows of kv_b. Products in fp32, k ascending.
struct RotateAndAbsorbParams {
  RotateAndStoreParams rotate;  // `queries` are read only
  const bf16* kv_b;             // [num_heads, nope + v, kv_lora]
  int v;
};
// Whether the sizes suit: nope a multiple of 16, kv_lora of 64, rows of 16 bytes.
bool Absorbable(int nope, int rope, int kv_lora);
// REQUIRES: Absorbable.
void RotateAndAbsorb(const RotateAndAbsorbParams& params, cudaStream_t stream);

// out[t][h] = sum over j ≤ position of softmax_j(scale · absorbed[t][h] · cache[j]) · c[j].
// The keys of a row in splits, 32 keys at a time, ascending, with a running maximum; softmax in
// fp32, its weights rounded to bf16 for the product. kFolded splits become one by their maxima and
// sums, ascending, then these (online softmax, Milakov and Gimelshein 2018). Where a row's keys are
// cut depends on its own position alone; so do its bits.
inline constexpr int kMaxSplits = 64, kFolded = 8;
inline constexpr int kSplitTokens = 64;  // at once, kFolded times as many where blocks fold
struct DecodeParams {
  const bf16* absorbed;                            // [num_tokens, num_heads, latent_dim]
  const bf16* cache;                               // [pages, page, latent_dim] of the layer
  const int32_t* positions;                        // [num_tokens]
  const int32_t* sequence;                         // [num_tokens]
  const int32_t* page_table;                       // [num_seqs, pages_per_seq]
  int pages_per_seq;                               // no position is behind them
  int num_tokens, num_heads, latent_dim, kv_lora;  // kv_lora ≤ 512
  float scale;
  bf16* out;      // [num_tokens, num_heads, kv_lora]
  float* parts;   // [kSplitTokens · kMaxSplits, num_heads, kv_lora]
  float2* stats;  // [kSplitTokens · kMaxSplits, num_heads]: maximum, sum
};
void AttendDecode(const DecodeParams& params, cudaStream_t stream);

}  // namespace statetap::cuda
