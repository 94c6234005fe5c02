// The block layout of the routed experts, without a GPU: pack by it, read as the kernels read,
// multiply as the tensor cores do, and compare with a plain product.
#include "extractor/backend/cuda/weight_blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "extractor/base/dtype.h"

namespace statetap::cuda {
namespace {

std::mt19937 random_engine(7);  // NOLINT: one seed a run keeps failures repeatable

// A projection as the checkpoint has it: nibbles and bf16 scales.
struct Projected {
  int rows, columns;
  std::vector<int> nibbles;      // [rows, columns], 0…15
  std::vector<uint16_t> scales;  // [rows, columns / 32]
  float At(int row, int k) const {
    const auto r = static_cast<size_t>(row), c = static_cast<size_t>(k),
               n = static_cast<size_t>(columns);
    const float value =
        static_cast<float>(nibbles[r * n + c] - 8) * Bf16ToFloat(scales[(r * n + c) / kScaleGroup]);
    return Bf16ToFloat(FloatToBf16(value));
  }
};

Projected RandomProjection(int rows, int columns) {
  Projected p{rows, columns, {}, {}};
  for (int i = 0; i < rows * columns; ++i)
    p.nibbles.push_back(static_cast<int>(random_engine() % 16));
  for (int i = 0; i < rows * columns / kScaleGroup; ++i)
    p.scales.push_back(FloatToBf16(std::uniform_real_distribution<float>(0.5f, 2)(random_engine)));
  return p;
}

template <typename RowOf>
void Pack(const Projected& p, const RowOf& row_of, int k_blocks, std::vector<unsigned char>& to) {
  for (int r = 0; r < p.rows; ++r) {
    const FragmentRow row = row_of(r);
    for (int k = 0; k < p.columns; ++k) {
      unsigned char* block = to.data() + BlockOffset(row, k, k_blocks, kInt4BlockBytes);
      const NibblePlace place = NibbleOf(row, k);
      uint32_t word;
      std::memcpy(&word, block + place.word_offset, 4);
      const auto i =
          static_cast<size_t>(r) * static_cast<size_t>(p.columns) + static_cast<size_t>(k);
      word |= static_cast<uint32_t>(p.nibbles[i]) << place.shift;
      std::memcpy(block + place.word_offset, &word, 4);
      std::memcpy(block + ScaleOffset(row, k), &p.scales[i / kScaleGroup], 2);
    }
  }
}

float Dequantise(uint32_t word, int nibble, uint16_t scale) {
  const int value = static_cast<int>(word >> (4 * nibble) & 15u) - 8;
  return Bf16ToFloat(FloatToBf16(static_cast<float>(value) * Bf16ToFloat(scale)));
}

// Sums of one weight tile with one token, as a thread block holds them: [block][warp][quad][half].
// Every lane takes its word and scale as the kernels do; its fragment registers are the values that
// m16n8k16 and m64nNk16 define for operand A.
std::vector<double> EmulateTile(const std::vector<unsigned char>& memory, int tile, int k_blocks,
                                const std::vector<float>& x) {
  std::vector<double> sums(kTileBlocks * 4 * 8 * 2, 0);
  for (int kb = 0; kb < k_blocks; ++kb) {
    for (int b = 0; b < kTileBlocks; ++b) {
      const unsigned char* block =
          memory.data() + ((int64_t{tile} * k_blocks + kb) * kTileBlocks + b) * kInt4BlockBytes;
      for (int step = 0; step < 4; ++step) {
        for (int thread = 0; thread < 128; ++thread) {
          const int warp = thread / 32, quad = thread % 32 / 4, t = thread % 4;
          uint32_t word;
          std::memcpy(&word, block + step / 2 * 1024 + thread * 8 + step % 2 * 4, 4);
          uint16_t scales[2];
          std::memcpy(scales, block + kScalesOffset + step / 2 * 128 + (warp * 8 + quad) * 4, 4);
          for (int reg = 0; reg < 4; ++reg) {
            const int half = reg % 2;
            for (int j = 0; j < 2; ++j) {
              const auto k =
                  static_cast<size_t>(kb * kBlockK + step * 16 + reg / 2 * 8 + t * 2 + j);
              if (k >= x.size()) continue;
              sums[static_cast<size_t>(((b * 4 + warp) * 8 + quad) * 2 + half)] +=
                  double{Dequantise(word, reg + 4 * j, scales[half])} * x[k];
            }
          }
        }
      }
    }
  }
  return sums;
}

double SumOf(const std::vector<double>& sums, int block, int warp, int quad, int half) {
  return sums[static_cast<size_t>(((block * 4 + warp) * 8 + quad) * 2 + half)];
}

std::vector<float> RandomTokens(int columns) {
  std::vector<float> x;
  for (int i = 0; i < columns; ++i) x.push_back(std::normal_distribution<float>()(random_engine));
  return x;
}

double Product(const Projected& p, int row, const std::vector<float>& x) {
  double sum = 0;
  for (int k = 0; k < p.columns; ++k) sum += double{p.At(row, k)} * x[static_cast<size_t>(k)];
  return sum;
}

TEST(WeightBlocksTest, EveryNibbleAndScaleHasItsOwnPlace) {
  std::set<std::pair<int64_t, int>> places;
  std::set<int64_t> scales, values;
  for (int column = 0; column < kTileColumnsOfH; ++column) {
    for (const bool up : {false, true}) {
      const FragmentRow row = GateUpRow(column, up);
      EXPECT_EQ(row.tile, 0);
      for (int k = 0; k < kBlockK; ++k) {
        const int64_t block = BlockOffset(row, k, 1, kInt4BlockBytes);
        const NibblePlace place = NibbleOf(row, k);
        EXPECT_LT(place.word_offset, kScalesOffset);
        EXPECT_TRUE(places.emplace(block + place.word_offset, place.shift).second);
        EXPECT_LT(ScaleOffset(row, k), kInt4BlockBytes);
        scales.insert(block + ScaleOffset(row, k));
        EXPECT_TRUE(
            values.insert(BlockOffset(row, k, 1, kBf16BlockBytes) + Bf16Offset(row, k)).second);
      }
    }
  }
  EXPECT_EQ(places.size(), 256u * 64);
  EXPECT_EQ(scales.size(), 256u * 2);
  EXPECT_EQ(*values.rbegin(), kTileBlocks * kBf16BlockBytes - 2);
  std::set<std::tuple<int, int, int, int>> rows;
  for (int column = 0; column < kTileColumnsOfY; ++column) {
    const FragmentRow row = DownRow(column);
    EXPECT_TRUE(rows.emplace(row.block, row.warp, row.quad, row.half).second);
  }
}

// Gate and up of a column end in one thread; columns, K and tiles that are not full read as zero.
TEST(WeightBlocksTest, GateUpMultipliesToThePlainProduct) {
  for (const auto& [hidden, width] : {std::pair{128, 256}, {64, 32}, {192, 160}}) {
    const ExpertBlocks blocks{hidden, width, kInt4BlockBytes};
    std::vector<unsigned char> memory(static_cast<size_t>(blocks.gate_up_bytes()));
    const Projected gate = RandomProjection(width, hidden), up = RandomProjection(width, hidden);
    Pack(
        gate, [](int c) { return GateUpRow(c, false); }, blocks.gate_up_k_blocks(), memory);
    Pack(
        up, [](int c) { return GateUpRow(c, true); }, blocks.gate_up_k_blocks(), memory);
    const auto x = RandomTokens(hidden);
    for (int tile = 0; tile < blocks.gate_up_tiles(); ++tile) {
      const auto sums = EmulateTile(memory, tile, blocks.gate_up_k_blocks(), x);
      for (int group = 0; group < 2; ++group) {
        for (int warp = 0; warp < 4; ++warp) {
          for (int quad = 0; quad < 8; ++quad) {
            for (int b = 0; b < 2; ++b) {  // as the kernels store
              const int column = tile * kTileColumnsOfH + group * 64 + warp * 16 + quad * 2 + b;
              const bool real = column < width;
              EXPECT_NEAR(SumOf(sums, group * 2 + b, warp, quad, 0),
                          real ? Product(gate, column, x) : 0, 1e-9);
              EXPECT_NEAR(SumOf(sums, group * 2 + b, warp, quad, 1),
                          real ? Product(up, column, x) : 0, 1e-9);
            }
          }
        }
      }
    }
  }
}

TEST(WeightBlocksTest, DownMultipliesToThePlainProduct) {
  for (const auto& [hidden, width] : {std::pair{128, 256}, {512, 32}, {264, 96}}) {
    const ExpertBlocks blocks{hidden, width, kInt4BlockBytes};
    std::vector<unsigned char> memory(static_cast<size_t>(blocks.down_bytes()));
    const Projected down = RandomProjection(hidden, width);
    Pack(
        down, [](int c) { return DownRow(c); }, blocks.down_k_blocks(), memory);
    const auto h = RandomTokens(width);
    for (int tile = 0; tile < blocks.down_tiles(); ++tile) {
      const auto sums = EmulateTile(memory, tile, blocks.down_k_blocks(), h);
      for (int group = 0; group < 2; ++group) {
        for (int warp = 0; warp < 4; ++warp) {
          for (int quad = 0; quad < 8; ++quad) {
            for (int i = 0; i < 4; ++i) {  // four neighbouring columns
              const int column = tile * kTileColumnsOfY + group * 128 + warp * 32 + quad * 4 + i;
              EXPECT_NEAR(SumOf(sums, group * 2 + i / 2, warp, quad, i % 2),
                          column < hidden ? Product(down, column, h) : 0, 1e-9);
            }
          }
        }
      }
    }
  }
}

TEST(WeightBlocksTest, SizesOfTheRealModel) {
  const ExpertBlocks blocks{7168, 2048, kInt4BlockBytes};
  EXPECT_EQ(blocks.gate_up_bytes() + blocks.down_bytes(), int64_t{3} * 7168 * 2048 * 9 / 16);
  EXPECT_EQ(blocks.gate_up_tiles(), 16);
  EXPECT_EQ(blocks.down_tiles(), 28);
}

}  // namespace
}  // namespace statetap::cuda
