#include "extractor/backend/cpu/matmul.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "extractor/base/vector_clones.h"

namespace statetap::cpu {
namespace {

constexpr int kLanes = 16;
// may_alias and alignment 4: read straight from float arrays.
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

constexpr int64_t kTokenBlock = 64;

inline __attribute__((always_inline)) float Sum(const Lanes& lanes) {
  float part[kLanes];
  std::memcpy(part, &lanes, sizeof(part));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  }
  return part[0];
}

inline __attribute__((always_inline)) void LoadTail(const float* from, int n, Lanes& to) {
  float part[kLanes] = {};
  std::memcpy(part, from, static_cast<size_t>(n) * sizeof(float));
  std::memcpy(&to, part, sizeof(part));
}

template <int kWeights, int kTokens>
inline __attribute__((always_inline)) void Tile(const float* const* w, const float* const* x, int n,
                                                float* out) {
  Lanes sum[kWeights][kTokens] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes token[kTokens];
    for (int t = 0; t < kTokens; ++t) token[t] = *reinterpret_cast<const Lanes*>(x[t] + i);
    for (int r = 0; r < kWeights; ++r) {
      const Lanes weight = *reinterpret_cast<const Lanes*>(w[r] + i);
      for (int t = 0; t < kTokens; ++t) sum[r][t] += weight * token[t];
    }
  }
  if (i < n) {
    for (int r = 0; r < kWeights; ++r) {
      for (int t = 0; t < kTokens; ++t) {
        Lanes weight, token;
        LoadTail(w[r] + i, n - i, weight);
        LoadTail(x[t] + i, n - i, token);
        sum[r][t] += weight * token;
      }
    }
  }
  for (int r = 0; r < kWeights; ++r) {
    for (int t = 0; t < kTokens; ++t) out[r * kTokens + t] = Sum(sum[r][t]);
  }
}

STATETAP_VECTOR_CLONES void Tile2x4(const float* const* w, const float* const* x, int n,
                                    float* out) {
  Tile<2, 4>(w, x, n, out);
}
STATETAP_VECTOR_CLONES void Tile2x1(const float* const* w, const float* const* x, int n,
                                    float* out) {
  Tile<2, 1>(w, x, n, out);
}
STATETAP_VECTOR_CLONES float Dot1(const float* a, const float* b, int n) {
  float out;
  Tile<1, 1>(&a, &b, n, &out);
  return out;
}
STATETAP_VECTOR_CLONES void AxpyClones(float scale, const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] += scale * x[i];
}

STATETAP_VECTOR_CLONES void DotsClones(const float* a, const float* rows, int64_t stride, int count,
                                       int n, float* out) {
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    const float* four[4] = {rows + i * stride, rows + (i + 1) * stride, rows + (i + 2) * stride,
                            rows + (i + 3) * stride};
    Tile<1, 4>(&a, four, n, out + i);
  }
  for (; i < count; ++i) {
    const float* row = rows + i * stride;
    Tile<1, 1>(&a, &row, n, out + i);
  }
}
STATETAP_VECTOR_CLONES void AxpyRowsClones(const float* scales, const float* rows, int64_t stride,
                                           int count, int n, float* y) {
  for (int i = 0; i < count; ++i) {
    const float* row = rows + i * stride;
    for (int j = 0; j < n; ++j) y[j] += scales[i] * row[j];
  }
}

// Two weight rows (the same one twice at an odd end) against a block of tokens.
void MultiplyPair(const MatMulParams& p, const float* const* w, int64_t o, int64_t rows, int64_t t0,
                  int64_t t1) {
  std::array<float, 8> out;
  int64_t t = t0;
  for (; t + 4 <= t1; t += 4) {
    const float* x[4];
    for (int i = 0; i < 4; ++i) x[i] = p.x + (t + i) * p.x_stride;
    Tile2x4(w, x, static_cast<int>(p.cols), out.data());
    for (int64_t r = 0; r < rows; ++r) {
      for (int i = 0; i < 4; ++i)
        p.y[(t + i) * p.y_stride + o + r] = out[static_cast<size_t>(r * 4 + i)];
    }
  }
  for (; t < t1; ++t) {
    const float* x = p.x + t * p.x_stride;
    Tile2x1(w, &x, static_cast<int>(p.cols), out.data());
    for (int64_t r = 0; r < rows; ++r) p.y[t * p.y_stride + o + r] = out[static_cast<size_t>(r)];
  }
}

// Pairs [begin, end) of weight rows against all tokens, a block of tokens at a time so that their
// rows stay in the cache.
void MultiplyPairs(const MatMulParams& p, int64_t begin, int64_t end, float* buffer) {
  const float* w[2] = {buffer, buffer + p.cols};
  for (int64_t t0 = 0; t0 < p.num_rows; t0 += kTokenBlock) {
    const int64_t t1 = std::min(t0 + kTokenBlock, p.num_rows);
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t o = pair * 2, rows = std::min<int64_t>(2, p.out - o);
      for (int64_t r = 0; r < 2; ++r) p.weight(o + std::min(r, rows - 1), buffer + r * p.cols);
      MultiplyPair(p, w, o, rows, t0, t1);
    }
  }
}

}  // namespace

float Dot(const float* a, const float* b, int n) { return Dot1(a, b, n); }
void Axpy(float scale, const float* x, float* y, int n) { AxpyClones(scale, x, y, n); }
void Dots(const float* a, const float* rows, int64_t stride, int count, int n, float* out) {
  DotsClones(a, rows, stride, count, n, out);
}
void AxpyRows(const float* scales, const float* rows, int64_t stride, int count, int n, float* y) {
  AxpyRowsClones(scales, rows, stride, count, n, y);
}

void MatMul(const MatMulParams& params, WorkerPool& pool) { MatMuls({&params, 1}, pool); }

void MatMuls(std::span<const MatMulParams> products, WorkerPool& pool) {
  // Work item i of a product is the pair of weight rows (2i, 2i + 1).
  std::vector<int64_t> first_item = {0};
  int64_t multiplications = 0, widest = 0;
  for (const MatMulParams& p : products) {
    first_item.push_back(first_item.back() + (p.num_rows > 0 ? (p.out + 1) / 2 : 0));
    multiplications += p.num_rows * p.out * p.cols;
    widest = std::max(widest, p.cols);
  }
  const auto work = [&](int64_t begin, int64_t end, int) {
    std::vector<float> buffer(static_cast<size_t>(2 * widest));
    for (size_t i = 0; i < products.size(); ++i) {
      const int64_t from = std::max(begin, first_item[i]), to = std::min(end, first_item[i + 1]);
      if (from < to)
        MultiplyPairs(products[i], from - first_item[i], to - first_item[i], buffer.data());
    }
  };
  // Waking the other threads costs more than a small product.
  constexpr int64_t kWorthSharing = 1 << 18;
  if (multiplications < kWorthSharing) {
    work(0, first_item.back(), 0);
  } else {
    pool.ParallelFor(first_item.back(), work);
  }
}

}  // namespace statetap::cpu
