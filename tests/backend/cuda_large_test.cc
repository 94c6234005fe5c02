// Fault class 12: more than 65,535 rows, more than 2^31 elements. Everything is zero but a few
// rows, which must come out as they do alone.
#include <cstring>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/gemm.h"
#include "extractor/backend/cuda/rows.h"
#include "tests/support/gpu.h"

namespace statetap::cuda {
namespace {

constexpr int kRows = 70'001, kWidth = 30'720;  // 2^31 + 2.9 million values
constexpr size_t kCount = size_t{kRows} * kWidth;

// Zeroed; 4.3 GB of bf16.
class Sheet {
 public:
  explicit Sheet(size_t count = kCount) : memory_(count * sizeof(bf16), /*zeroed=*/true) {}
  bf16* data() const { return memory_.as<bf16>(); }
  void SetRow(int64_t row, const std::vector<uint16_t>& bits) {
    CopyIn(data() + row * kWidth, bits.data(), bits.size() * 2);
  }
  std::vector<uint16_t> Row(int64_t row) const {
    std::vector<uint16_t> bits(kWidth);
    Check(cudaDeviceSynchronize());
    Check(cudaMemcpy(bits.data(), data() + row * kWidth, bits.size() * 2, cudaMemcpyDeviceToHost));
    return bits;
  }

 private:
  DeviceBuffer memory_;
};

std::vector<uint16_t> SomeRow(uint32_t seed) {
  std::vector<uint16_t> bits;
  for (uint32_t i = 0; i < kWidth; ++i) {
    seed = seed * 1664525 + 1013904223;
    bits.push_back(FloatToBf16(static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f));
  }
  return bits;
}

const std::vector<int> kMarked = {0, 65'534, 65'535, 65'536, 69'999, kRows - 1};

bool Enough() {
  size_t free = 0, total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess && free > size_t{20} << 30;
}

#define SKIP_WITHOUT_ROOM() \
  SKIP_WITHOUT_GPU();       \
  if (!Enough()) GTEST_SKIP() << "less than 20 GiB of GPU memory are free: not tested"

TEST(CudaLargeTest, SumAddNorm) {
  SKIP_WITHOUT_ROOM();
  const Stream stream;
  Sheet partial, residual, normed;
  const std::vector<float> ones(kWidth, 1.0f);
  const testing::DeviceArray<float> weight(ones);
  const auto run = [&](const bf16* from, bf16* to, bf16* norm, int rows) {
    SumAddNormParams p{};
    p.partial[0] = from;
    p.world = 1;
    p.num_rows = rows;
    p.hidden = kWidth;
    p.residual = to;
    p.weight = weight.data();
    p.eps = 1e-5f;
    p.normed = norm;
    SumAddNorm(p, stream.get());
    Check(cudaStreamSynchronize(stream.get()));
  };
  for (const int row : kMarked) partial.SetRow(row, SomeRow(static_cast<uint32_t>(row)));
  run(partial.data(), residual.data(), normed.data(), kRows);
  for (const int row : kMarked) {
    Sheet alone(kWidth), sum(kWidth), norm(kWidth);
    alone.SetRow(0, SomeRow(static_cast<uint32_t>(row)));
    run(alone.data(), sum.data(), norm.data(), 1);
    EXPECT_EQ(residual.Row(row), SomeRow(static_cast<uint32_t>(row))) << row;
    EXPECT_EQ(normed.Row(row), norm.Row(0)) << row;
  }
  EXPECT_EQ(residual.Row(kRows - 3), std::vector<uint16_t>(kWidth, 0));
}

TEST(CudaLargeTest, EmbedRows) {
  SKIP_WITHOUT_ROOM();
  const Stream stream;
  Sheet table, y;
  std::vector<int32_t> ids(kRows, 1);
  for (const int row : kMarked) {
    table.SetRow(row, SomeRow(static_cast<uint32_t>(row)));
    ids[static_cast<size_t>(kRows - 1 - row)] = row;
  }
  const testing::DeviceArray<int32_t> device_ids(ids);
  EmbedRows({device_ids.data(), table.data(), 0, kRows, y.data(), kRows, kWidth}, stream.get());
  for (const int row : kMarked)
    EXPECT_EQ(y.Row(kRows - 1 - row), SomeRow(static_cast<uint32_t>(row))) << row;
  EXPECT_EQ(y.Row(2), std::vector<uint16_t>(kWidth, 0));
}

TEST(CudaLargeTest, SwiGlu) {
  SKIP_WITHOUT_ROOM();
  const Stream stream;
  Sheet gate, up;
  for (const int row : kMarked) {
    gate.SetRow(row, SomeRow(static_cast<uint32_t>(row)));
    up.SetRow(row, SomeRow(99));
  }
  SwiGlu(gate.data(), up.data(), gate.data(), static_cast<int64_t>(kCount), stream.get());
  for (const int row : kMarked) {
    Sheet alone(kWidth), other(kWidth);
    alone.SetRow(0, SomeRow(static_cast<uint32_t>(row)));
    other.SetRow(0, SomeRow(99));
    Check(cudaDeviceSynchronize());
    SwiGlu(alone.data(), other.data(), alone.data(), kWidth, stream.get());
    EXPECT_EQ(gate.Row(row), alone.Row(0)) << row;
  }
}

// Products with many rows, by cuBLASLt and by the plain kernel (odd K).
TEST(CudaLargeTest, Gemm) {
  SKIP_WITHOUT_ROOM();
  const Stream stream;
  Gemm gemm;
  for (const int k : {64, 7}) {
    Sheet y;
    std::vector<uint16_t> x(size_t{kRows} * static_cast<size_t>(k)),
        w(size_t{kWidth} * static_cast<size_t>(k));
    for (const int row : kMarked) {
      const auto values = SomeRow(static_cast<uint32_t>(row));
      std::copy_n(values.begin(), k, x.begin() + int64_t{row} * k);
    }
    const auto values = SomeRow(5);
    for (size_t i = 0; i < w.size(); ++i) w[i] = values[i % values.size()];
    const testing::DeviceArray<uint16_t> device_x(x), device_w(w);
    const auto* xs = reinterpret_cast<const bf16*>(device_x.data());
    const auto* ws = reinterpret_cast<const bf16*>(device_w.data());
    gemm.Run({xs, k, ws, k, y.data(), kWidth, kRows, kWidth, k}, stream.get());
    for (const int row : kMarked) {
      const auto got = y.Row(row);
      for (const int column : {0, 1, 12'345, kWidth - 1}) {
        double sum = 0;
        for (int i = 0; i < k; ++i) {
          sum += double{Bf16ToFloat(x[static_cast<size_t>(int64_t{row} * k + i)])} *
                 Bf16ToFloat(w[static_cast<size_t>(int64_t{column} * k + i)]);
        }
        EXPECT_NEAR(Bf16ToFloat(got[static_cast<size_t>(column)]), sum, 0.02 + 0.01 * std::abs(sum))
            << row << ", " << column << ", K " << k;
      }
    }
    EXPECT_EQ(y.Row(kRows - 3), std::vector<uint16_t>(kWidth, 0));
  }
}

}  // namespace
}  // namespace statetap::cuda
