// Routed experts: sorting, both grouped products with SwiGLU between them, and the sum over a
// token's experts.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "extractor/backend/cuda/gemm.h"
#include "extractor/backend/cuda/weight_blocks.h"

namespace statetap::cuda {

// Rows of one expert that a thread block multiplies together. `width`: rows rounded up to what the
// kernel's instructions take.
struct TokenTile {
  int32_t slot, first_row, rows, width;
};

// Sorts the pairs (token, k) whose expert is this rank's by slot:
//   token_of_row[row], row_of[token · top_k + k] (−1: another rank's expert), and for each slot its
//   rows in equal tiles of at most tile_rows ≤ 256, wide ones first.
// The order within a slot is left open; no result depends on it. Up to kFewPairs pairs one block
// does it all.
struct SortRowsParams {
  const int32_t* experts;         // [num_tokens, top_k]
  const int32_t* slot_of_expert;  // [num_experts]
  int num_tokens, top_k, num_slots, tile_rows;
  // With num_tokens ≤ tile_rows and few pairs only: each slot that is met gets one tile with a row
  // for every token of the step, met or not, so that its rows need not be gathered.
  bool whole_step = false;
  int32_t* counts;        // [num_slots + 1], zeros between calls: rows of a slot; blocks that ended
  int32_t* next_row;      // [num_slots]: where a slot's next row comes
  int32_t* token_of_row;  // [num_tokens · top_k]
  int32_t* row_of;        // [num_tokens · top_k]
  TokenTile* tiles;       // [num_tokens · top_k / tile_rows + num_slots]
  int32_t* num_tiles;     // [1]
};
inline constexpr int kFewPairs = 16384;
void SortRows(const SortRowsParams& params, cudaStream_t stream);

// to[row_of[token · top_k + k]] = x[token] for all rows that there are. hidden: multiple of 8.
void GatherTokens(const bf16* x, const SortRowsParams& sorted, int hidden, bf16* to,
                  cudaStream_t stream);

// One product for all experts. Gate-up: out = silu(gate x) · (up x); down: out = down x.
struct GroupedProductParams {
  const unsigned char* weights;  // of slot 0
  int64_t slot_bytes;            // from one slot to the next
  int k_blocks, weight_tiles;    // of an expert
  const TokenTile* tiles;
  const int32_t* num_tiles;
  const bf16* x;            // rows x_stride apart
  int64_t x_stride;         // multiple of 8
  int k;                    // columns of x that count, multiple of 8
  const int32_t* row_of_x;  // [rows]: row of x for a row of the tile list; null: the same
  bool from_first_row;      // FewRowsProduct: every tile's rows of x are the first ones
  bf16* out;                // [rows], out_stride apart
  int64_t out_stride;
  int out_columns;  // multiple of 8: columns of weight tiles behind them are not written
  // HopperProduct: which of the pairs of a token tile and a weight tile, from a percentage of them
  // on to before another, in whole rounds of the GPU's blocks.
  int from_percent = 0, to_percent = 100;
};
enum class Product { kGateUp, kDown };
enum class Format { kInt4, kBf16 };
// tile_rows: 16, 32, 64 or, of INT4, 128; the same as in SortRows. A row's bits do not depend on
// it.
void GroupedProduct(const GroupedProductParams& params, Product product, Format format,
                    int tile_rows, cudaStream_t stream);

// The same product for INT4 by wgmma and TMA (sm_90a): tiles of at most tile_rows =
// kHopperTileRows or, where experts have few, kHopperNarrowRows rows, each as wide as it needs. x
// must lie in the order of the rows (row_of_x null) with maps of its own.
inline constexpr int kHopperTileRows = 200, kHopperNarrowRows = 56;
struct RowMaps {  // tensor maps of x by tile width: CUtensorMap, 128 bytes each
  alignas(64) unsigned char maps[kHopperTileRows / 8][128];
};
// x: [rows, columns], contiguous; columns a multiple of 8.
RowMaps MakeRowMaps(const bf16* x, int64_t rows, int columns);
void HopperProduct(const GroupedProductParams& params, const RowMaps& maps, Product product,
                   int tile_rows, cudaStream_t stream);

// The same bits for few rows an expert: tiles of at most tile_rows = 8 or kFewRows rows, which may
// come in any order of width.
inline constexpr int kFewRows = 16;
void FewRowsProduct(const GroupedProductParams& params, const RowMaps& maps, Product product,
                    int tile_rows, cudaStream_t stream);

// partial[t] = sum over k with row_of[t][k] ≥ 0, by ascending expert, of weights[t][k] · y[row];
// fp32, rounded once.
struct SumRowsParams {
  const bf16* y;           // [rows, hidden]
  const int32_t* row_of;   // [num_tokens, top_k]
  const int32_t* experts;  // [num_tokens, top_k]
  const float* weights;    // [num_tokens, top_k]
  int num_tokens, top_k, hidden;
  bf16* partial;  // [num_tokens, hidden]
};
inline constexpr int kMaxTopK = 64;
void SumExpertRows(const SumRowsParams& params, cudaStream_t stream);

// The same sum and a dense product in one pass (sm_90a): partial[t] = w x[t] + the sum, in this
// order, fp32, rounded once. A row's bits do not depend on the rows beside it.
struct SumProductParams {
  SumRowsParams routed;
  const bf16* x;  // [num_tokens, width]
  const bf16* w;  // [hidden, width]
  int width;
};
bool HopperSumProductTakes(int hidden, int width, int top_k);
void HopperSumProduct(const SumProductParams& params, cudaStream_t stream);

}  // namespace statetap::cuda
