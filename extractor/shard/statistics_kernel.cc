#include "extractor/shard/statistics_kernel.h"

#include "extractor/base/dtype.h"

// x86-64 builds run anywhere; the wider instructions are chosen at run time. Sums run down a
// channel or in a fixed number of lanes, so the width of a vector changes no result.
#if defined(__x86_64__) && defined(__GNUC__)
#define STATETAP_WIDE_VECTORS 1
#else
#define STATETAP_WIDE_VECTORS 0
#endif

namespace statetap {
namespace {

constexpr int kLanes = 16;

[[gnu::always_inline]] inline RowSummary SummarizeRowBody(const uint16_t* row, int hidden) {
  uint16_t any_bits = 0, max_exponent = 0;
  for (int i = 0; i < hidden; ++i) {
    const auto magnitude = static_cast<uint16_t>(row[i] & 0x7fff);
    any_bits |= magnitude;
    max_exponent = magnitude > max_exponent ? magnitude : max_exponent;
  }
  double lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= hidden; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double x = Bf16ToFloat(row[i + lane]);
      lanes[lane] += x * x;
    }
  }
  for (int lane = 0; i < hidden; ++i, ++lane) {
    const double x = Bf16ToFloat(row[i]);
    lanes[lane] += x * x;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return {.sum_of_squares = sum, .finite = max_exponent < 0x7f80, .zero = any_bits == 0};
}

[[gnu::always_inline]] inline RowProducts MultiplyRowsBody(const uint16_t* row,
                                                           const uint16_t* other, int hidden) {
  double dots[kLanes] = {}, squares[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= hidden; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double x = Bf16ToFloat(row[i + lane]), y = Bf16ToFloat(other[i + lane]);
      dots[lane] += x * y;
      squares[lane] += y * y;
    }
  }
  for (int lane = 0; i < hidden; ++i, ++lane) {
    const double x = Bf16ToFloat(row[i]), y = Bf16ToFloat(other[i]);
    dots[lane] += x * y;
    squares[lane] += y * y;
  }
  RowProducts products{0, 0};
  for (int lane = 0; lane < kLanes; ++lane) {
    products.dot += dots[lane];
    products.other_squares += squares[lane];
  }
  return products;
}

// bf16 bits as integers in the order of the values (-0 below +0), and back: the map is its own
// inverse. Compilers vectorise the least of integers, not that of floats, which may be NaN.
[[gnu::always_inline]] inline int16_t OrderKey(uint16_t bits) {
  const auto key = static_cast<int16_t>(bits);
  return static_cast<int16_t>(key ^ ((key >> 15) & 0x7fff));
}
[[gnu::always_inline]] inline uint16_t BitsOfKey(int16_t key) {
  return static_cast<uint16_t>(key ^ ((key >> 15) & 0x7fff));
}

// kRows is a constant so that the loop over rows unrolls and the one over channels vectorises.
template <int kRows>
[[gnu::always_inline]] inline void MergeRowsBody(const uint16_t* const* rows, int hidden,
                                                 int64_t count, const ChannelSums& sums) {
  const uint16_t* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = rows[r];
  double* __restrict mean = sums.mean;
  double* __restrict m2 = sums.m2;
  double* __restrict min = sums.min;
  double* __restrict max = sums.max;
  const double total = static_cast<double>(count + kRows);
  const double new_share = kRows / total;
  const double cross_weight = static_cast<double>(count) * new_share;
  for (int c = 0; c < hidden; ++c) {
    const double shift = Bf16ToFloat(row[0][c]);
    double sum = 0, squares = 0;
    int16_t low = OrderKey(row[0][c]), high = low;
    for (int r = 1; r < kRows; ++r) {
      const double deviation = double{Bf16ToFloat(row[r][c])} - shift;
      sum += deviation;
      squares += deviation * deviation;
      const int16_t key = OrderKey(row[r][c]);
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    const double offset = sum * (1.0 / kRows);
    const double delta = shift + offset - mean[c];
    mean[c] += delta * new_share;
    m2[c] += (squares - sum * offset) + delta * delta * cross_weight;
    const double lowest = Bf16ToFloat(BitsOfKey(low)), highest = Bf16ToFloat(BitsOfKey(high));
    min[c] = lowest < min[c] ? lowest : min[c];
    max[c] = highest > max[c] ? highest : max[c];
  }
}

[[gnu::always_inline]] inline void MergeRowGroupBody(const uint16_t* const* rows, int num_rows,
                                                     int hidden, int64_t count,
                                                     const ChannelSums& sums) {
  if (num_rows == kRowsPerGroup) return MergeRowsBody<kRowsPerGroup>(rows, hidden, count, sums);
  int merged = 0;
  const auto rows_left = [&] { return num_rows - merged; };
  for (; rows_left() >= 4; merged += 4)
    MergeRowsBody<4>(rows + merged, hidden, count + merged, sums);
  for (; rows_left() >= 1; merged += 1)
    MergeRowsBody<1>(rows + merged, hidden, count + merged, sums);
}

#if STATETAP_WIDE_VECTORS
#define STATETAP_AVX512 \
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]]

STATETAP_AVX512 RowSummary SummarizeRowAvx512(const uint16_t* row, int hidden) {
  return SummarizeRowBody(row, hidden);
}
[[gnu::target("avx2")]] RowSummary SummarizeRowAvx2(const uint16_t* row, int hidden) {
  return SummarizeRowBody(row, hidden);
}
STATETAP_AVX512 RowProducts MultiplyRowsAvx512(const uint16_t* row, const uint16_t* other,
                                               int hidden) {
  return MultiplyRowsBody(row, other, hidden);
}
[[gnu::target("avx2")]] RowProducts MultiplyRowsAvx2(const uint16_t* row, const uint16_t* other,
                                                     int hidden) {
  return MultiplyRowsBody(row, other, hidden);
}
STATETAP_AVX512 void MergeRowGroupAvx512(const uint16_t* const* rows, int num_rows, int hidden,
                                         int64_t count, const ChannelSums& sums) {
  MergeRowGroupBody(rows, num_rows, hidden, count, sums);
}
[[gnu::target("avx2")]] void MergeRowGroupAvx2(const uint16_t* const* rows, int num_rows,
                                               int hidden, int64_t count, const ChannelSums& sums) {
  MergeRowGroupBody(rows, num_rows, hidden, count, sums);
}
bool HasAvx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}
bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

}  // namespace

RowSummary SummarizeRow(std::span<const uint16_t> row) {
  const int hidden = static_cast<int>(row.size());
#if STATETAP_WIDE_VECTORS
  if (HasAvx512()) return SummarizeRowAvx512(row.data(), hidden);
  if (HasAvx2()) return SummarizeRowAvx2(row.data(), hidden);
#endif
  return SummarizeRowBody(row.data(), hidden);
}

RowProducts MultiplyRows(std::span<const uint16_t> row, std::span<const uint16_t> other) {
  const int hidden = static_cast<int>(row.size());
#if STATETAP_WIDE_VECTORS
  if (HasAvx512()) return MultiplyRowsAvx512(row.data(), other.data(), hidden);
  if (HasAvx2()) return MultiplyRowsAvx2(row.data(), other.data(), hidden);
#endif
  return MultiplyRowsBody(row.data(), other.data(), hidden);
}

void MergeRowGroup(const uint16_t* const* rows, int num_rows, int hidden, int64_t count,
                   const ChannelSums& sums) {
#if STATETAP_WIDE_VECTORS
  if (HasAvx512()) return MergeRowGroupAvx512(rows, num_rows, hidden, count, sums);
  if (HasAvx2()) return MergeRowGroupAvx2(rows, num_rows, hidden, count, sums);
#endif
  MergeRowGroupBody(rows, num_rows, hidden, count, sums);
}

}  // namespace statetap
