// How the routed experts' weights lie on the GPU: blocks of 64 fragment rows × 64 K in the order in
// which the tensor cores take them, for mma.sync m16n8k16 and wgmma m64nNk16 alike (the weights are
// operand A, from registers). One description for packer, kernels, CPU emulation and tests.
//
// A tile is 4 blocks = 256 fragment rows = what one thread block multiplies; its blocks of one K
// step lie one behind the other: [tile][k block][4]. Rows are dealt out so that a thread ends up
// with neighbours: fragment rows q and q + 8 of a warp are gate and up of one column of h (SwiGLU
// in registers), or four neighbouring columns of y over the two blocks of a pair.
//
// An INT4 block is 2,304 bytes: per half of 32 K, 128 lanes × 8 bytes (a word a k16 step; nibbles i
// and i + 4 are the two values of fragment register i), then per half 32 × 2 bf16 scales (rows q
// and q + 8 of a warp). A bf16 block is 8,192 bytes: per k16 step 128 lanes × 4 registers.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define STATETAP_HOST_DEVICE __host__ __device__
#else
#define STATETAP_HOST_DEVICE
#endif

namespace statetap::cuda {

inline constexpr int kBlockK = 64;
inline constexpr int kTileBlocks = 4;
inline constexpr int kTileColumnsOfH = 128;  // gate and up of them: 256 fragment rows
inline constexpr int kTileColumnsOfY = 256;
inline constexpr int kScaleGroup = 32;
inline constexpr int kScalesOffset = 2048;  // within an INT4 block
inline constexpr int kInt4BlockBytes = 2304;
inline constexpr int kBf16BlockBytes = 8192;

// A row of a tile: block 0…3, warp 0…3 of the 64 rows, quad 0…7, half 0 or 1 (row quad or quad + 8
// of the warp's 16).
struct FragmentRow {
  int tile, block, warp, quad, half;
};

// Column `column` of h: its gate row, or its up row.
STATETAP_HOST_DEVICE constexpr FragmentRow GateUpRow(int column, bool up) {
  const int in_pair = column % 64;
  return {column / kTileColumnsOfH, column % kTileColumnsOfH / 64 * 2 + in_pair % 2, in_pair / 16,
          in_pair % 16 / 2, up ? 1 : 0};
}

// Column `column` of y.
STATETAP_HOST_DEVICE constexpr FragmentRow DownRow(int column) {
  const int in_pair = column % 128;
  return {column / kTileColumnsOfY, column % kTileColumnsOfY / 128 * 2 + in_pair % 4 / 2,
          in_pair / 32, in_pair % 32 / 4, in_pair % 2};
}

// Byte offset of the block that holds `row` at K position `k`.
STATETAP_HOST_DEVICE constexpr int64_t BlockOffset(const FragmentRow& row, int k, int k_blocks,
                                                   int block_bytes) {
  return ((int64_t{row.tile} * k_blocks + k / kBlockK) * kTileBlocks + row.block) * block_bytes;
}

// Where a value lies inside its INT4 block: byte offset of a 32-bit word, and the shift in it.
struct NibblePlace {
  int word_offset, shift;
};
STATETAP_HOST_DEVICE constexpr int LaneOf(const FragmentRow& row, int k16) {
  return row.warp * 32 + row.quad * 4 + k16 % 8 / 2;
}
STATETAP_HOST_DEVICE constexpr NibblePlace NibbleOf(const FragmentRow& row, int k) {
  const int in_block = k % kBlockK, step = in_block / 16, k16 = in_block % 16;
  const int fragment_register = row.half + k16 / 8 * 2;
  return {step / 2 * 1024 + LaneOf(row, k16) * 8 + step % 2 * 4,
          4 * (fragment_register + k16 % 2 * 4)};
}
// Byte offset of the bf16 scale of K positions [k / 32 · 32, … + 32).
STATETAP_HOST_DEVICE constexpr int ScaleOffset(const FragmentRow& row, int k) {
  return kScalesOffset + k % kBlockK / kScaleGroup * 128 + (row.warp * 8 + row.quad) * 4 +
         row.half * 2;
}
// Byte offset of a value inside a bf16 block.
STATETAP_HOST_DEVICE constexpr int Bf16Offset(const FragmentRow& row, int k) {
  const int in_block = k % kBlockK, k16 = in_block % 16;
  return ((in_block / 16 * 128 + LaneOf(row, k16)) * 4 + row.half + k16 / 8 * 2) * 4 + k16 % 2 * 2;
}

STATETAP_HOST_DEVICE constexpr int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Sizes of one expert. Rows and columns beyond the real ones are zero.
struct ExpertBlocks {
  int hidden, width, block_bytes;
  constexpr int h_columns() const { return CeilDiv(width, kBlockK) * kBlockK; }  // row stride of h
  constexpr int gate_up_tiles() const { return CeilDiv(width, kTileColumnsOfH); }
  constexpr int gate_up_k_blocks() const { return CeilDiv(hidden, kBlockK); }
  constexpr int down_tiles() const { return CeilDiv(hidden, kTileColumnsOfY); }
  constexpr int down_k_blocks() const { return CeilDiv(width, kBlockK); }
  constexpr int64_t gate_up_bytes() const {
    return int64_t{gate_up_tiles()} * gate_up_k_blocks() * kTileBlocks * block_bytes;
  }
  constexpr int64_t down_bytes() const {
    return int64_t{down_tiles()} * down_k_blocks() * kTileBlocks * block_bytes;
  }
};

}  // namespace statetap::cuda
